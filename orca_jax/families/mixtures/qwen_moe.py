"""Qwen 1.5 and 2 (Yang et al., 2024) and Qwen 3 (Yang et al., 2025): the mixtures of experts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.attention_config import QKNorm, Scores
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders import llama_like
from orca_jax.families.decoders.llama_like import (
    BUFFERS,
    CONFIG_NAMES,
    PREFIXES,
    common_fields,
    decoder,
    read_layer,
    read_layer_kinds,
    read_sizes,
)
from orca_jax.families.family import Family
from orca_jax.families.mixtures.expert_fields import (
    EXPERT_NAMES,
    first_sparse,
    read_experts,
    sparse_fields,
    sparse_layers,
)
from orca_jax.families.mixtures.expert_names import FUSED, WEIGHTS
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.families.strict_json import shown

_KINDS = ("full_attention", "sliding_attention")
_NAMES = {**CONFIG_NAMES, **EXPERT_NAMES, "ffn_size": "intermediate_size or moe_intermediate_size"}


def _read_qwen2(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    layer = read_layer(fields, sizes, qkv_bias=fields.flag("qkv_bias", True))
    experts = read_experts(
        fields, "num_experts", shared_size=fields.whole("shared_expert_intermediate_size"), shared_gate=True
    )
    mixed = _with_experts(fields, layer, experts, sizes.n_layers)
    window = fields.whole_or_null("sliding_window", 4096)
    windowed = fields.flag("use_sliding_window", False) and bool(window)
    fields.raw("max_window_layers")
    kinds = read_layer_kinds(fields, sizes.n_layers, _KINDS) or _KINDS[:1] * sizes.n_layers
    if windowed and fields.raw("layer_types") is None:
        raise UnsupportedModel(
            f"{shown(fields.path)}: use_sliding_window is true, but there are no layer_types; versions of "
            "transformers differ in which layers it means"
        )
    if not windowed and _KINDS[1] in kinds:
        raise BadModelConfig(
            f"{shown(fields.path)} disagrees with itself: layer_types has sliding_attention, but "
            "use_sliding_window is not true or there is no sliding_window"
        )
    layers = [
        _with_window(own, window) if kind == _KINDS[1] else own
        for own, kind in zip(mixed, kinds, strict=True)
    ]
    return decoder(fields, sizes, layers, final_norm=layer.norm)


def _read_qwen3(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    bias = fields.flag("attention_bias", False)
    layer = read_layer(fields, sizes, qkv_bias=bias, out_bias=bias)
    layer = replace(layer, attention=replace(layer.attention, qk_norm=QKNorm(norm=layer.norm)))
    fields.raw("max_window_layers")  # which transformers does not read: all layers have the window
    window = fields.whole_or_null("sliding_window", 4096)
    if fields.flag("use_sliding_window", False):
        layer = _with_window(layer, window)
    experts = read_experts(fields, "num_experts", alias="num_local_experts")
    layers = _with_experts(fields, layer, experts, sizes.n_layers)
    return decoder(fields, sizes, layers, final_norm=layer.norm)


def _with_window(layer: Layer, window: int | None) -> Layer:
    return replace(layer, attention=replace(layer.attention, scores=Scores(window=window)))


def _with_experts(fields: ConfigFields, layer: Layer, experts: Experts, n_layers: int) -> Sequence[Layer]:
    size = fields.whole("moe_intermediate_size")
    mixed = replace(layer, feed_forward=replace(layer.feed_forward, size=size, experts=experts))
    return [mixed if sparse else layer for sparse in sparse_layers(fields, n_layers)]


def _write_qwen2(model: ModelConfig) -> dict[str, Any] | None:
    written, sparse = sparse_fields(model), first_sparse(model)
    if written is None or sparse is None or sparse.experts is None:
        return None
    windows = [layer.attention.scores.window for layer in model.layers]
    window = next((each for each in windows if each is not None), None)
    return (
        common_fields(model)
        | written
        | {
            "qkv_bias": model.attention.qkv_bias,
            "shared_expert_intermediate_size": sparse.experts.shared_size,
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": [_KINDS[each is not None] for each in windows],
        }
    )


def _write_qwen3(model: ModelConfig) -> dict[str, Any] | None:
    written, window = sparse_fields(model), model.attention.scores.window
    if written is None:
        return None
    own = {"use_sliding_window": window is not None, "sliding_window": window}
    return common_fields(model) | written | own | {"attention_bias": model.attention.qkv_bias}


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    title="Qwen 2 MoE",
    architectures=("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
    config_names=_NAMES,
    read=_read_qwen2,
    write=_write_qwen2,
    prefixes=PREFIXES,
    weights={**llama_like.WEIGHTS, **WEIGHTS},
    alternatives=FUSED,
    buffers=BUFFERS,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    title="Qwen 3 MoE",
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    config_names=_NAMES,
    read=_read_qwen3,
    write=_write_qwen3,
    prefixes=PREFIXES,
    weights={**llama_like.WEIGHTS, **WEIGHTS},
    alternatives=FUSED,
    buffers=BUFFERS,
)
