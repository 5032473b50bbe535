"""Makes pydantic stop validating a list at its first invalid element: a client may send a million of them.

Each invalid element costs microseconds and some hundred bytes, in calls that hold the GIL. Objects need no
such limit: json_text.MAX_NAMES_OF_ONE and MAX_CONTAINERS bound their names and their number.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_LISTS = frozenset(("list", "tuple", "set", "frozenset", "generator"))
_NOT_VALIDATION = frozenset(("metadata", "serialization", "default"))  # entries of a schema


def stop_at_first_fault(schema: Mapping[str, Any]) -> None:
    """Change all lists in a schema of pydantic's core. References are not followed."""
    for part in parts(schema):
        if part["type"] in _LISTS:
            part["fail_fast"] = True


def parts(schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and all schemas inside it, at any depth. References are not followed."""
    todo: list[Any] = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            is_schema = isinstance(part.get("type"), str)  # otherwise it has schemas by name, such as fields
            if is_schema:
                yield part
            todo += (value for key, value in part.items() if not (is_schema and key in _NOT_VALIDATION))
        elif isinstance(part, list | tuple):
            todo += part
