"""OLMoE (Muennighoff et al., 2024): small experts, and norms over all queries and all keys."""

from typing import Any

from orca_jax.errors import UnsupportedModel
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import common_fields, decoder, read_layer, read_sizes, relative
from orca_jax.families.decoders.olmo2 import WIDE_NORMS
from orca_jax.families.mixtures.experts_in_files import EXPERT_NAMES, FUSED, WEIGHTS, read_experts
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.strict_json import shown


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    if fields.raw("clip_qkv") is not None:
        where = f"{shown(fields.path)}: clip_qkv is {shown(fields.raw('clip_qkv'))}"
        raise UnsupportedModel(f"{where}; clipped queries, keys and values are not supported")
    bias = fields.flag("attention_bias", False)
    layer = read_layer(fields, sizes, bias=bias, eps=1e-5, qk_norm="width")
    experts = read_experts(fields, "num_experts", alias="num_local_experts")
    return decoder(fields, sizes, layer.with_feed_forward(experts=experts))


def write_olmoe(model: ModelConfig) -> dict[str, Any] | None:
    """Write the fields of a model with experts in all layers; None without experts."""
    experts = model.layers[0].experts
    if experts is None:
        return None
    return common_fields(model) | {
        "attention_bias": model.attention.qkv_bias,
        "num_experts": experts.number,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.renormalised,
    }


OLMOE = relative(
    model_type="olmoe",
    title="OLMoE",
    architectures=("OlmoeForCausalLM", "OlmoeModel"),
    config_names=EXPERT_NAMES,
    read=_read,
    write=write_olmoe,
    weights={**WEIGHTS, **WIDE_NORMS},
    alternatives=FUSED,
)
