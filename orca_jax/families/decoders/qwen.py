"""Qwen 2 and 2.5 (Yang et al., 2024), and Qwen 3 (Yang et al., 2025): the dense models."""

from dataclasses import replace
from functools import partial
from typing import Any

from orca_jax.errors import BadModelConfig
from orca_jax.families.attention_config import QKNorm, Scores
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    BUFFERS,
    CONFIG_NAMES,
    PREFIXES,
    WEIGHTS,
    common_fields,
    decoder,
    read_layer,
    read_layer_kinds,
    read_sizes,
)
from orca_jax.families.family import Family
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.families.strict_json import shown

# transformers' defaults of fields that a file may lack.
_WINDOW, _FIRST_WINDOWED, _QWEN3_HEAD_SIZE = 4096, 28, 128
_KINDS = ("full_attention", "sliding_attention")


def _read_qwen2(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    layer = read_layer(fields, sizes, qkv_bias=True)
    layers = _windowed(fields, layer, sizes.n_layers)
    return decoder(fields, sizes, layers, final_norm=layer.norm)


def _read_qwen3(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields, head_size=_QWEN3_HEAD_SIZE)
    bias = fields.flag("attention_bias", False)
    layer = read_layer(fields, sizes, qkv_bias=bias, out_bias=bias)
    attention = replace(layer.attention, qk_norm=QKNorm(norm=layer.norm))
    layers = _windowed(fields, replace(layer, attention=attention), sizes.n_layers)
    return decoder(fields, sizes, layers, final_norm=layer.norm)


def _windowed(fields: ConfigFields, layer: Layer, n_layers: int) -> list[Layer]:
    """The layers: those from `max_window_layers` on have the window, unless `layer_types` says otherwise."""
    window = fields.whole_or_null("sliding_window", _WINDOW)
    first = fields.whole("max_window_layers", default=_FIRST_WINDOWED)
    kinds = read_layer_kinds(fields, n_layers, _KINDS)
    if not fields.flag("use_sliding_window", False):
        window = None
    if kinds is None:
        kinds = [_KINDS[window is not None and i >= first] for i in range(n_layers)]
    elif window is None and "sliding_attention" in kinds:
        raise BadModelConfig(
            f"{shown(fields.path)} disagrees with itself: layer_types has sliding_attention, but "
            "use_sliding_window is not true or sliding_window is null"
        )
    scores = Scores(window=window)
    sliding = replace(layer, attention=replace(layer.attention, scores=scores))
    return [sliding if kind == "sliding_attention" else layer for kind in kinds]


def _write(model: ModelConfig, *, with_bias: bool) -> dict[str, Any] | None:
    windows = [layer.attention.scores.window for layer in model.layers]
    window = next((each for each in windows if each is not None), None)
    written = common_fields(model) | {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [_KINDS[each is not None] for each in windows],
    }
    return written | ({"attention_bias": model.attention.qkv_bias} if with_bias else {})


QWEN2 = Family(
    model_type="qwen2",
    title="Qwen 2",
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    config_names=CONFIG_NAMES,
    read=_read_qwen2,
    write=partial(_write, with_bias=False),
    prefixes=PREFIXES,
    weights=WEIGHTS,
    buffers=BUFFERS,
)
QWEN3 = Family(
    model_type="qwen3",
    title="Qwen 3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    config_names=CONFIG_NAMES,
    read=_read_qwen3,
    write=partial(_write, with_bias=True),
    prefixes=PREFIXES,
    weights=WEIGHTS,
    buffers=BUFFERS,
)
