"""Writes JSON responses of any length without blocking other threads."""

import json
from collections.abc import Iterator
from itertools import islice

from server.gateway.side_threads import LONG

_AT_ONCE = 4_000  # encoder tokens joined at a time: they are short, and a list of all would take much memory

_ascii = json.JSONEncoder(separators=(",", ":"))
_unicode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


def as_json(value: object, n_characters: int = 0, *, ascii: bool = True) -> str:
    """`value` as JSON. Without `ascii`, characters outside ASCII are not escaped.

    Python's fast encoder holds the GIL until it is done. So if `n_characters`, the approximate length, is
    large, the slow encoder writes the JSON, and other threads can run meanwhile.
    """
    encoder = _ascii if ascii else _unicode
    if n_characters <= LONG:
        return encoder.encode(value)
    return "".join(_joined(encoder.iterencode(value)))


def _joined(parts: Iterator[str]) -> Iterator[str]:
    while part := "".join(islice(parts, _AT_ONCE)):
        yield part
