"""GLM-4 of April 2025 (GLM Team, 2024): norms before and after each part, half of each head rotated."""

from dataclasses import replace
from typing import Any

from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import common_fields, decoder, read_layer, read_sizes, relative
from orca_jax.families.decoders.rope_fields import read_rotary, rotary_size_field
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import as_it_is

_LAYER = "{prefix}layers.{i}."
_HEAD_SIZE, _EPS, _PARTIAL = 128, 1.5625e-7, 0.5  # transformers' defaults of fields that a file may lack


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields, head_size=_HEAD_SIZE)
    rotary = read_rotary(
        fields,
        head_size=sizes.head_size,
        n_positions=sizes.n_positions,
        partial=_PARTIAL,
        interleaved=True,
    )
    bias = fields.flag("attention_bias", True)
    layer = read_layer(fields, sizes, qkv_bias=bias, eps=_EPS, rotary=rotary)
    return decoder(fields, sizes, replace(layer, residual="both"))


def _write(model: ModelConfig) -> dict[str, Any] | None:
    rotary = model.attention.rotary
    if rotary is None:
        return None
    return common_fields(model) | {
        "attention_bias": model.attention.qkv_bias,
        "partial_rotary_factor": rotary_size_field(rotary, model.head_size),
        "pad_token_id": None,  # transformers' default, 151329, may be outside of the vocabulary
    }


GLM4 = relative(
    model_type="glm4",
    title="GLM-4",
    architectures=("Glm4ForCausalLM", "Glm4Model"),
    read=_read,
    write=_write,
    weights={
        "layers.{i}.up.weight": as_it_is(f"{_LAYER}mlp.gate_up_proj.weight"),
        "layers.{i}.attn_out_norm.scale": as_it_is(f"{_LAYER}post_self_attn_layernorm.weight"),
        "layers.{i}.mlp_out_norm.scale": as_it_is(f"{_LAYER}post_mlp_layernorm.weight"),
    },
)
