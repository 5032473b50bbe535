"""The keywords of JSON Schema, its rules for comparing values, and schemas combined or negated."""

# Schemas come from clients: any JSON may stand anywhere.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

import json
from collections.abc import Callable, Sequence
from typing import Any

from orca_jax.grammar.schema_document import CannotFollow

TYPES = ("null", "boolean", "number", "string", "array", "object")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
LENGTHS = ("minLength", "maxLength")
ARRAYS = (
    *("prefixItems", "items", "additionalItems", "minItems", "maxItems", "uniqueItems"),
    *("contains", "minContains", "maxContains", "unevaluatedItems"),
)
MAPS = ("properties", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies")
OBJECTS = (
    *MAPS,
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("required", "minProperties", "maxProperties"),
)
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
COMBINED = ("allOf", "anyOf", "oneOf", "not", "if")
# Every other keyword is an annotation, or holds schemas for references to name.
ASSERTIONS = frozenset(
    (
        *("type", "const", "enum", "pattern", "format"),
        *(*BOUNDS, *LENGTHS, *ARRAYS, *OBJECTS, *REFERENCES, *COMBINED),
    )
)

# Why a keyword is refused, where it is.
NOT_BUILT = {
    "uniqueItems": "a grammar does not remember the items before; maxItems 1 is possible",
    "contains": "a grammar does not remember the items before",
    "minProperties": "names that are not listed may come twice, so one more than is required is the most",
    "unevaluatedItems": "not supported together with anyOf, oneOf, allOf, if, contains or $ref",
    "unevaluatedProperties": "not supported together with anyOf, oneOf, if or dependencies",
    "propertyNames": "only enum, const, pattern and lengths are supported, without patternProperties",
    "not": "only types, constants, bounds and properties can be turned into their opposite",
}

_EXACT = 1 << 53  # integers up to here are exact as floating-point numbers of 64 bits


def not_built(keyword: str) -> CannotFollow:
    """The error for a keyword of NOT_BUILT."""
    return CannotFollow(f"it has {keyword}: {NOT_BUILT[keyword]}")


def is_trivial(schema: Any) -> bool:
    """Whether every value is valid by the schema, because it has no keyword that restricts values."""
    return not ASSERTIONS & schema.keys() if isinstance(schema, dict) else schema is True


def is_number(value: Any) -> bool:
    """Whether the value is a number, and not a boolean."""
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
    """The same text for values that are equal in JSON Schema: 1 and 1.0, objects in any order."""
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
    """The schema of the values that are valid by all of these."""
    if any(each is False for each in schemas):
        return False
    parts = [each for each in schemas if each is not True and each != {}]
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else True


def any_of(schemas: Sequence[Any]) -> Any:
    """The schema of the values that are valid by at least one of these."""
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


# The opposites of keywords: the schemas of all values that are not valid by one.


def _typed(types: frozenset[str]) -> list[Any]:
    """The schema of the values of these types, if `type` can say it."""
    if len(types & {"integer", "fraction"}) == 1:
        raise not_built("not")
    names = [name for name in TYPES if name in types or (name == "number" and "integer" in types)]
    return [{"type": names}] if names else []


def other_types(types: Any) -> list[Any]:
    """The schema of all values of other types; an empty list if `types` are all types."""
    return _typed(types_of(TYPES) - types_of(types))


def not_constant(value: Any) -> list[Any]:
    """The schemas of all values except this one."""
    others = other_types("number" if is_number(value) else type_of(value))
    if value is None:
        return others
    if isinstance(value, bool):
        return [*others, {"const": not value}]
    if is_number(value):
        number = json_number("const", value)
        return [
            *others,
            {"type": "number", "exclusiveMaximum": number},
            {"type": "number", "exclusiveMinimum": number},
        ]
    if not value:  # an empty text, array or object
        kind = type_of(value)
        return [*others, {"type": kind, _LEAST[kind]: 1}]
    raise not_built("not")


_LEAST = {"string": "minLength", "array": "minItems", "object": "minProperties"}


def _shorter(kind: str, keyword: str, length: Any) -> list[Any]:
    return [{"type": kind, keyword: length - 1}] if length > 0 else []


OPPOSITES: dict[str, Callable[[Any], list[Any]]] = {
    "minimum": lambda n: [{"type": "number", "exclusiveMaximum": n}],
    "maximum": lambda n: [{"type": "number", "exclusiveMinimum": n}],
    "exclusiveMinimum": lambda n: [{"type": "number", "maximum": n}],
    "exclusiveMaximum": lambda n: [{"type": "number", "minimum": n}],
    "minLength": lambda n: _shorter("string", "maxLength", n),
    "maxLength": lambda n: [{"type": "string", "minLength": n + 1}],
    "minItems": lambda n: _shorter("array", "maxItems", n),
    "maxItems": lambda n: [{"type": "array", "minItems": n + 1}],
}
