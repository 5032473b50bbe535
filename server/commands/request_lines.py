"""The input of `orca generate --input`: lines of JSON objects."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from orca_jax.errors import InvalidRequest

MAX_LINE_BYTES = 1 << 22
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class BadLine(InvalidRequest):
    """A line that is not a valid request."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input; `data` is None if the line is too long."""

    number: int
    end: int  # offset of its end in the input, in bytes
    data: bytes | None

    def values(self) -> dict[str, Any]:
        """The JSON object of the line. Raises BadLine for anything else."""
        if self.data is None:
            raise BadLine(f"the line has more than {MAX_LINE_BYTES} bytes", param="line")
        try:
            text = self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            message = f"the line is not UTF-8: {error.reason} at byte {error.start}"
            raise BadLine(message, param="line") from error
        try:
            values = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
        except RecursionError as error:
            raise BadLine("the line is not usable JSON: it is nested too deeply", param="line") from error
        except ValueError as error:
            raise BadLine(f"the line is not JSON: {error}", param="line") from error
        if not isinstance(values, dict):
            raise BadLine(f"the line holds {type(values).__name__}, not an object", param="line")
        return values


def read_lines(source: BinaryIO) -> Iterator[Line]:
    """The lines that are not blank. Never holds more of a line than MAX_LINE_BYTES."""
    number = end = 0
    while data := source.readline(MAX_LINE_BYTES + 1):
        number += 1
        end += len(data)
        too_long = len(data) > MAX_LINE_BYTES
        while too_long and not data.endswith(b"\n") and (data := source.readline(MAX_LINE_BYTES)):
            end += len(data)
        if number == 1 and not too_long:
            data = data.removeprefix(_BYTE_ORDER_MARK)
        if too_long or data.strip():
            yield Line(number, end, None if too_long else data)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key appears twice")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
