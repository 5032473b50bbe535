"""Finds schemas without a finite value, because every valid value has another one inside."""

# Schemas come from clients: any JSON may stand anywhere.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from orca_jax.grammar.schema_document import CannotFollow
from orca_jax.grammar.schema_values import TYPES, is_number, types_of

DEFINITIONS = "#/$defs/"


def ended(
    schema: Any, definitions: Mapping[str, Any], spend: Callable[[], None]
) -> tuple[Any, dict[str, Any]]:
    """The schema and its definitions, with `false` for every definition without a finite value.

    llguidance would begin such a value and never end it. Calls `spend` for each look at a definition. Raises
    CannotFollow if no value is left.
    """
    endless = definitions.keys() - _finite(definitions, spend)
    made = dict(definitions)
    if endless:
        made = {name: _without(each, endless) for name, each in definitions.items()}
        schema = _without(schema, endless)
    if not _has_end(schema, made.keys()):
        raise CannotFollow("no value is valid by it, or only infinite ones")
    return schema, made


def _finite(definitions: Mapping[str, Any], spend: Callable[[], None]) -> set[str]:
    """The definitions with a finite value, as far as references decide."""
    users = dict[str, list[str]]()  # by the name of a definition: the definitions that refer to it
    for name, schema in definitions.items():
        for other in set(_references(schema)):
            users.setdefault(other, []).append(name)
    found, todo = set[str](), dict.fromkeys(definitions)  # in order: later ones may be found meanwhile
    while todo:
        name = next(iter(todo))
        del todo[name]
        spend()
        if name not in found and _has_end(definitions[name], found):
            found.add(name)
            todo |= dict.fromkeys(users.get(name, ()))
    return found


def _references(schema: Any) -> Iterator[str]:
    """The names of the definitions that a rewritten schema refers to."""
    todo: list[Any] = [schema]
    while todo:
        each = todo.pop()
        if isinstance(each, dict):
            if isinstance(each.get("$ref"), str):
                yield each["$ref"].removeprefix(DEFINITIONS)
            todo.extend(each.values())
        elif isinstance(each, list):
            todo.extend(each)


def _has_end(schema: Any, finite: Collection[str]) -> bool:
    """Whether the schema may have a finite value, given that the definitions `finite` have one."""
    if not isinstance(schema, dict):
        return schema is not False
    if "$ref" in schema and schema["$ref"].removeprefix(DEFINITIONS) not in finite:
        return False
    for key, enough in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        if isinstance(schema.get(key), list) and not enough(_has_end(each, finite) for each in schema[key]):
            return False
    types = types_of(schema.get("type", TYPES))
    if not types <= {"array", "object"}:
        return True
    return ("array" in types and _array_ends(schema, finite)) or (
        "object" in types and _object_ends(schema, finite)
    )


def _array_ends(schema: dict[str, Any], finite: Collection[str]) -> bool:
    least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
    if not is_number(least) or not isinstance(first, list):
        return True
    needed = first[: int(min(least, len(first)))]
    if least > len(first):
        needed.append(schema.get("items", True))
    return all(_has_end(each, finite) for each in needed)


def _object_ends(schema: dict[str, Any], finite: Collection[str]) -> bool:
    names = schema.get("properties", {})
    required = {each for each in schema.get("required", ()) if isinstance(each, str)}
    return all(_has_end(names[each], finite) for each in required & names.keys())


def _without(schema: Any, endless: Collection[str]) -> Any:
    """The schema with `false` for the references to these definitions."""
    if isinstance(schema, list):
        return [_without(each, endless) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("$ref"), str) and schema["$ref"].removeprefix(DEFINITIONS) in endless:
        return False
    return {key: _without(each, endless) for key, each in schema.items()}
