"""Make the golden files: small random models, and the results that Hugging Face computes with them.

The shapes of GPT-2 and OPT are below, those of other families in shapes.py: one line a shape.

Needs `torch` (the CPU build is enough) and `transformers`; the tests that read the files need neither. Each
model gets a directory with a checkpoint (config.json, float32 safetensors) and `golden.npz`, which
tests/device/model/golden.py describes. Weights, prompts and therefore outputs follow from the seed below;
`versions.json` has the versions that made the current files.

The greedy tokens are transformers' own forward pass and argmax over the whole sequence at every step: no
cache, no batch, no padding. They are compared with `generate()` and with the same model in float64 before
anything is written.
"""

# pyright: reportMissingImports=false

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Mistral4ForCausalLM,
    OPTConfig,
)

from scripts.golden.shapes import SHAPES
from scripts.golden.with_torch import GOLDEN, MARGIN, SEED, versions

MAX_OUTPUT = 16
LOGIT_LENGTHS = (1, 7, 23)  # the prompts whose logits at every position are stored
MAX_TOTAL_BYTES = 32_000_000


@dataclass(frozen=True)
class Golden:
    """One model: its transformers config, and the layout of its checkpoint's files."""

    name: str
    config: Any
    shard_bytes: int | None = None  # if set: several files and an index
    bare_names: bool = False  # as in the original GPT-2's file: no prefix, masks among the weights
    generation_config: dict[str, Any] = field(default_factory=dict[str, Any])
    n_prompts: int = 64
    attention: str = "eager"


def _gpt2(**sizes: Any) -> GPT2Config:
    return GPT2Config(bos_token_id=0, eos_token_id=0, **sizes)


def _opt(**sizes: Any) -> OPTConfig:
    return OPTConfig(bos_token_id=2, eos_token_id=2, pad_token_id=1, **sizes)


MODELS = (
    Golden(
        "gpt2-tied-gelu-new",
        _gpt2(vocab_size=257, n_positions=128, n_embd=64, n_layer=3, n_head=4),
        bare_names=True,
    ),
    Golden(
        "gpt2-untied-gelu",
        _gpt2(
            vocab_size=1009,
            n_positions=96,
            n_embd=40,
            n_layer=2,
            n_head=2,
            n_inner=100,
            activation_function="gelu",
            tie_word_embeddings=False,
        ),
        generation_config={"eos_token_id": [0, 7], "bos_token_id": 0},
    ),
    Golden(
        "gpt2-sharded-relu",
        _gpt2(
            vocab_size=131,
            n_positions=256,
            n_embd=128,
            n_layer=2,
            n_head=2,
            n_inner=192,
            activation_function="relu",
            layer_norm_epsilon=1e-6,
        ),
        shard_bytes=500_000,
    ),
    Golden(
        "opt-tied-relu",
        _opt(
            vocab_size=509,
            max_position_embeddings=200,
            hidden_size=48,
            num_hidden_layers=4,
            num_attention_heads=6,
            ffn_dim=128,
        ),
    ),
    Golden(
        "opt-post-norm-projection",
        _opt(
            vocab_size=383,
            max_position_embeddings=128,
            hidden_size=64,
            word_embed_proj_dim=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            ffn_dim=160,
            do_layer_norm_before=False,
        ),
    ),
    Golden(
        "opt-untied-no-bias-gelu",
        _opt(
            vocab_size=263,
            max_position_embeddings=64,
            hidden_size=60,
            num_hidden_layers=2,
            num_attention_heads=3,
            ffn_dim=150,
            activation_function="gelu",
            enable_bias=False,
            tie_word_embeddings=False,
        ),
    ),
    Golden(
        "opt-no-final-norm-projection",
        _opt(
            vocab_size=997,
            max_position_embeddings=80,
            hidden_size=32,
            word_embed_proj_dim=48,
            num_hidden_layers=2,
            num_attention_heads=1,
            ffn_dim=96,
            activation_function="gelu_new",
            tie_word_embeddings=False,
            _remove_final_layer_norm=True,
        ),
    ),
)


