"""Shared parts of hybrids: which layers are recurrent, their mixers' fields, and their weights' names."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.recurrence_config import GatedDeltaNet, Mamba2, Recurrence
from orca_jax.families.stored_name import StoredName, as_it_is, depthwise, linear
from orca_jax.families.strict_json import INFINITY, shown

FULL, LINEAR = "full_attention", "linear_attention"
# Older files' names of kinds of layers, as transformers reads them.
_KINDS: Mapping[str, str] = {FULL: FULL, LINEAR: LINEAR, "attention": FULL, "mamba": LINEAR}
_NO_LIMITS = (0.0, math.inf)


def read_mixers(fields: ConfigFields, name: str, n_layers: int) -> Sequence[str] | None:
    """Read the field `name`, FULL or LINEAR for each layer; None without it. Raises BadModelConfig."""
    found = fields.texts(name)
    if found is None:
        return None
    if len(found) != n_layers or not set(found) <= set(_KINDS):
        raise BadModelConfig(
            f"{shown(fields.path)}: {name}: expected {n_layers} of {', '.join(_KINDS)}, "
            f"found {shown(list(found))}"
        )
    return [_KINDS[kind] for kind in found]


def with_mixer(layer: Layer, recurrence: Recurrence) -> Layer:
    """The same layer with a recurrent mixer in place of attention."""
    return replace(layer, attention=None, recurrence=recurrence)


def kinds_of(model: ModelConfig) -> list[str]:
    """The layers' kinds, FULL or LINEAR."""
    return [FULL if layer.recurrence is None else LINEAR for layer in model.layers]


def first_recurrence(model: ModelConfig) -> Recurrence | None:
    """The first recurrent layer's mixer."""
    return next((layer.recurrence for layer in model.layers if layer.recurrence is not None), None)


def must_be_silu(fields: ConfigFields, name: str = "hidden_act") -> None:
    """Raise UnsupportedModel unless the field `name`, the mixers' activation, is silu."""
    if fields.activation(name, "silu") != "silu":
        raise UnsupportedModel(
            f"{shown(fields.path)}: {name}: expected silu, found {shown(fields.raw(name))}; other "
            "activations of recurrent layers are not supported"
        )


_DELTA_NAMES = ("n_key_heads", "n_value_heads", "key_size", "value_size", "width")
_DELTA_FIELDS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def read_delta_net(fields: ConfigFields, norm: Norm, *, by_key_head: bool) -> GatedDeltaNet:
    """Read Gated DeltaNet's sizes, with Qwen3-Next's defaults; `norm` is its gated norm."""
    must_be_silu(fields)
    defaults = (16, 32, 128, 128, 4)
    sizes: dict[str, Any] = {
        ours: fields.whole(name, default=default)
        for ours, name, default in zip(_DELTA_NAMES, _DELTA_FIELDS, defaults, strict=True)
    }
    return GatedDeltaNet(**sizes, norm=norm, by_key_head=by_key_head)


def delta_net_fields(mixer: GatedDeltaNet) -> dict[str, Any]:
    """The fields that `read_delta_net` reads."""
    return {name: getattr(mixer, ours) for ours, name in zip(_DELTA_NAMES, _DELTA_FIELDS, strict=True)}


def delta_net_weights(place: str, projections: Mapping[str, str]) -> dict[str, StoredName]:
    """The weights of Gated DeltaNet at `place`; `projections` has our names of those that differ."""
    return {
        **{
            f"layers.{{i}}.{ours}.weight": as_it_is(f"{place}{name}.weight")
            for ours, name in projections.items()
        },
        "layers.{i}.conv.weight": depthwise(f"{place}conv1d.weight"),
        "layers.{i}.delta.decay": as_it_is(f"{place}A_log"),
        "layers.{i}.delta.step_bias": as_it_is(f"{place}dt_bias"),
        "layers.{i}.delta_norm.scale": as_it_is(f"{place}norm.weight"),
        "layers.{i}.delta_out.weight": as_it_is(f"{place}out_proj.weight"),
    }


