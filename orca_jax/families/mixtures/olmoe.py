"""OLMoE (Muennighoff et al., 2024): small experts, and norms over all queries and all keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orca_jax.errors import UnsupportedModel
from orca_jax.families.attention_config import QKNorm
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders import llama_like
from orca_jax.families.decoders.llama_like import (
    BUFFERS,
    CONFIG_NAMES,
    PREFIXES,
    common_fields,
    decoder,
    read_layer,
    read_sizes,
)
from orca_jax.families.family import Family
from orca_jax.families.mixtures.expert_fields import EXPERT_NAMES, read_experts
from orca_jax.families.mixtures.expert_names import FUSED, WEIGHTS
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import StoredName, key_heads, query_heads
from orca_jax.families.strict_json import shown

_LAYER = "{prefix}layers.{i}."
_WEIGHTS: Mapping[str, StoredName] = {
    **llama_like.WEIGHTS,
    **WEIGHTS,
    "layers.{i}.q_norm.scale": query_heads(f"{_LAYER}self_attn.q_norm.weight"),
    "layers.{i}.k_norm.scale": key_heads(f"{_LAYER}self_attn.k_norm.weight"),
}


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    if fields.raw("clip_qkv") is not None:
        where = f"{shown(fields.path)}: clip_qkv is {shown(fields.raw('clip_qkv'))}"
        raise UnsupportedModel(f"{where}; clipped queries, keys and values are not supported")
    bias = fields.flag("attention_bias", False)
    layer = read_layer(fields, sizes, qkv_bias=bias, out_bias=bias, eps=1e-5)
    experts = read_experts(fields, "num_experts", alias="num_local_experts")
    layer = replace(
        layer,
        attention=replace(layer.attention, qk_norm=QKNorm(norm=layer.norm, over="width")),
        feed_forward=replace(layer.feed_forward, experts=experts),
    )
    return decoder(fields, sizes, [layer] * sizes.n_layers, final_norm=layer.norm)


def _write(model: ModelConfig) -> dict[str, Any] | None:
    experts = model.layers[0].feed_forward.experts
    if experts is None:
        return None
    return common_fields(model) | {
        "attention_bias": model.attention.qkv_bias,
        "num_experts": experts.number,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.renormalised,
    }


OLMOE = Family(
    model_type="olmoe",
    title="OLMoE",
    architectures=("OlmoeForCausalLM", "OlmoeModel"),
    config_names={**CONFIG_NAMES, **EXPERT_NAMES},
    read=_read,
    write=_write,
    prefixes=PREFIXES,
    weights=_WEIGHTS,
    alternatives=FUSED,
    buffers=BUFFERS,
)
