"""Values as JSON Schema compares them, and schemas put together from others."""

# Schemas come from clients: any JSON may stand anywhere.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

import json
from collections.abc import Sequence
from typing import Any

from orca_jax.grammar.schema_document import CannotFollow

_EXACT = 1 << 53  # integers up to here are exact as floating-point numbers of 64 bits


def is_number(value: Any) -> bool:
    """Whether it is a number, and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def json_number(keyword: str, value: Any) -> Any:
    """The number as llguidance should read it: an integer without a fraction; other values as they are."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
        return int(value)
    if isinstance(value, int) and abs(value) > _EXACT:
        try:
            is_exact = float(value) == value
        except OverflowError:
            is_exact = False
        if not is_exact:
            raise CannotFollow(f"{keyword} is an integer that floating-point numbers of 64 bits do not have")
    return value


def values_of(schema: Any) -> list[Any] | None:
    """The values that `const` and `enum` list."""
    if not isinstance(schema, dict):
        return None
    listed = schema["enum"] if isinstance(schema.get("enum"), list) else None
    if "const" not in schema:
        return listed
    constant = canonical(schema["const"])
    is_listed = listed is None or any(canonical(each) == constant for each in listed)
    return [schema["const"]] if is_listed else []


def canonical(value: Any) -> str:
    """The same text for values that JSON Schema counts as equal: 1 and 1.0, objects in any order."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _normal(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_normal(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def type_of(value: Any) -> str:
    """The type of a value; `fraction` for a number that is no integer."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def types_of(types: Any) -> frozenset[str]:
    """The types that `type` lists, a number as `integer` and `fraction`."""
    names = {
        name for name in (types if isinstance(types, list | tuple) else [types]) if isinstance(name, str)
    }
    return frozenset(names - {"number"} | ({"integer", "fraction"} if "number" in names else set()))


# Schemas.


def is_plain(constant: Any) -> bool:
    """Whether the schema of a constant is `const` alone."""
    return constant.keys() == {"const"}


def both(*schemas: Any) -> Any:
    """The schema of what is valid by all of these."""
    if any(each is False for each in schemas):
        return False
    parts = [each for each in schemas if each is not True and each != {}]
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else True


def any_of(schemas: Sequence[Any]) -> Any:
    """The schema of what is valid by one of these or several."""
    if any(each is True for each in schemas):
        return True
    options = [each for each in schemas if each is not False]
    return {"anyOf": options} if len(options) > 1 else options[0] if options else False


def object_of(properties: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The schema of an object with exactly these properties, in this order."""
    return {
        "type": "object",
        "properties": {key: properties[key] for key in keys},
        "required": list(keys),
        "additionalProperties": False,
    }
