"""OLMo 2 (OLMo Team, 2024): Llama with norms after each part, and over all queries and all keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orca_jax.families.attention_config import QKNorm
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    BUFFERS,
    CONFIG_NAMES,
    PREFIXES,
    WEIGHTS,
    common_fields,
    decoder,
    read_layer,
    read_sizes,
)
from orca_jax.families.family import Family
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import StoredName, as_it_is, key_heads, query_heads

_LAYER = "{prefix}layers.{i}."
_WEIGHTS: Mapping[str, StoredName] = {
    **WEIGHTS,
    "layers.{i}.q_norm.scale": query_heads(f"{_LAYER}self_attn.q_norm.weight"),
    "layers.{i}.k_norm.scale": key_heads(f"{_LAYER}self_attn.k_norm.weight"),
    "layers.{i}.attn_out_norm.scale": as_it_is(f"{_LAYER}post_attention_layernorm.weight"),
    "layers.{i}.mlp_out_norm.scale": as_it_is(f"{_LAYER}post_feedforward_layernorm.weight"),
}


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    bias = fields.flag("attention_bias", False)
    layer = read_layer(fields, sizes, qkv_bias=bias, out_bias=bias, eps=1e-5)
    attention = replace(layer.attention, qk_norm=QKNorm(norm=layer.norm, over="width"))
    layer = replace(layer, attention=attention, residual="after")
    return decoder(fields, sizes, [layer] * sizes.n_layers, final_norm=layer.norm)


def _write(model: ModelConfig) -> dict[str, Any] | None:
    return common_fields(model) | {"attention_bias": model.attention.qkv_bias}


OLMO2 = Family(
    model_type="olmo2",
    title="OLMo 2",
    architectures=("Olmo2ForCausalLM", "Olmo2Model"),
    config_names=CONFIG_NAMES,
    read=_read,
    write=_write,
    prefixes=PREFIXES,
    weights=_WEIGHTS,
    buffers=BUFFERS,
)
