"""Reads and writes the rotary positions of a config.json, in every spelling.

Before transformers 5 there were a field `rope_theta` and an object `rope_scaling` with a `rope_type` or
`type`. Now `rope_parameters` holds all of it, in some models by kind of layer. transformers 5 keeps the
fields of an older object, so a file may have both `type` and `rope_type`.
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
ORIGINAL = "original_max_position_embeddings"
# The numbers of each scaling; config.json's names are ours too.
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
    others: tuple[str, ...] = (),
) -> Rotary:
    """Read the rotary positions, where `rope_parameters` is nested those of a `kind_of_layer`.

    `base_name` is the field with the base outside of `rope_parameters` (Gemma 3 has two). `partial` is the
    family's default of `partial_rotary_factor`, without which that field is refused. `default_original` is
    its default of `original_max_position_embeddings`, which is otherwise `n_positions`. `others` are fields
    of the object that the family reads itself. Raises BadModelConfig, UnsupportedModel or ConfigError.
    """
    base = fields.number(base_name, 0.0) or None
    found = rope_section(fields, kind_of_layer)
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
        for name in others:
            found.raw(name)
        found.leave_others({})
    return Rotary(
        size=int(head_size * (1.0 if factor is None else factor)),
        base=default_base if base is None else base,
        interleaved=interleaved,
        scaling=scaling,
    )


def rope_section(fields: ConfigFields, kind_of_layer: str | None = None) -> ConfigFields | None:
    """Find the object with the rotary positions. A file may have both objects if they agree."""
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
    """Read the kind of scaling, which may be under either name or under both."""
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
    outer = fields.whole(ORIGINAL, default=n_positions if default_original is None else default_original)
    original = found.whole(ORIGINAL, default=outer)
    if fields.raw(ORIGINAL) is not None and outer != original:
        raise BadModelConfig(
            f"{shown(fields.path)} disagrees with itself: {ORIGINAL} is {outer}, in the rope's section "
            f"{original}"
        )
    if kind is None:
        return None
    values: dict[str, Any] = {}
    for number in _NUMBERS[kind]:
        if found.raw(number) is not None or number in _NEEDED.get(kind, ()):
            values[number] = found.required_number(number)
    if kind in ("yarn", "longrope"):
        if original < 1:
            raise BadModelConfig(f"{shown(fields.path)}: {ORIGINAL}: expected at least 1, found {original}")
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
    """The `partial_rotary_factor` from which the size of the rotated part follows when rounded down."""
    factor = rotary.size / head_size
    return factor if int(head_size * factor) == rotary.size else math.nextafter(factor, 1.0)


def rotary_fields(rotary: Rotary) -> dict[str, Any]:
    """Write rotary positions in the older spelling, which transformers 5 reads too.

    The family writes the size of the rotated part.
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
        values[ORIGINAL] = scaling.original_positions
    if not scaling.truncate:
        values["truncate"] = False
    if scaling.kind == "longrope":
        values |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    return written | {"rope_scaling": values}


def without_rope(written: Mapping[str, Any]) -> dict[str, Any]:
    """The written fields but those of the older spelling of rotary positions."""
    return {name: value for name, value in written.items() if name not in ("rope_theta", "rope_scaling")}


def rope_parameters(rotary: Rotary, **other: Any) -> dict[str, Any]:
    """Write rotary positions and `other` fields beside them in the newer spelling, one for all layers."""
    older = rotary_fields(rotary)
    parameters = {"rope_type": "default", **older.get("rope_scaling", {}), **other}
    return {"rope_parameters": parameters | {"rope_theta": older["rope_theta"]}}
