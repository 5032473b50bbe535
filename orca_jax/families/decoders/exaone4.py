"""EXAONE 4.0 (LG AI Research, 2025): norms after attention and feed-forward, and over heads.

In models with a sliding window the layers without one have no rotary positions.
"""

from dataclasses import replace
from typing import Any

from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    FULL,
    common_fields,
    decoder,
    read_alternating_kinds,
    read_layer,
    read_layer_kinds,
    read_sizes,
    relative,
    window_fields,
    with_windows,
)
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import as_it_is

_LAYER = "{prefix}layers.{i}."
_WINDOW, _PERIOD = 4096, 4  # transformers' defaults of fields that a file may lack


def _read(fields: ConfigFields) -> ModelConfig:
    sizes, window = read_sizes(fields), fields.whole_or_null("sliding_window", _WINDOW)
    layer = replace(read_layer(fields, sizes, eps=1e-5, qk_norm="head"), residual="after")
    kinds = read_layer_kinds(fields, sizes.n_layers)
    if kinds is None and window is None:
        kinds = [FULL] * sizes.n_layers
    if kinds is None:  # with layer_types the pattern is not read, and may be "LLLG"
        period = fields.whole("sliding_window_pattern", default=_PERIOD)
        kinds = read_alternating_kinds(fields, sizes.n_layers, period)
    global_layer = layer if window is None else layer.with_attention(rotary=None)
    layers = [global_layer if kind == FULL else layer for kind in kinds]
    return decoder(fields, sizes, with_windows(fields, layers, kinds, window))


def _write(model: ModelConfig) -> dict[str, Any] | None:
    written = common_fields(model) | window_fields(model)
    without = any(layer.rotary is None for layer in model.layers)
    if without and written["sliding_window"] is None:  # no layer has a window or rotary positions
        written["sliding_window"] = _WINDOW
    return written


EXAONE4 = relative(
    model_type="exaone4",
    title="EXAONE 4",
    architectures=("Exaone4ForCausalLM", "Exaone4Model"),
    read=_read,
    write=_write,
    weights={
        "layers.{i}.attn_out_norm.scale": as_it_is(f"{_LAYER}post_attention_layernorm.weight"),
        "layers.{i}.mlp_out_norm.scale": as_it_is(f"{_LAYER}post_feedforward_layernorm.weight"),
    },
    unread={"sliding_window_pattern": "layer_types says which layers have a window"},
)
