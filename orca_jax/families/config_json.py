"""A ModelConfig as JSON, for orca.json and between processes.

The JSON has the fields of the config's parts, nested in the same way. Equal neighbouring layers are one entry
with a `count`. A field with a default may be left out.
"""

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from itertools import groupby
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from orca_jax.errors import ConfigError
from orca_jax.families.limits import check_size
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.families.packed_form import Joined, PackedForm
from orca_jax.families.weight_form import DENSE, Dense, WeightForm

_T = TypeVar("_T")
# Makes the error for a field's name, what was expected, and the value found.
Bad = Callable[[str, str, object], Exception]


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Write the model, as dense weights have it, as JSON that `config_from_json` reads."""
    config = config.with_forms({})
    values: dict[str, Any] = asdict(config) | {"layers": _grouped(config.layers)}
    del values["forms"]
    if config.encoder is not None:
        values["encoder"]["layers"] = _grouped(config.encoder.layers)
    return values


def _grouped(layers: Iterable[Layer]) -> list[dict[str, Any]]:
    found = [{"count": len([*group]), **asdict(layer)} for layer, group in groupby(layers)]
    for layer in found:
        del layer["forms"]
        if layer["recurrence"] is None:  # so that programs from before recurrent layers read the others
            del layer["recurrence"]
    return found


def forms_to_json(config: ModelConfig) -> dict[str, Any]:
    """Write the packed forms of the model's weights, by name, as JSON that `with_forms_of_json` reads."""

    def written(form: WeightForm) -> Any:
        if isinstance(form, Joined):
            return [written(part) for part in form.forms]
        return None if isinstance(form, Dense) else asdict(cast("PackedForm", form))

    return {name: written(form) for name, form in config.weight_forms.items()}


def with_forms_of_json(config: ModelConfig, values: Mapping[str, Any]) -> ModelConfig:
    """The model with the forms that `forms_to_json` of another process of this program wrote."""

    def form(value: Any) -> WeightForm:
        if isinstance(value, list):
            return Joined(tuple(form(part) for part in value))
        return DENSE if value is None else PackedForm(**{**value, "table": tuple(value["table"])})

    return config.with_forms({name: form(value) for name, value in values.items()})


def config_from_json(values: object, bad: Bad) -> ModelConfig:
    """Read a model from parsed JSON.

    Raises what `bad` makes for a field that is missing, unknown or of the wrong type, and ConfigError for a
    value out of its range.
    """
    return part_from_json(ModelConfig, values, "model", bad)


def _layers(entries: object, name: str, bad: Bad) -> tuple[Layer, ...]:
    if not isinstance(entries, list) or not entries:
        raise bad(name, "a list of layers", entries)
    layers: list[Layer] = []
    for i, entry in enumerate(cast("list[object]", entries)):
        where = f"{name}[{i}]"
        count = 1
        if isinstance(entry, dict):
            entry = dict(cast("dict[str, Any]", entry))
            count = entry.pop("count", 1)
        check_size("n_layers", count)  # before so many are made
        layers += [part_from_json(Layer, entry, where, bad)] * count
        check_size("n_layers", len(layers))
    return tuple(layers)


def part_from_json(kind: type[_T], values: object, name: str, bad: Bad) -> _T:
    """Read an object of the dataclass `kind`, which errors call `name`. Raises as `config_from_json`."""
    if not isinstance(values, dict):
        raise bad(name, "an object", values)
    values = cast("dict[str, Any]", values)
    hints = get_type_hints(kind)
    known: dict[str, Field[Any]] = {
        field.name: field for field in fields(cast("Any", kind)) if field.name != "forms"
    }
    for key in values:
        if key not in known:
            raise bad(f"{name}.{key}", f"one of {', '.join(sorted(known))}", key)
    for key, field in known.items():
        if key not in values and field.default is MISSING:
            raise bad(f"{name}.{key}", _expected(hints[key]), None)
    return kind(**{key: _value(hints[key], value, f"{name}.{key}", bad) for key, value in values.items()})


def _value(hint: Any, value: object, name: str, bad: Bad) -> object:
    choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in choices:
        return None
    kind = choices[0]
    if kind == tuple[Layer, ...]:
        return _layers(value, name, bad)
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise bad(name, _expected(hint), value)
        kind = _chosen(choices, cast("dict[str, Any]", value), name, bad)
        return part_from_json(cast("type[object]", kind), value, name, bad)
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(_value(get_args(kind)[0], item, name, bad) for item in cast("list[object]", value))
    wanted = str if get_origin(kind) is Literal else get_origin(kind) or kind
    if isinstance(value, bool) is not (wanted is bool) or not isinstance(
        value, (int, float) if wanted is float else wanted
    ):
        raise bad(name, _expected(hint), value)
    return value


def _chosen(choices: tuple[Any, ...], value: Mapping[str, Any], name: str, bad: Bad) -> Any:
    """The dataclass among these whose `kind` the object names, or the only one."""
    parts = [choice for choice in choices if is_dataclass(choice)]
    if len(parts) == 1:
        return parts[0]
    by_name = {get_args(get_type_hints(part)["kind"])[0]: part for part in parts}
    if value.get("kind") not in by_name:
        raise bad(f"{name}.kind", f"one of {', '.join(sorted(by_name))}", value.get("kind"))
    return by_name[value["kind"]]


def _expected(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    origins = {Literal: "text", tuple: "a list"}
    return " or ".join(names.get(kind) or origins.get(get_origin(kind), "an object") for kind in choices)


def plain_error(name: str, rule: str, value: object) -> ConfigError:
    """The error for JSON that another process of this program wrote."""
    return ConfigError(f"{name}: expected {rule}, found {value!r}")