def _of_shape(name: str, shape: dict[str, Any]) -> Golden:
    sizes = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, **shape}
    # Falcon's eager attention adds ALiBi twice, because its mask has it too.
    attention = "sdpa" if shape.get("alibi") else "eager"
    return Golden(name, AutoConfig.for_model(**sizes), n_prompts=32, attention=attention)


def class_of(model_type: str) -> Any:
    """The class whose `from_pretrained` loads a decoder; transformers 5.24 does not map Mistral 4."""
    return Mistral4ForCausalLM if model_type == "mistral4" else AutoModelForCausalLM


def draw_weights(model: torch.nn.Module, rng: np.random.Generator) -> None:
    """Fill a model so that its logits are well spread and its greedy text does not collapse to a few tokens.

    Strong layers and positions keep a tied head from returning the input token; the weights after the
    activation are centered, since its positive mean would otherwise push every token in the same direction.
    Every bias and norm is drawn too, so that a loader that confuses two of them is detected.
    """
    conv1d = isinstance(model, GPT2LMHeadModel)  # its layers are stored [in, out]
    # Gemma and Granite multiply embeddings, which would outweigh the layers.
    multiplier = getattr(model.get_input_embeddings(), "scalar_embed_scale", None)
    multiplier = multiplier or getattr(model.config, "embedding_multiplier", 1.0)
    # Gated recurrences enlarge rounding, so what a layer adds is weaker.
    recurrent = any(name.endswith("A_log") for name, _ in model.named_parameters())
    without_final_norm = getattr(model.config, "_remove_final_layer_norm", False)
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        shape = tuple(parameter.shape)
        values = rng.standard_normal(shape, dtype=np.float32)
        one_plus = "RMSNorm" in type(model.get_submodule(name.rpartition(".")[0])).__name__ and not (
            model.get_submodule(name.rpartition(".")[0]).weight.any()
        )  # Gemma's norms scale by 1 + weight, and their weights begin at zero
        if name.endswith("e_score_correction_bias"):  # as small as the scores that it is added to
            values *= 0.1
        elif "wpe" in name or "embed_positions" in name:
            values *= 0.7
        elif any(part in name for part in ("wte", "embed", "lm_head")) and len(shape) == 2:
            values *= 0.35 / np.sqrt(multiplier)
        elif len(shape) == 2:
            fan_in = 0 if conv1d else 1
            if any(part in name for part in ("mlp.c_proj", "fc2", "down_proj", "4h_to_h", "fc_out")):
                values -= values.mean(axis=fan_in, keepdims=True)
            values *= 1.5 / np.sqrt(shape[fan_in])
            outputs = ("o_proj", "out_proj", "down_proj", "fc2_latent_proj")
            if recurrent and any(part in name for part in outputs):
                values *= 0.3
            if without_final_norm and "project_out" in name:
                values *= 0.25
        elif len(shape) == 3:  # a tensor of all experts; some families store them [in, out]
            fan_in = 1 if model.config.model_type in ("gpt_oss", "llama4_text") else 2
            if "down_proj" in name:
                values -= values.mean(axis=fan_in, keepdims=True)
            values *= 1.5 / np.sqrt(shape[fan_in])
            if recurrent and "down_proj" in name:
                values *= 0.3
        elif "ln_" in name or "norm" in name:
            values = values * 0.1 + (1.0 if name.endswith("weight") and not one_plus else 0.0)
            if "embeddings_layernorm" in name:  # smaller, because of the tied head
                values *= 0.3
            if "q_norm" in name and model.config.model_type == "gemma4_text":  # its scores are not divided
                values *= 0.4
        elif name.endswith(("router.scale", "per_expert_scale")):
            values = values * 0.1 + 1.0
        elif name.endswith("A_log"):  # decays that leave something of the first tokens
            values = values * 0.5 - 2.5
        elif not name.endswith("sinks"):  # sinks stay as spread as scores
            values *= 0.1
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))
    for name, buffer in sorted(model.named_buffers(), key=lambda item: item[0]):
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            values = 0.2 * rng.standard_normal(tuple(buffer.shape), dtype=np.float32)
            buffer.copy_(torch.from_numpy(values))
        if name.endswith("layer_scalar"):
            buffer.copy_(
                torch.from_numpy(0.8 + 0.1 * rng.standard_normal(tuple(buffer.shape), dtype=np.float32))
            )


