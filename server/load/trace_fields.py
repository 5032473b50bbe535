"""Checks of a trace's fields; each error says what came and what is allowed."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


class FieldError(Exception):
    """An invalid field of a line; the message says why."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")


def count(fields: Mapping[str, Any], field: str, least: int = 1) -> int:
    """A number of tokens. Raises FieldError."""
    value = fields.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise FieldError(field, f"is {value!r}; it must be a number of tokens, {least} or more")
    return value


def seconds(fields: Mapping[str, Any], field: str, unit: str = "seconds") -> float:
    """A time, 0 or more. Raises FieldError."""
    value = fields.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise FieldError(field, f"is {value!r}; it must be {unit}, 0 or more")
    return float(value)


def hashes(fields: Mapping[str, Any], n_blocks: int, block_size: int) -> Sequence[int]:
    """The numbers of a prompt's blocks. Raises FieldError."""
    value = fields.get("hash_ids")
    if (
        not isinstance(value, list)
        or any(not isinstance(one, int) or isinstance(one, bool) or one < 0 for one in value)
        or len(value) != n_blocks
    ):
        raise FieldError("hash_ids", f"must be {n_blocks} numbers, one for each {block_size} tokens")
    return value
