"""Reads a form with one file piece by piece, so that no whole file is ever in memory."""

from collections.abc import AsyncIterator
from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from orca_jax.errors import InvalidRequest

_MAX_FIELD = 4096  # bytes of a field other than the file
_MAX_PARTS = 16  # the parser bounds each part's headers


class Part(NamedTuple):
    """A field's whole value, or a piece of the file; the file's first piece is empty."""

    name: str
    filename: str | None  # None for a field
    data: bytes


class _Reader:
    """Collects the form's parts from the parser's callbacks, in `parts`."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.ended = False
        self._header, self._value = bytearray(), bytearray()
        self._name = ""
        self._filename: str | None = None
        self._field = bytearray()
        self._n_parts = 0

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            filename = options.get(b"filename")
            self._filename = None if filename is None else filename.decode("utf-8", "replace")
        self._header.clear()
        self._value.clear()

    def part_begin(self) -> None:
        self._name, self._filename = "", None
        self._field.clear()
        self._n_parts += 1
        if self._n_parts > _MAX_PARTS:
            raise InvalidRequest(f"the form has over {_MAX_PARTS} parts; send purpose and file", param="file")

    def headers_finished(self) -> None:
        if self._filename is not None:
            self.parts.append(Part(self._name, self._filename, b""))

    def part_data(self, data: bytes, start: int, end: int) -> None:
        if self._filename is not None:
            self.parts.append(Part(self._name, self._filename, data[start:end]))
            return
        self._field += data[start:end]
        if len(self._field) > _MAX_FIELD:
            message = f"the field {self._name[:100]!r} has more than {_MAX_FIELD} bytes"
            raise InvalidRequest(message, param=self._name[:100])

    def part_end(self) -> None:
        if self._filename is None:
            self.parts.append(Part(self._name, None, bytes(self._field)))

    def end(self) -> None:
        self.ended = True


async def read_form(request: Request) -> AsyncIterator[Part]:
    """The form's parts as they arrive. Raises HTTPException 400 or 415, and InvalidRequest."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        problem = "the body must be a form with a file; send it as multipart/form-data with a boundary"
        raise HTTPException(415, problem)
    reader = _Reader()
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": reader.part_begin,
                "on_part_data": reader.part_data,
                "on_part_end": reader.part_end,
                "on_header_field": reader.header_field,
                "on_header_value": reader.header_value,
                "on_header_end": reader.header_end,
                "on_headers_finished": reader.headers_finished,
                "on_end": reader.end,
            },
        )
        async for chunk in request.stream():
            parser.write(chunk)
            parts, reader.parts = reader.parts, []
            for part in parts:
                yield part
    except FormParserError as error:
        raise HTTPException(400, f"the body is not a form that can be read: {error!s:.200}") from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the client left before its body was complete") from error
    if not reader.ended:
        raise HTTPException(400, "the body is not a whole form: its last boundary is missing")