def prompts_of(config: Any, n_prompts: int, rng: np.random.Generator) -> list[np.ndarray]:
    """`n_prompts` prompts of 1 to `n_positions - 1` tokens, lengths evenly spread and shuffled."""
    longest = config.max_position_embeddings - 1
    lengths = np.linspace(1, longest, n_prompts - len(LOGIT_LENGTHS)).round().astype(int)
    lengths = rng.permutation(np.concatenate([lengths, LOGIT_LENGTHS]))
    return [rng.integers(0, config.vocab_size, n).astype(np.int32) for n in lengths]


def logits_of(model: Any, token_ids: np.ndarray) -> np.ndarray:
    """Logits [n, vocab_size] float32 (float64 for a model in float64).

    transformers uses longrope's long factors for a sequence beyond the original length, this engine for a
    model whose longest sequence is beyond it. A sequence is therefore padded to that length; later tokens
    do not change a token's logits.
    """
    with torch.no_grad():
        ids = torch.from_numpy(token_ids.astype(np.int64))[None]
        if switching_length(model.config) is not None:
            n_filled = model.config.max_position_embeddings - len(token_ids)
            ids = torch.nn.functional.pad(ids, (0, n_filled))
        return model(input_ids=ids, use_cache=False).logits[0, : len(token_ids)].numpy()


def switching_length(config: Any) -> int | None:
    """The length beyond which transformers takes longrope's long factors, if a sequence can get there."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    original = rope["original_max_position_embeddings"]
    return original if original < config.max_position_embeddings else None


def greedy(model: Any, prompt: np.ndarray, n_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """The greedy continuation, to MAX_OUTPUT tokens or the model's length, and the gaps of its logits."""
    ids = prompt
    gaps: list[float] = []
    for _ in range(min(MAX_OUTPUT, n_positions - len(prompt))):
        last = logits_of(model, ids)[-1]
        order = np.argsort(-last, kind="stable")
        gaps.append(float(last[order[0]] - last[order[1]]))
        ids = np.append(ids, np.int32(order[0]))
    return ids[len(prompt) :], np.array(gaps, np.float32)


def check(model: Any, prompts: list[np.ndarray], outputs: np.ndarray, gaps: np.ndarray) -> float:
    """Compare the tokens with generate() and with float64; returns the largest error of a float32 logit."""
    model.generation_config = GenerationConfig(pad_token_id=0)  # no end of sequence
    switching = switching_length(model.config) or 0
    alike = [row for row in zip(prompts, outputs, gaps, strict=True) if len(row[0]) > switching]
    for prompt, output, gap in alike[:8]:
        n = int((output >= 0).sum())
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=n,
            do_sample=False,
        )[0, len(prompt) :].numpy()
        sure = np.cumprod(gap[:n] >= MARGIN).astype(bool)
        assert np.array_equal(generated[sure], output[:n][sure]), "generate() gives other tokens"
    worst = 0.0
    single = {name: value.clone() for name, value in model.state_dict().items()}
    model.double()
    for prompt, output, gap in zip(prompts, outputs, gaps, strict=True):
        n = int((output >= 0).sum())
        ids = np.concatenate([prompt, output[:n]])[:-1]
        exact = logits_of(model, ids)
        model.float()
        worst = max(worst, float(np.abs(exact - logits_of(model, ids)).max()))
        model.double()
        sure = gap[:n] >= MARGIN
        assert np.array_equal(exact[-n:].argmax(-1)[sure], output[:n][sure]), "float64 gives other tokens"
    model.float()
    assert all(torch.equal(value, single[name]) for name, value in model.state_dict().items())
    assert worst < MARGIN / 2, f"rounding moves a logit by {worst}: the margin would not hold"
    return worst