def read_mamba2(fields: ConfigFields, hidden_size: int, norm: Norm, *, inner: int | None = None) -> Mamba2:
    """Read Mamba-2's fields as Bamba and Granite 4 name them. Raises BadModelConfig.

    `inner` is the size of all heads, where that does not follow from the hidden size.
    """
    must_be_silu(fields)
    n_heads, expand = fields.whole("mamba_n_heads", default=128), fields.whole("mamba_expand", default=2)
    named = f"mamba_expand {expand} times hidden_size {hidden_size}" if inner is None else f"{inner}"
    inner = expand * hidden_size if inner is None else inner
    automatic = inner // max(1, n_heads)
    if fields.raw("mamba_d_head") == "auto":
        fields = fields.with_values({"mamba_d_head": automatic}, default=False)
    head_size = fields.whole("mamba_d_head", default=automatic)
    if n_heads * head_size != inner:
        raise BadModelConfig(
            f"{shown(fields.path)} disagrees with itself: mamba_n_heads {n_heads} times mamba_d_head "
            f"{head_size} is not {named}"
        )
    fields.raw("mamba_chunk_size")  # another way to compute the same
    least, most = read_limits(fields)
    return Mamba2(
        n_heads=n_heads,
        head_size=head_size,
        n_groups=fields.whole("mamba_n_groups", default=1),
        state_size=fields.whole("mamba_d_state", default=256),
        width=fields.whole("mamba_d_conv", default=4),
        norm=norm,
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias", False),
        least_step=least,
        most_step=None if math.isinf(most) else most,
    )


def read_limits(fields: ConfigFields) -> tuple[float, float]:
    """Read `time_step_limit`, by default no limits. Raises BadModelConfig."""
    found = fields.raw("time_step_limit")
    if found is None:
        return _NO_LIMITS
    if isinstance(found, list) and len(cast("list[object]", found)) == 2:
        numbers = [math.inf if one == INFINITY else one for one in cast("list[object]", found)]
        if all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers):
            least, most = cast("list[float]", numbers)
            return least, most
    raise BadModelConfig(f"{shown(fields.path)}: time_step_limit: expected two numbers, found {shown(found)}")


def mamba2_fields(mixer: Mamba2, hidden_size: int) -> dict[str, Any] | None:
    """The fields that `read_mamba2` reads; None for a mixer that they cannot say."""
    if mixer.inner % hidden_size:
        return None
    return {
        "mamba_n_heads": mixer.n_heads,
        "mamba_d_head": mixer.head_size,
        "mamba_n_groups": mixer.n_groups,
        "mamba_d_state": mixer.state_size,
        "mamba_d_conv": mixer.width,
        "mamba_expand": mixer.inner // hidden_size,
        "mamba_conv_bias": mixer.conv_bias,
        "mamba_proj_bias": mixer.bias,
        **written_limits(mixer),
    }


def written_limits(mixer: Mamba2) -> dict[str, Any]:
    """The field that `read_limits` reads; empty for its default."""
    limits = [mixer.least_step, INFINITY if mixer.most_step is None else mixer.most_step]
    return {} if limits == [0.0, INFINITY] else {"time_step_limit": limits}


def mamba2_weights(place: str) -> dict[str, StoredName]:
    """The weights of Mamba-2 at `place`."""
    return {
        **linear("layers.{i}.space_in", f"{place}in_proj"),
        "layers.{i}.conv.weight": depthwise(f"{place}conv1d.weight"),
        "layers.{i}.conv.bias": as_it_is(f"{place}conv1d.bias"),
        "layers.{i}.space.decay": as_it_is(f"{place}A_log"),
        "layers.{i}.space.step_bias": as_it_is(f"{place}dt_bias"),
        "layers.{i}.space.skip": as_it_is(f"{place}D"),
        "layers.{i}.space_norm.scale": as_it_is(f"{place}norm.weight"),
        **linear("layers.{i}.space_out", f"{place}out_proj"),
    }
