"""Rotary positions as config.json states them, in every spelling.

Before transformers 5 `rope_theta` is a field of its own, and `rope_scaling` an object with a `rope_type` or
`type`. Since then `rope_parameters` holds all of it, in some models by kind of layer. transformers 5 keeps
what the object had in an older file, so that it may write both `type` and `rope_type`.
"""

import math
from collections.abc import Mapping
from dataclasses import fields as parts_of
from typing import Any

from orca_jax.errors import BadModelConfig
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.rotary import Rotary, Scaling, ScalingKind
from orca_jax.families.strict_json import shown

_KINDS: Mapping[str, ScalingKind | None] = {
    "default": None,
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": "longrope",
    "su": "longrope",  # its name in the first Phi-3 files
}
_ORIGINAL = "original_max_position_embeddings"
# A scaling's numbers by their names in config.json, which are ours too.
_NUMBERS: Mapping[ScalingKind, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", "attention_factor"),
}
_NEEDED: Mapping[ScalingKind, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def read_rotary(
    fields: ConfigFields,
    *,
    head_size: int,
    n_positions: int,
    default_base: float = 10_000.0,
    partial: float | None = None,
    interleaved: bool = False,
    kind_of_layer: str | None = None,
    base_name: str = "rope_theta",
    default_original: int | None = None,
) -> Rotary:
    """The rotary positions of config.json, or those of a `kind_of_layer` in a nested `rope_parameters`.

    `base_name` is the field with the base outside of `rope_parameters` (Gemma 3 has two).
    `partial` is the family's default of `partial_rotary_factor`; None refuses that field. `default_original`
    is its default of `original_max_position_embeddings`; None is `n_positions`. Raises BadModelConfig,
    UnsupportedModel, or a ConfigError.
    """
    base = fields.number(base_name, 0.0) or None
    found = _section(fields, kind_of_layer)
    factor = None if partial is None else fields.number("partial_rotary_factor", partial)
    scaling = None
    if found is not None:
        inner = found.number("rope_theta", 0.0) or None
        if base is not None and inner is not None and base != inner:
            raise BadModelConfig(
                f"{shown(fields.path)} disagrees with itself: {base_name} is {base}, "
                f"rope_parameters.rope_theta is {inner}"
            )
        base = inner or base
        if factor is not None:
            factor = found.number("partial_rotary_factor", factor)
        scaling = _scaling(fields, found, n_positions, default_original)
        found.leave_others({})
    return Rotary(
        size=int(head_size * (1.0 if factor is None else factor)),
        base=default_base if base is None else base,
        interleaved=interleaved,
        scaling=scaling,
    )


def _section(fields: ConfigFields, kind_of_layer: str | None) -> ConfigFields | None:
    """The object with the rotary positions. A file may have it under both names if they agree."""
    parameters, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    if parameters is not None and kind_of_layer is not None:
        parameters = parameters.section(kind_of_layer) or parameters
    if parameters is None or old is None:
        return old if parameters is None else parameters
    if differ := [name for name in old.names() if parameters.raw(name) not in (None, old.raw(name))]:
        raise BadModelConfig(
            f"{shown(fields.path)} disagrees with itself: {shown(differ[0])} differs in rope_parameters and "
            "rope_scaling; keep one of the two"
        )
    return parameters.with_values(fields.raw("rope_scaling"), default=True)


def _kind(found: ConfigFields) -> ScalingKind | None:
    """The kind of scaling, which a file may state under either name or under both."""
    names = [name for name in ("rope_type", "type") if found.raw(name) is not None]
    kinds: list[ScalingKind | None] = [
        found.choice(name, _KINDS, "default") for name in names or ["rope_type"]
    ]
    if kinds[0] != kinds[-1]:
        raise BadModelConfig(
            f"{shown(found.path)} disagrees with itself: rope_type is {shown(found.raw('rope_type'))}, "
            f"type is {shown(found.raw('type'))}"
        )
    return kinds[0]


def _scaling(
    fields: ConfigFields, found: ConfigFields, n_positions: int, default_original: int | None
) -> Scaling | None:
    kind = _kind(found)
    outer = fields.whole(_ORIGINAL, default=n_positions if default_original is None else default_original)
    original = found.whole(_ORIGINAL, default=outer)
    if fields.raw(_ORIGINAL) is not None and outer != original:
        raise BadModelConfig(
            f"{shown(fields.path)} disagrees with itself: {_ORIGINAL} is {outer}, in the rope's section "
            f"{original}"
        )
    if kind is None:
        return None
    values: dict[str, Any] = {}
    for number in _NUMBERS[kind]:
        if found.raw(number) is not None or number in _NEEDED.get(kind, ()):
            values[number] = found.required_number(number)
    if kind in ("yarn", "longrope"):
        values.setdefault("factor", n_positions / original)
    if kind == "yarn":
        values["truncate"] = found.flag("truncate", True)
    if kind == "longrope":
        values["short_factors"] = found.numbers("short_factor")
        values["long_factors"] = found.numbers("long_factor")
    if kind != "linear":
        # transformers stretches the base beyond max_position_embeddings, whatever else the file says.
        values["original_positions"] = n_positions if kind == "dynamic" else original
    return Scaling(kind=kind, **values)


def rotary_size_field(rotary: Rotary, head_size: int) -> float:
    """The `partial_rotary_factor` that gives the size of the rotated part, which is rounded down."""
    factor = rotary.size / head_size
    return factor if int(head_size * factor) == rotary.size else math.nextafter(factor, 1.0)


def rotary_fields(rotary: Rotary) -> dict[str, Any]:
    """The fields that `read_rotary` reads as this, in the older spelling, which transformers 5 reads too.

    The size of the rotated part is the family's to write.
    """
    written: dict[str, Any] = {"rope_theta": rotary.base}
    scaling = rotary.scaling
    if scaling is None:
        return written
    values: dict[str, Any] = {"rope_type": scaling.kind}
    defaults = {part.name: part.default for part in parts_of(Scaling)}
    for name in _NUMBERS[scaling.kind]:
        value = getattr(scaling, name)
        if value is not None and (value != defaults[name] or name in _NEEDED.get(scaling.kind, ("factor",))):
            values[name] = value
    if scaling.kind not in ("linear", "dynamic"):
        values[_ORIGINAL] = scaling.original_positions
    if not scaling.truncate:
        values["truncate"] = False
    if scaling.kind == "longrope":
        values |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    return written | {"rope_scaling": values}
