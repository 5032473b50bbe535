"""Parses JSON strictly and at a bounded cost, and writes it without blocking other threads.

Python's parser, and pydantic after it, hold the GIL while they read a list, and so does the garbage collector
while it visits the result. The number of values in a body is therefore limited to what takes a few tens of
milliseconds. One long string costs almost nothing.
"""

import json
import math
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from server.gateway.side_threads import LONG

# A list, object or name costs 0.2 to 1 us of processor time to parse, and 1 to 3 us to validate, whatever its
# size in bytes. So their number is limited in proportion to the body's bytes. An agent's turn with one tool
# call has 6 to 10 lists and objects in 260 to 320 bytes, 32 bytes each or more: thousands of turns pass.
COUNTED_FROM = 5_000  # bytes: a shorter body is cheap whatever it contains
BYTES_PER_CONTAINER = 16
BYTES_PER_NAME = 8
LEAST_ALLOWED = 5_000  # of lists and objects, and twice as many names, however short the body

# This many hold the GIL for 20 ms on a server's core, in one call of the parser or one garbage collection.
MAX_VALUES = 1_000_000
MAX_CONTAINERS = 100_000  # lists and objects
MAX_NAMES = 200_000  # of all objects together
MAX_NAMES_OF_ONE = 5_000  # pydantic reports every invalid one; logit_bias has up to 4,096
_SPACE = re.compile(r"[ \t\n\r]*")
MAX_DIGITS = 1_000  # of an integer; the cost of parsing one is quadratic in its digits


def parse(data: bytes) -> Any:
    """The value of a JSON text in UTF-8 with finite numbers, no duplicate names and valid Unicode.

    Raises HTTPException: 413 for too many values, 400 for anything malformed.
    """
    _check_size(data)
    try:
        text = data.decode("utf-8")
        value = (_DECODER if len(data) > MAX_DIGITS else _SHORT_DECODER).decode(text)
        if "\\ud" in text or "\\uD" in text:
            _check_surrogates(value)
        return value
    except UnicodeDecodeError as error:
        message = f"the body is not UTF-8: byte {error.start} cannot be read"
    except UnicodeEncodeError:
        message = "the body is not valid Unicode: a \\u escape is half of a surrogate pair"
    except json.JSONDecodeError as error:
        message = f"the body is not JSON: {error.msg}, at line {error.lineno}, column {error.colno}"
    except ValueError as error:
        message = f"the body is not JSON that can be read: {error}"
    except RecursionError:
        message = "the body is nested too deeply"
    raise HTTPException(400, message)


def members(data: bytes) -> dict[str, tuple[Any, bytes]]:
    """The members of a JSON object: each value, and its text as it came.

    Raises ValueError for what `parse` refuses, and for JSON that is not an object.
    """
    excess = excess_of(data)
    if excess is not None:
        raise ValueError(f"it has {excess}")
    text = data.decode("utf-8")
    try:
        found, end = _members(text)
    except (IndexError, StopIteration) as error:
        raise ValueError("it ends before the JSON object does") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if _space(text, end) != len(text):
        raise ValueError("something follows the JSON object")
    if "\\ud" in text or "\\uD" in text:
        _check_surrogates({name: value for name, (value, _) in found.items()})
    return found


def _members(text: str) -> tuple[dict[str, tuple[Any, bytes]], int]:
    found: dict[str, tuple[Any, bytes]] = {}
    at = _space(text, 0)
    if text[at : at + 1] != "{":
        raise ValueError("it is not a JSON object")
    at = _space(text, at + 1)
    while text[at] != "}":
        if found:
            if text[at] != ",":
                raise ValueError(f"a comma is missing at character {at}")
            at = _space(text, at + 1)
        if text[at] != '"':
            raise ValueError(f"a name is missing at character {at}")
        name, at = _DECODER.scan_once(text, at)
        at = _space(text, at)
        if text[at] != ":":
            raise ValueError(f"a colon is missing at character {at}")
        start = _space(text, at + 1)
        value, at = _DECODER.scan_once(text, start)
        if name in found:
            raise ValueError(f"an object has the name {name[:100]!r} twice")
        found[name] = value, text[start:at].encode("utf-8")
        if len(found) > MAX_NAMES_OF_ONE:
            raise ValueError(f"an object has over {MAX_NAMES_OF_ONE} names")
        at = _space(text, at)
    return found, at + 1


