"""OLMo 3 (OLMo Team, 2025): OLMo 2 with a sliding window in three of four layers, which have no scaling."""

from dataclasses import replace
from typing import Any

from orca_jax.errors import UnsupportedModel
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    SLIDING,
    common_fields,
    decoder,
    read_alternating_kinds,
    read_layer,
    read_rotaries,
    read_sizes,
    relative,
    window_fields,
    with_windows,
)
from orca_jax.families.decoders.olmo2 import NORMS
from orca_jax.families.decoders.rope_fields import rope_parameters, without_rope
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.strict_json import shown

_WINDOW, _PERIOD, _BASE = 4096, 4, 500_000.0  # transformers' defaults of fields that a file may lack


def _read(fields: ConfigFields) -> ModelConfig:
    sizes, bias = read_sizes(fields), fields.flag("attention_bias", False)
    older_base = fields.number("rope_theta", _BASE)
    if fields.raw("rope_parameters") is None and older_base != _BASE:
        raise UnsupportedModel(
            f"{shown(fields.path)}: rope_theta is {older_base}: transformers uses it in layers without a "
            f"window alone, and {_BASE} in those with one; say both in rope_parameters"
        )
    full, local = read_rotaries(fields, sizes, base=_BASE, local_base=_BASE, local_name="rope_theta")
    layer = read_layer(fields, sizes, bias=bias, eps=1e-5, qk_norm="width", rotary=full)
    layer = replace(layer, residual="after")
    kinds = read_alternating_kinds(fields, sizes.n_layers, _PERIOD)
    layers = [layer.with_attention(rotary=local) if kind == SLIDING else layer for kind in kinds]
    window = fields.whole_or_null("sliding_window", _WINDOW)
    return decoder(fields, sizes, with_windows(fields, layers, kinds, window))


def _write(model: ModelConfig) -> dict[str, Any] | None:
    written = without_rope(common_fields(model) | window_fields(model))
    rotaries = {
        kind: layer.rotary
        for kind, layer in zip(written["layer_types"], model.layers, strict=True)
        if layer.rotary is not None
    }
    if not rotaries:
        return None
    some = next(iter(rotaries.values()))  # of a kind that no layer has, any will do
    by_kind = {
        kind: rope_parameters(rotaries.get(kind, some))["rope_parameters"]
        for kind in ("full_attention", "sliding_attention")
    }
    return written | {"attention_bias": model.attention.qkv_bias, "rope_parameters": by_kind}


OLMO3 = relative(
    model_type="olmo3",
    title="OLMo 3",
    architectures=("Olmo3ForCausalLM", "Olmo3Model"),
    read=_read,
    write=_write,
    weights=NORMS,
)
