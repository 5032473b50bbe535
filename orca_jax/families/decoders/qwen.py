"""Qwen 2 and 2.5 (Yang et al., 2024), and Qwen 3 (Yang et al., 2025): the dense models."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    FULL,
    SLIDING,
    common_fields,
    decoder,
    read_layer,
    read_layer_kinds,
    read_sizes,
    relative,
    window_fields,
    with_windows,
)
from orca_jax.families.decoders.qwen3_ranker import CLASSIFIER, ranker_fields, read_ranker
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.families.stored_name import as_it_is

# transformers' defaults of fields that a file may lack.
_WINDOW, _FIRST_WINDOWED, _QWEN3_HEAD_SIZE = 4096, 28, 128


def _read_qwen2(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    layer = read_layer(fields, sizes, qkv_bias=True)
    return decoder(fields, sizes, _windowed(fields, layer, sizes.n_layers))


def _read_qwen3(fields: ConfigFields) -> ModelConfig:
    sizes, bias = read_sizes(fields, head_size=_QWEN3_HEAD_SIZE), fields.flag("attention_bias", False)
    layer = read_layer(fields, sizes, bias=bias, qk_norm="head")
    model = decoder(fields, sizes, _windowed(fields, layer, sizes.n_layers))
    head = read_ranker(fields)
    if head is None:
        return model
    model = replace(model, ranker=True, ranker_head=head)
    # A classifier has no other head.
    return model if head.kind == "tokens" else replace(model, embedding=replace(model.embedding, tied=True))


def _windowed(fields: ConfigFields, layer: Layer, n_layers: int) -> Sequence[Layer]:
    """Layers from `max_window_layers` on have the window, unless `layer_types` says otherwise."""
    window = fields.whole_or_null("sliding_window", _WINDOW)
    first = fields.whole("max_window_layers", default=_FIRST_WINDOWED)
    if not fields.flag("use_sliding_window", False):
        window = None
    kinds = read_layer_kinds(fields, n_layers)
    if kinds is None:
        kinds = [SLIDING if window is not None and i >= first else FULL for i in range(n_layers)]
    return with_windows(fields, [layer] * n_layers, kinds, window)


def _write_qwen2(model: ModelConfig) -> dict[str, Any]:
    written = window_fields(model)
    return common_fields(model) | written | {"use_sliding_window": written["sliding_window"] is not None}


def _write_qwen3(model: ModelConfig) -> dict[str, Any]:
    return _write_qwen2(model) | {"attention_bias": model.attention.qkv_bias} | ranker_fields(model)


QWEN2 = relative(
    model_type="qwen2",
    title="Qwen 2",
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    read=_read_qwen2,
    write=_write_qwen2,
)
QWEN3 = relative(
    model_type="qwen3",
    title="Qwen 3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model", CLASSIFIER),
    read=_read_qwen3,
    write=_write_qwen3,
    weights={"ranker.out.weight": as_it_is("score.weight")},
)
