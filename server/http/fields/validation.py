"""Turns pydantic's validation errors into one message and the field at fault."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from orca_jax.errors import shown

_MOST_RULES = 4
_PYDANTIC = "Input should be "
_OBJECT_TYPES = ("dict_type", "model_type", "model_attributes_type")
_Path = tuple[str | int, ...]


def fault(errors: Sequence[Mapping[str, Any]], body: object) -> tuple[str | None, str]:
    """The dotted path of the field at fault, None for the body itself, and the error message.

    `errors` are pydantic's, `body` is the request body. Only the first field at fault is reported. A field
    with several possible types has an error for each, and the message lists them all.
    """
    first = errors[0]
    path = _path(first, body)
    param = ".".join(map(str, path)) or None
    name = param or "the body"
    if first["type"] == "missing":
        return param, f"{name} is missing" + ("" if param else "; send a JSON object")
    if first["type"] == "extra_forbidden":
        return param, f"{name} is not known here; leave it out (GET /openapi.json shows what there is)"
    value = f"{name} is {shown(_value_at(body, path))}"
    if not first["msg"].startswith(_PYDANTIC):  # the message is a complete sentence
        return param, f"{value}; {first['msg'].removeprefix('Value error, ')}"
    rules = dict.fromkeys(
        _rule(error, below[len(path) :])
        for error in errors
        if (below := _path(error, body))[: len(path)] == path
    )
    return param, f"{value}; it should be {', or '.join(islice(rules, _MOST_RULES))}"


def _path(error: Mapping[str, Any], body: object) -> _Path:
    """Where in the body the error is, without pydantic's own names for the alternatives of a union."""
    steps = error["loc"][1:]  # after "body" or "query"
    path: list[str | int] = []
    value = body
    for i, step in enumerate(steps):
        last = i == len(steps) - 1
        if (isinstance(value, dict) and step in value) or (
            isinstance(value, list) and isinstance(step, int) and step < len(value)
        ):
            value = value[step]
        elif not (last and error["type"] == "missing"):
            continue
        path.append(step)
    return tuple(path)


def _value_at(body: object, path: _Path) -> object:
    value: Any = body
    for step in path:
        value = value[step]
    return value


def _rule(error: Mapping[str, Any], below: _Path) -> str:
    rule = "a JSON object" if error["type"] in _OBJECT_TYPES else error["msg"].removeprefix(_PYDANTIC)
    return rule if not below else f"at {'.'.join(map(str, below))} {rule}"
