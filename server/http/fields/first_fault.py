"""Makes pydantic stop validating lists and maps at their first faults: a client may send a million elements.

Each invalid element costs microseconds and some hundred bytes, in calls that hold the GIL. Valid elements
that are objects cost as much, so other threads get a chance to run before each of them.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from pydantic import ValidatorFunctionWrapHandler
from pydantic_core import PydanticKnownError, core_schema

_LISTS = frozenset(("list", "tuple", "set", "frozenset", "generator"))
_NOT_VALIDATION = frozenset(("metadata", "serialization", "default"))  # entries of a schema
_AT_ONCE = 64  # entries of a map
# Types whose validation takes almost no time.
_SHORT = frozenset(("any", "none", "bool", "int", "float", "str", "literal"))


def stop_at_first_faults(schema: Mapping[str, Any]) -> None:
    """Change all lists and maps in a schema of pydantic's core, once. References are not followed."""
    found = list(parts(schema))
    done = [part["schema"] for part in found if part["type"] == "function-wrap" and _is_in_pieces(part)]
    for part in found:
        if part["type"] in _LISTS:
            part["fail_fast"] = True
            if "items_schema" in part:
                part["items_schema"] = _pausing(part["items_schema"])
        elif part["type"] == "dict" and not any(part is each for each in done):
            values = part.get("values_schema", {"type": "any"})  # names are valid: in JSON all are strings
            if values["type"] != "any":
                _read_in_pieces(part)


def parts(schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and all schemas inside it, at any depth. References are not followed."""
    todo: list[Any] = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            # Otherwise it is a map of schemas by name, such as fields.
            is_schema = isinstance(part.get("type"), str)
            if is_schema:
                yield part
            todo += (value for key, value in part.items() if not (is_schema and key in _NOT_VALIDATION))
        elif isinstance(part, list | tuple):
            todo += part


def _pausing(schema: Any) -> Any:
    """The schema, with a pause before each value whose validation may take long."""
    if schema["type"] in _SHORT:
        return schema
    if schema["type"] == "union":  # of texts and objects: only objects need a pause
        choices = [
            (_pausing(each[0]), each[1]) if isinstance(each, tuple) else _pausing(each)
            for each in schema["choices"]
        ]
        return {**schema, "choices": choices}
    if schema["type"] == "function-before" and schema["function"]["function"] is _pause:
        return schema
    return core_schema.no_info_before_validator_function(_pause, schema)


def _pause(element: Any) -> Any:
    """Let other threads run, which the interpreter does when it calls a Python function."""
    return element


def _read_in_pieces(part: dict[str, Any]) -> None:
    assert "min_length" not in part, "a piece may be shorter than the map"
    inner = dict(part)
    validate = partial(_in_pieces, part.get("max_length"))
    outer: Any = core_schema.no_info_wrap_validator_function(validate, inner)  # pyright: ignore[reportArgumentType]
    outer |= {key: inner.pop(key) for key in ("ref", "metadata") if key in inner}
    part.clear()
    part.update(outer)


def _is_in_pieces(part: dict[str, Any]) -> bool:
    function = part["function"]["function"]
    return isinstance(function, partial) and function.func is _in_pieces  # pyright: ignore[reportUnknownMemberType]


def _in_pieces(most: int | None, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate a map piece by piece, because pydantic reports all faults of a map."""
    if not isinstance(value, dict):
        return handler(value)
    n = len(value)
    if most is not None and n > most:
        limits = {"field_type": "Dictionary", "max_length": most, "actual_length": n}
        raise PydanticKnownError("too_long", limits)
    if n <= _AT_ONCE:
        return handler(value)
    entries = iter(value.items())
    valid: dict[str, Any] = {}
    while piece := dict(islice(entries, _AT_ONCE)):
        valid |= handler(piece)
    return valid
