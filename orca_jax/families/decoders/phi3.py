"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al., 2024): Llama with fused weights and the longrope scaling."""

from typing import Any

from orca_jax.errors import UnsupportedModel
from orca_jax.families.attention_config import Scores
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import common_fields, decoder, read_layer, read_sizes, relative
from orca_jax.families.decoders.rope_fields import ORIGINAL, read_rotary, rotary_size_field
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import as_it_is, fused_heads
from orca_jax.families.strict_json import shown

_DEFAULT_ORIGINAL = 4096


def _read(fields: ConfigFields) -> ModelConfig:
    for name in ("full_attn_mod", "interpolate_factor"):  # in Phi-4-mini, whose own code does not read them
        if fields.whole(name, default=1) != 1:
            raise UnsupportedModel(
                f"{shown(fields.path)}: {name}: expected 1, found {fields.whole(name)}; only 1 is supported"
            )
    sizes = read_sizes(fields)
    rotary = read_rotary(
        fields,
        head_size=sizes.head_size,
        n_positions=sizes.n_positions,
        partial=1.0,
        default_original=_DEFAULT_ORIGINAL,
    )
    if rotary.scaling is not None and rotary.scaling.kind != "longrope":
        raise UnsupportedModel(
            f"{shown(fields.path)}: rope_type: expected default, longrope or su in a phi3 model, "
            f"found '{rotary.scaling.kind}'"
        )
    scores = Scores(window=fields.whole_or_null("sliding_window", None))
    return decoder(fields, sizes, read_layer(fields, sizes, eps=1e-5, rotary=rotary, scores=scores))


def _write(model: ModelConfig) -> dict[str, Any] | None:
    rotary = model.attention.rotary
    if rotary is None:
        return None
    written = common_fields(model) | {
        "sliding_window": model.attention.scores.window,
        "pad_token_id": None,  # transformers' default, 32000, may be outside of the vocabulary
    }
    if rotary.size != model.head_size:
        written["partial_rotary_factor"] = rotary_size_field(rotary, model.head_size)
    if rotary.scaling is not None:
        written[ORIGINAL] = rotary.scaling.original_positions
    return written


PHI3 = relative(
    model_type="phi3",
    title="Phi-3",
    architectures=("Phi3ForCausalLM", "Phi3Model"),
    read=_read,
    write=_write,
    weights={
        "layers.{i}.qkv.weight": fused_heads("{prefix}layers.{i}.self_attn.qkv_proj.weight"),
        "layers.{i}.up.weight": as_it_is("{prefix}layers.{i}.mlp.gate_up_proj.weight"),
    },
    unread={ORIGINAL: "in every file, and used by longrope alone"},
)