def save(golden: Golden, model: Any, directory: Path) -> None:
    """Write config.json and safetensors in the layouts that real checkpoints have."""
    if golden.shard_bytes is not None:
        model.save_pretrained(directory, max_shard_size=golden.shard_bytes)
    else:
        model.save_pretrained(directory)
    if golden.bare_names:
        tensors = safetensors.torch.load_file(directory / "model.safetensors")
        bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        n = golden.config.n_positions
        for i in range(golden.config.n_layer):
            bare[f"h.{i}.attn.bias"] = torch.tril(torch.ones(1, 1, n, n))
        safetensors.torch.save_file(bare, directory / "model.safetensors", metadata={"format": "pt"})
    for path in directory.glob("*.safetensors"):
        path.chmod(0o644)
    (directory / "generation_config.json").unlink(missing_ok=True)
    if golden.generation_config:
        text = json.dumps(golden.generation_config, indent=2)
        (directory / "generation_config.json").write_text(text + "\n")


def make(golden: Golden, directory: Path, rng: np.random.Generator) -> str:
    """Write one model's directory; returns a line of statistics about its outputs."""
    golden.config._attn_implementation = golden.attention
    # Only the plain form of experts has float64.
    names = ("num_experts_per_tok", "top_k_experts")
    has_experts = any(hasattr(golden.config, name) for name in names)
    experts = {"experts_implementation": "eager"} if has_experts else {}
    automatic = class_of(golden.config.model_type)
    from_config = automatic if automatic is Mistral4ForCausalLM else automatic.from_config
    model = from_config(golden.config).eval().float()
    draw_weights(model, rng)
    save(golden, model, directory)
    # Compute with the written weights.
    model = automatic.from_pretrained(
        directory, attn_implementation=golden.attention, dtype=torch.float32, **experts
    ).eval()
    return compute(golden, model, directory, rng)


def compute(golden: Golden, model: Any, directory: Path, rng: np.random.Generator) -> str:
    """Write a model's results; returns the same as `make`."""
    prompts = prompts_of(golden.config, golden.n_prompts, rng)
    outputs = np.full((len(prompts), MAX_OUTPUT), -1, np.int32)
    gaps = np.zeros((len(prompts), MAX_OUTPUT), np.float32)
    for row, prompt in enumerate(prompts):
        output, gap = greedy(model, prompt, golden.config.max_position_embeddings)
        outputs[row, : len(output)] = output
        gaps[row, : len(gap)] = gap
    worst = check(model, prompts, outputs, gaps)

    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    rows = np.array([int(np.flatnonzero(lengths == n)[0]) for n in LOGIT_LENGTHS], np.int32)
    logits = np.concatenate([logits_of(model, prompts[row]) for row in rows])
    np.savez_compressed(
        directory / "golden.npz",
        prompt_tokens=np.concatenate(prompts),
        prompt_lengths=lengths,
        outputs=outputs,
        gaps=gaps,
        logits_rows=rows,
        logits=logits.astype(np.float32),
    )
    real = outputs >= 0
    distinct = np.mean([len(set(row[row >= 0])) / (row >= 0).sum() for row in outputs])
    return (
        f"{golden.name:30} {int(real.sum()):5} tokens, {distinct:.2f} of a row's tokens distinct, "
        f"{len(np.unique(outputs[real]))} of {golden.config.vocab_size} ids, "
        f"logits' spread {logits.std():.1f}, gap below {MARGIN:g}: {int((gaps[real] < MARGIN).sum())}, "
        f"smallest {gaps[real].min():.1e}, rounding {worst:.1e}"
    )


def make_files(only: Sequence[str]) -> None:
    """Make every model of MODELS and print statistics."""
    # The order of MODELS is part of their seeds; a shape's seed is its name.
    models = [(golden, [SEED, i]) for i, golden in enumerate(MODELS)]
    models += [(_of_shape(name, shape), [SEED, *name.encode()]) for name, shape in SHAPES.items()]
    for golden, seed in models:
        if only and golden.name not in only:
            continue
        directory = GOLDEN / golden.name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        print(make(golden, directory, np.random.default_rng(seed)), flush=True)
    (GOLDEN / "versions.json").write_text(json.dumps(versions(), indent=2) + "\n")
    total = sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file())
    print(f"{total / 1e6:.2f} MB in {GOLDEN}")
    assert total < MAX_TOTAL_BYTES, f"more than {MAX_TOTAL_BYTES} bytes"
