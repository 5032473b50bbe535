"""Qwen 3.5 (Qwen, 2026): Qwen3-Next's layers with projections apart; the text part, dense or of experts."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import PREFIXES, relative
from orca_jax.families.further_layer import MTP
from orca_jax.families.hybrid_fields import delta_net_weights
from orca_jax.families.mixtures.experts_in_files import FUSED, WEIGHTS, first_sparse, read_experts
from orca_jax.families.mixtures.qwen3_next import GATED_QKV, NAMES, hybrid_fields, read_hybrid_layers
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.text_part import text_part

_APART = {
    "delta_in": "in_proj_qkv",
    "delta_z": "in_proj_z",
    "delta_b": "in_proj_b",
    "delta_a": "in_proj_a",
}
_MIXERS = {**GATED_QKV, **delta_net_weights("{prefix}layers.{i}.linear_attn.", _APART)}
# Sections of rotary positions for an image's height and width; a token of a text has one position for all.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
_TEXT_PREFIX = "model.language_model."
_FURTHER = r"mtp\..*"
_UNREAD = {
    "mamba_ssm_dtype": "transformers does not read it; states are float32",
    **dict.fromkeys(
        ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"), "of layers that predict further tokens"
    ),
}


def _read(fields: ConfigFields) -> ModelConfig:
    return read_hybrid_layers(fields, by_key_head=False, rope=_OF_IMAGES)[1]


def _read_moe(fields: ConfigFields) -> ModelConfig:
    size = fields.whole("moe_intermediate_size", default=512)
    layers, model = read_hybrid_layers(
        fields.with_values({"intermediate_size": size}, default=False), by_key_head=False, rope=_OF_IMAGES
    )
    experts = read_experts(
        fields,
        "num_experts",
        renormalised=True,
        shared_size=fields.whole("shared_expert_intermediate_size", default=512),
        shared_gate=True,
    )
    mixed = (layer.with_feed_forward(experts=experts) for layer in layers)
    return replace(model, layers=tuple(mixed))


def _write_moe(model: ModelConfig) -> dict[str, Any] | None:
    written, sparse = hybrid_fields(model), first_sparse(model)
    if written is None or sparse is None or sparse.experts is None:
        return None
    return written | {
        "moe_intermediate_size": sparse.size,
        "num_experts": sparse.experts.number,
        "num_experts_per_tok": sparse.experts.top_k,
        "shared_expert_intermediate_size": sparse.experts.shared_size,
    }


_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
}
_MOE_DEFAULTS: Mapping[str, Any] = {
    **_DEFAULTS,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}

QWEN3_5_TEXT = relative(
    model_type="qwen3_5_text",
    title="Qwen 3.5",
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5TextModel"),
    config_names=NAMES,
    read=_read,
    write=hybrid_fields,
    unread=_UNREAD,
    weights=_MIXERS,
    parts=_FURTHER,
    further=MTP,
)
QWEN3_5_MOE_TEXT = relative(
    model_type="qwen3_5_moe_text",
    title="Qwen 3.5 MoE",
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"),
    config_names=NAMES,
    read=_read_moe,
    write=_write_moe,
    unread=_UNREAD,
    weights={**WEIGHTS, **_MIXERS},
    alternatives=FUSED,
    parts=_FURTHER,
    further=MTP,
)
_with_vision = partial(
    text_part,
    prefixes=(_TEXT_PREFIX, *PREFIXES),
    head="lm_head.weight",
    parts=rf"model\.visual\..*|{_FURTHER}",
)
QWEN3_5 = _with_vision(
    QWEN3_5_TEXT,
    model_type="qwen3_5",
    title="Qwen 3.5 with vision",
    architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    defaults=_DEFAULTS,
)
QWEN3_5_MOE = _with_vision(
    QWEN3_5_MOE_TEXT,
    model_type="qwen3_5_moe",
    title="Qwen 3.5 MoE with vision",
    architectures=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    defaults=_MOE_DEFAULTS,
)
