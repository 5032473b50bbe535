"""Detects by the names of its arrays which trainer saved a checkpoint."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from orca_jax.config import Layout
from orca_jax.errors import UnsupportedModel
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import parameter_table
from orca_jax.families.stored_name import StoredName
from orca_jax.families.trainers.easydel import HEAD as EASYDEL_HEAD
from orca_jax.families.trainers.easydel import easydel_names
from orca_jax.families.trainers.gemma import gemma_names, published
from orca_jax.families.trainers.levanter import FLAG as LEVANTER_FLAG
from orca_jax.families.trainers.levanter import levanter_names
from orca_jax.families.trainers.maxtext import maxtext_names
from orca_jax.families.trainers.names import is_gemma
from orca_jax.families.trainers.tunix import tunix_names

# Where each trainer keeps the weights of a step, and with what the names of their arrays begin and end.
ITEMS: dict[Layout, str] = {
    "tunix": "0/model_params",
    "maxtext": "0/items",
    "maxtext-scanned": "0/items",
    "gemma": ".",
    "levanter": "step-0",
    "easydel": ".",
}
_WRITTEN: dict[Layout, tuple[str, str]] = {
    "tunix": ("", ".value"),
    "maxtext": ("params.params.", ""),
    "maxtext-scanned": ("params.params.", ""),
    "gemma": ("", ""),
    "levanter": ("model.", ""),
    "easydel": ("model.", ""),
}
_CORRECTION = ".router.correction"
_KIND = "they have a gated feed-forward layer and an RMSNorm before each part"
_EMBEDDING = re.compile(
    r"(?P<before>.*?)(token_embedder\.embedding|embedder[./]input_embedding|model\.embed_tokens\.embedding|"
    r"embeddings\.token_embeddings\.weight)(?P<after>\.value|\.0)?"  # .0: inside a NamedArray of Haliax
)


@dataclass(frozen=True, slots=True)
class Detected:
    """A trainer's checkpoint: the arrays of each weight, and the beginning of all their names.

    `unused` has arrays that the trainer saves with the weights and does not compute with.
    """

    layout: Layout
    names: dict[str, StoredName]
    prefix: str
    unused: tuple[str, ...] = ()


def detect(model: ModelConfig, stored: Collection[str], interleaved: bool | None = None) -> Detected | None:
    """Detect the layout of arrays with these names; None where it is unknown.

    For `interleaved` see `maxtext_names`. Raises UnsupportedModel where the trainer has no such model.
    """
    found = [match for name in stored if (match := _EMBEDDING.fullmatch(name))]
    if not found:
        return None
    # The optimizer's state has arrays of the same names, at a greater depth.
    match = min(found, key=lambda match: (match["before"].count("."), match["before"]))
    before, after = match["before"], match["after"] or ""

    def some(beginning: str) -> bool:
        return any(name.startswith(before + beginning) for name in stored)

    def with_ends(name: str) -> str:
        return f"{before}{name}{after}"

    rename = with_ends
    unused: tuple[str, ...] = ()
    if "token_embeddings" in match[0]:
        layout: Layout = "levanter"
        unused = tuple(name for name in stored if name.startswith(before) and name.endswith(LEVANTER_FLAG))
    elif "embed_tokens" in match[0]:
        layout = "easydel"
        unused = (with_ends(EASYDEL_HEAD),) if model.embedding.tied else ()
    elif "token_embedder" in match[0]:
        stacked = some("decoder.layers.") or some("decoder.moe_layers.")
        layout = "maxtext-scanned" if stacked else "maxtext"
    elif some("layers."):
        layout = "tunix"
    elif before == "transformer/":
        layout, rename = "gemma", published
    elif some("layer_0."):
        layout = "gemma"
    else:
        return None
    apart = some("transformer.layers.blocks.")
    names = {
        name: _corrections(one, before, stored) if name.endswith(_CORRECTION) else one
        for name, one in _named(model, layout, rename, interleaved, apart=apart).items()
    }
    return Detected(layout, names, before, unused)


def _corrections(expected: StoredName, before: str, stored: Collection[str]) -> StoredName:
    """Find a correction bias: no optimizer changes it, so MaxText may have it in another collection."""
    (name,) = expected.names
    end = f".{name.removeprefix(before)}"
    found = [other for other in stored if other.endswith(end)]
    return replace(expected, names=(found[0],)) if name not in stored and len(found) == 1 else expected


def written_names(
    model: ModelConfig, layout: Layout, interleaved: bool | None = None
) -> dict[str, StoredName]:
    """The arrays of each weight under the names that the trainer saves. Raises UnsupportedModel."""
    before, after = _WRITTEN[layout]
    return _named(model, layout, lambda name: f"{before}{name}{after}", interleaved)


def held_names(model: ModelConfig, layout: Layout) -> dict[str, StoredName]:
    """The arrays of each weight under their names in the trainer's module. Raises UnsupportedModel."""
    return _named(model, layout, str, None)


def _named(
    model: ModelConfig,
    layout: Layout,
    rename: Callable[[str], str],
    interleaved: bool | None,
    *,
    apart: bool = False,
) -> dict[str, StoredName]:
    table = parameter_table(model)
    for layer in model.layers:
        if (
            layer.feed_forward is None
            or not layer.feed_forward.gated
            or layer.norm.kind != "rms_norm"
            or layer.residual not in ("pre", "both")
        ):
            raise UnsupportedModel(f"{layout} is known for models of Llama's and Gemma's kind alone; {_KIND}")
    if layout == "tunix":
        names = tunix_names(model)
    elif layout == "gemma":
        names = gemma_names(model) if is_gemma(model) else {}
    elif layout == "levanter":
        names = levanter_names(model, stacked=not apart)
    elif layout == "easydel":
        names = easydel_names(model)
    else:
        names = maxtext_names(model, scanned=layout == "maxtext-scanned", interleaved=interleaved)
    for name in table:
        if name not in names:
            raise UnsupportedModel(f"{layout} has no model with {name!r}, which this one has")
    return {
        name: replace(names[name], names=tuple(rename(each) for each in names[name].names)) for name in table
    }
