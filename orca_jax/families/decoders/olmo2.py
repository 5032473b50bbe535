"""OLMo 2 (OLMo Team, 2024): Llama with norms after each part, and over all queries and all keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import common_fields, decoder, read_layer, read_sizes, relative
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import StoredName, as_it_is, key_heads, query_heads

_LAYER = "{prefix}layers.{i}."
# The weights of qk-norms over the full width of all heads.
WIDE_NORMS: Mapping[str, StoredName] = {
    "layers.{i}.q_norm.scale": query_heads(f"{_LAYER}self_attn.q_norm.weight"),
    "layers.{i}.k_norm.scale": key_heads(f"{_LAYER}self_attn.k_norm.weight"),
}
# The weights of all norms within layers.
NORMS: Mapping[str, StoredName] = {
    **WIDE_NORMS,
    "layers.{i}.attn_out_norm.scale": as_it_is(f"{_LAYER}post_attention_layernorm.weight"),
    "layers.{i}.mlp_out_norm.scale": as_it_is(f"{_LAYER}post_feedforward_layernorm.weight"),
}


def _read(fields: ConfigFields) -> ModelConfig:
    sizes, bias = read_sizes(fields), fields.flag("attention_bias", False)
    layer = read_layer(fields, sizes, bias=bias, eps=1e-5, qk_norm="width")
    return decoder(fields, sizes, replace(layer, residual="after"))


def _write(model: ModelConfig) -> dict[str, Any] | None:
    return common_fields(model) | {"attention_bias": model.attention.qkv_bias}


OLMO2 = relative(
    model_type="olmo2",
    title="OLMo 2",
    architectures=("Olmo2ForCausalLM", "Olmo2Model"),
    read=_read,
    write=_write,
    weights=NORMS,
)
