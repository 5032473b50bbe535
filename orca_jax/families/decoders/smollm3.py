"""SmolLM3 (Bakouch et al., 2025): Llama in which every fourth layer has no rotary positions."""

from typing import Any

from orca_jax.errors import BadModelConfig
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    FULL,
    SLIDING,
    bias_fields,
    common_fields,
    decoder,
    read_layer,
    read_layer_kinds,
    read_sizes,
    relative,
    window_fields,
    with_windows,
)
from orca_jax.families.decoders.rope_fields import read_rotary
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.strict_json import shown

_BASE, _PERIOD = 2_000_000.0, 4  # transformers' defaults of fields that a file may lack


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    layer = read_layer(
        fields,
        sizes,
        bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        rotary=read_rotary(
            fields, head_size=sizes.head_size, n_positions=sizes.n_positions, default_base=_BASE
        ),
    )
    rotated = read_rotated(fields, sizes.n_layers)
    layers = [layer if turned else layer.with_attention(rotary=None) for turned in rotated]
    window = fields.whole_or_null("sliding_window", None)
    if not fields.flag("use_sliding_window", False):
        window = None
    kinds = read_layer_kinds(fields, sizes.n_layers)
    if kinds is None:  # layers without rotary positions have the window
        kinds = [FULL if turned or window is None else SLIDING for turned in rotated]
    return decoder(fields, sizes, with_windows(fields, layers, kinds, window), tied=True)


def read_rotated(fields: ConfigFields, n_layers: int) -> list[bool]:
    """Read which layers have rotary positions: those with a 1 in `no_rope_layers`, whatever its name says."""
    period = fields.whole("no_rope_layer_interval", default=_PERIOD)
    if fields.raw("no_rope_layers") is None:
        if period < 1:
            raise BadModelConfig(
                f"{shown(fields.path)}: no_rope_layer_interval: expected at least 1, found {shown(period)}"
            )
        return [(i + 1) % period != 0 for i in range(n_layers)]
    found = fields.numbers("no_rope_layers")
    if len(found) < n_layers or not set(found) <= {0, 1}:
        raise BadModelConfig(
            f"{shown(fields.path)}: no_rope_layers: expected 0 or 1 for each of {n_layers} layers, "
            f"found {shown(list(found))}"
        )
    return [bool(turned) for turned in found[:n_layers]]


def _write(model: ModelConfig) -> dict[str, Any] | None:
    windows = window_fields(model)
    return (
        common_fields(model)
        | bias_fields(model)
        | windows
        | {
            "use_sliding_window": windows["sliding_window"] is not None,
            "no_rope_layers": [int(each.rotary is not None) for each in model.layers],
        }
    )


SMOLLM3 = relative(
    model_type="smollm3",
    title="SmolLM3",
    architectures=("SmolLM3ForCausalLM", "SmolLM3Model"),
    read=_read,
    write=_write,
    unread={"max_window_layers": "in the published files; layer_types says which layers have a window"},
)
