"""Qwen 1.5 and 2 (Yang et al., 2024) and Qwen 3 (Yang et al., 2025): the mixtures of experts."""

from collections.abc import Sequence
from typing import Any

from orca_jax.errors import UnsupportedModel
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    FULL,
    common_fields,
    decoder,
    read_layer,
    read_layer_kinds,
    read_sizes,
    relative,
    window_fields,
    with_windows,
)
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.mixtures.experts_in_files import (
    EXPERT_NAMES,
    FUSED,
    WEIGHTS,
    first_sparse,
    read_experts,
    sparse_fields,
    sparse_layers,
)
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.families.strict_json import shown

_NAMES = {**EXPERT_NAMES, "ffn_size": "intermediate_size or moe_intermediate_size"}


def _read_qwen2(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    layer = read_layer(fields, sizes, qkv_bias=fields.flag("qkv_bias", True))
    experts = read_experts(
        fields, "num_experts", shared_size=fields.whole("shared_expert_intermediate_size"), shared_gate=True
    )
    mixed = _with_experts(fields, layer, experts, sizes.n_layers)
    window = fields.whole_or_null("sliding_window", 4096)
    if not fields.flag("use_sliding_window", False):
        window = None
    fields.raw("max_window_layers")
    kinds = read_layer_kinds(fields, sizes.n_layers)
    if window and kinds is None:
        raise UnsupportedModel(
            f"{shown(fields.path)}: use_sliding_window is true, but there are no layer_types; versions of "
            "transformers differ in which layers it means"
        )
    return decoder(
        fields, sizes, with_windows(fields, mixed, kinds or [FULL] * sizes.n_layers, window or None)
    )


def _read_qwen3(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    layer = read_layer(fields, sizes, bias=fields.flag("attention_bias", False), qk_norm="head")
    fields.raw("max_window_layers")  # transformers does not read it: all layers have the window
    window = fields.whole_or_null("sliding_window", 4096)
    if fields.flag("use_sliding_window", False):
        layer = layer.with_window(window)
    experts = read_experts(fields, "num_experts", alias="num_local_experts")
    return decoder(fields, sizes, _with_experts(fields, layer, experts, sizes.n_layers))


def _with_experts(fields: ConfigFields, layer: Layer, experts: Experts, n_layers: int) -> Sequence[Layer]:
    size = fields.whole("moe_intermediate_size")
    mixed = layer.with_feed_forward(size=size, experts=experts)
    return [mixed if sparse else layer for sparse in sparse_layers(fields, n_layers)]


def _write_qwen2(model: ModelConfig) -> dict[str, Any] | None:
    written, sparse, windows = sparse_fields(model), first_sparse(model), window_fields(model)
    if written is None or sparse is None or sparse.experts is None:
        return None
    own = {
        "qkv_bias": model.attention.qkv_bias,
        "shared_expert_intermediate_size": sparse.experts.shared_size,
        "use_sliding_window": windows["sliding_window"] is not None,
    }
    return common_fields(model) | written | own | windows


def _write_qwen3(model: ModelConfig) -> dict[str, Any] | None:
    written, window = sparse_fields(model), model.attention.scores.window
    if written is None:
        return None
    own = {"use_sliding_window": window is not None, "sliding_window": window}
    return common_fields(model) | written | own | {"attention_bias": model.attention.qkv_bias}


QWEN2_MOE = relative(
    model_type="qwen2_moe",
    title="Qwen 2 MoE",
    architectures=("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
    config_names=_NAMES,
    read=_read_qwen2,
    write=_write_qwen2,
    weights=WEIGHTS,
    alternatives=FUSED,
)
QWEN3_MOE = relative(
    model_type="qwen3_moe",
    title="Qwen 3 MoE",
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    config_names=_NAMES,
    read=_read_qwen3,
    write=_write_qwen3,
    weights=WEIGHTS,
    alternatives=FUSED,
)
