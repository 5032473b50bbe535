"""Answers as JSON, however long they are."""

import json
from collections.abc import Iterator
from itertools import islice

from server.gateway.side_threads import LONG

_AT_ONCE = 4_000  # of the encoder's parts, each a value or a mark: they are short, and would take much memory

_ascii = json.JSONEncoder(separators=(",", ":"))
_unicode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


def as_json(value: object, n_characters: int = 0, *, ascii: bool = True) -> str:
    """`value` as JSON; without `ascii` other characters stand for themselves.

    Python's fast encoder holds the interpreter until it is done, so where there are about `n_characters` the
    slow one writes them, beside which other threads run.
    """
    encoder = _ascii if ascii else _unicode
    if n_characters <= LONG:
        return encoder.encode(value)
    return "".join(_joined(encoder.iterencode(value)))


def _joined(parts: Iterator[str]) -> Iterator[str]:
    while part := "".join(islice(parts, _AT_ONCE)):
        yield part