def _space(text: str, at: int) -> int:
    """The first character from `at` on that is no white space."""
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _check_size(data: bytes) -> None:
    """Raise HTTPException 413 if the text has too many values."""
    excess = excess_of(data)
    if excess is not None:
        raise HTTPException(413, f"the body has {excess}; send less in one request")


def excess_of(data: bytes) -> str | None:
    """The limit of `parse` that a JSON text exceeds, such as "more than 5000 lists and objects".

    Characters in strings are counted too at first: that is cheap, never too low, and exact for numbers.
    """
    counted = np.frombuffer(data, np.uint8)
    n_bytes = len(data)
    if n_bytes <= COUNTED_FROM or not _excess(counted, n_bytes):
        return None
    if b"\\" in data:
        data = data.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quote starts or ends a string
        counted = np.frombuffer(data, np.uint8)
    in_string = np.bitwise_xor.accumulate((counted == ord('"')).view(np.uint8))
    return _excess(np.where(in_string, np.uint8(0), counted), n_bytes)


def _excess(counted: npt.NDArray[np.uint8], n_bytes: int) -> str | None:
    commas, colons, lists, objects = (np.count_nonzero(counted == ord(mark)) for mark in ",:[{")
    for kind, n, most, n_paid, bytes_each in (
        ("values", commas + lists + objects, MAX_VALUES, MAX_VALUES, 1),
        ("names", colons, MAX_NAMES, max(2 * LEAST_ALLOWED, n_bytes // BYTES_PER_NAME), BYTES_PER_NAME),
        (
            "lists and objects",
            lists + objects,
            MAX_CONTAINERS,
            max(LEAST_ALLOWED, n_bytes // BYTES_PER_CONTAINER),
            BYTES_PER_CONTAINER,
        ),
    ):
        if n > most:
            return f"more than {most} {kind}"
        if n > n_paid:
            return f"more than {n_paid} {kind} in {n_bytes} bytes, one for each {bytes_each}"
    return None


def _check_surrogates(value: Any) -> None:
    """Raise UnicodeEncodeError for a string with a lone surrogate, which UTF-8 cannot encode."""
    todo = [value]
    while todo:
        element = todo.pop()
        if isinstance(element, str):
            element.encode("utf-8")
        elif isinstance(element, list):
            todo += element
        elif isinstance(element, dict):
            todo += element.keys()
            todo += element.values()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_NAMES_OF_ONE:
        raise ValueError(f"an object has {len(pairs)} names; {MAX_NAMES_OF_ONE} are allowed")
    value = dict(pairs)
    if len(value) < len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"an object has the name {name[:100]!r} twice")
            seen.add(name)
    return value


def _whole_number(text: str) -> int:
    """Parse an integer. Because this is a Python function, other threads can run after each number."""
    if len(text) > MAX_DIGITS:
        raise ValueError(f"the number {text[:50]}... has more than {MAX_DIGITS} digits")
    return int(text)


def _number(text: str) -> float | int:
    """Parse a number. 1.0 becomes an int, because JSON Schema counts it as an integer."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:50]} is too large")
    return int(number) if number.is_integer() and abs(number) < 1 << 64 else number


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


_HOOKS: dict[str, Any] = {
    "object_pairs_hook": _object,
    "parse_constant": _no_constant,
    "parse_float": _number,
}
_DECODER: Any = json.JSONDecoder(**_HOOKS, parse_int=_whole_number)
_SHORT_DECODER: Any = json.JSONDecoder(**_HOOKS)  # of texts that cannot have too long a number


_AT_ONCE = (
    4_000  # encoder tokens joined at a time: they are short, and a list of all would take too much memory
)

_ascii = json.JSONEncoder(separators=(",", ":"))
_unicode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


def as_json(value: object, n_characters: int = 0, *, ascii: bool = True) -> str:
    """Encode `value`. Without `ascii`, characters outside ASCII are not escaped.

    Python's fast encoder holds the GIL until it is done. So if `n_characters`, the approximate length, is
    large, the slow encoder is used, and other threads can run meanwhile.
    """
    encoder = _ascii if ascii else _unicode
    if n_characters <= LONG:
        return encoder.encode(value)
    return "".join(_joined(encoder.iterencode(value)))


def as_json_bytes(value: object, n_characters: int = 0) -> bytes:
    """Encode `value` in UTF-8, characters outside ASCII not escaped. As `as_json`, and faster if short."""
    if n_characters <= LONG:
        return to_json(value)
    return as_json(value, n_characters, ascii=False).encode()


def _joined(parts: Iterator[str]) -> Iterator[str]:
    while part := "".join(islice(parts, _AT_ONCE)):
        yield part
