"""Writes the tables of docs/models.md: features in each family's golden models, and the code that runs it.

    python -m scripts.model_matrix

A golden model is a small random checkpoint with the logits or tokens that transformers computes
(tests/data/golden; tests/data/text_parts for models of which the text part is served). A feature in the
table has therefore been compared with transformers.
"""

from collections.abc import Iterator
from pathlib import Path

from orca_jax.execution.attention_backend import GPU_PATHS, KNOWN_FEATURES, features_of
from orca_jax.families.hf_config import read_hf_config
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.families.registry import FAMILIES

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "models.md"
GOLDEN = ROOT / "tests" / "data" / "golden"
TEXT_PARTS = ROOT / "tests" / "data" / "text_parts"
BEGIN, END = "<!-- made by scripts/model_matrix.py -->\n", "<!-- end -->\n"

_NORMS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
_RESIDUALS = {
    "bare": "no norm before the first attention",
    "pre": "norm before",
    "post": "norm after the sum",
    "both": "norms before and after",
    "after": "norm after",
    "parallel": "parallel, one norm",
    "parallel_two_norms": "parallel, two norms",
}


def golden_models() -> dict[str, list[ModelConfig]]:
    """The models of the golden files, by model_type."""
    models: dict[str, list[ModelConfig]] = {name: [] for name in FAMILIES}
    for path in (*sorted(GOLDEN.glob("*/*golden.npz")), *sorted(TEXT_PARTS.glob("*/golden.json"))):
        found = read_hf_config(path.parent)
        models[found.family.model_type].append(found.model)
    return models


def _every_layer(model: ModelConfig) -> tuple[Layer, ...]:
    return (*model.layers, *(model.encoder.layers if model.encoder else ()))


def _positions(model: ModelConfig, layer: Layer) -> Iterator[str]:
    if model.positions is not None:
        yield "learned"
    if layer.attention is None:
        return
    rotary, scores = layer.attention.rotary, layer.attention.scores
    if scores.alibi is not None:
        yield "ALiBi"
    if scores.relative is not None:
        yield "relative bias"
    if rotary is None and model.positions is None and scores.alibi is None and scores.relative is None:
        yield "layers without"
    if rotary is not None:
        whole = layer.attention.latent is not None or rotary.size == layer.attention.head_size
        yield "rotary" if whole else "partly rotary"
        if rotary.scaling is not None:
            yield rotary.scaling.kind
    if scores.temperature is not None:
        yield "queries scaled by position"


def _layers(layer: Layer) -> Iterator[str]:
    if layer.cross is not None:
        yield "encoder and decoder"
    yield _NORMS[layer.norm.kind]
    yield _RESIDUALS[layer.residual]
    ffn = layer.feed_forward
    if ffn is None or not layer.mixes:
        yield "layers of one part"
    if ffn is not None:
        yield f"gated {ffn.activation}" if ffn.gated else ffn.activation
    if layer.experts is not None:
        yield "experts"
        if layer.experts.shared_size is not None:
            yield "a shared expert"
        if layer.experts.latent_size is not None:
            yield "experts in a latent space"
    if layer.beside is not None:
        yield "experts beside a dense part"
    if layer.input_size is not None:
        yield "an embedding for each layer"
    if layer.has_both:
        yield "attention beside a recurrence"
    if layer.attention is not None and layer.attention.kv_from is not None:
        yield "keys and values of an earlier layer"
    if layer.attention is not None and layer.attention.values_are_keys:
        yield "values that are keys"
    if layer.recurrence is not None:
        yield layer.recurrence.kind.replace("_", " ")
    if layer.attention is not None and (qk_norm := layer.attention.qk_norm) is not None:
        yield "qk-norm after rotation" if qk_norm.after_rotation else "qk-norm"


def _joined(features: Iterator[str]) -> str:
    return ", ".join(dict.fromkeys(features))


def family_rows() -> Iterator[str]:
    """A row for each family."""
    yield "| family | `model_type` | positions | layers | attention | golden models |"
    yield "|---|---|---|---|---|---|"
    for name, models in golden_models().items():
        pairs = [(model, layer) for model in models for layer in dict.fromkeys(_every_layer(model))]
        positions = _joined(each for model, layer in pairs for each in _positions(model, layer))
        layers = _joined(each for _, layer in pairs for each in _layers(layer))
        attention = _joined(each for model in models for each in features_of(model)) or "plain"
        title = FAMILIES[name].title
        yield f"| {title} | `{name}` | {positions} | {layers} | {attention} | {len(models)} |"


def path_rows() -> Iterator[str]:
    """A row for each attention implementation."""
    every = list(dict.fromkeys(feature for known in KNOWN_FEATURES.values() for feature in sorted(known)))
    yield "| attention | runs on | " + " | ".join(every) + " |"
    yield "|---|---|" + "---|" * len(every)
    for kind, known in KNOWN_FEATURES.items():
        if kind == "interpreted":
            continue
        gpus = [path.gpus for path in GPU_PATHS if kind in path.takes]
        runs_on = "; ".join(gpus) or "CPUs"
        yield f"| `{kind}` | {runs_on} | " + " | ".join("yes" if f in known else "no" for f in every) + " |"


def tables() -> str:
    """The text between BEGIN and END."""
    return "\n".join(["", *family_rows(), "", *path_rows(), "", ""])


def main() -> None:
    """Write the tables into the document."""
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    DOCUMENT.write_text(before + BEGIN + tables() + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
