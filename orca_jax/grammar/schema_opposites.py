"""The opposite of a keyword: the schemas of all values that are not valid by it."""

from collections.abc import Callable
from typing import Any

from orca_jax.grammar.schema_keywords import TYPES, not_built
from orca_jax.grammar.schema_values import is_number, json_number, type_of, types_of


def _typed(types: frozenset[str]) -> list[Any]:
    """The schema of the values of these types, if `type` can say it."""
    if len(types & {"integer", "fraction"}) == 1:
        raise not_built("not")
    names = [name for name in TYPES if name in types or (name == "number" and "integer" in types)]
    return [{"type": names}] if names else []


def other_types(types: Any) -> list[Any]:
    """The schema of all values of other types; none if there are none."""
    return _typed(types_of(TYPES) - types_of(types))


def not_constant(value: Any) -> list[Any]:
    """All values but this one."""
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
