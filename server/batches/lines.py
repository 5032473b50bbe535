"""The lines of a batch's input and results, in OpenAI's form."""

import hashlib
import json
from collections.abc import Callable, Container
from typing import IO, Any, NamedTuple

from server.gateway.random_ids import random_id

MAX_LINES = 50_000  # OpenAI's
_MAX_ID = 256  # characters
_MOST_ERRORS = 20  # of an input that are reported
_NAMES = ("custom_id", "method", "url", "body")


# Parses a JSON object, within the limits of a request's body, into each member's value and text. Raises
# ValueError.
ReadMembers = Callable[[bytes], dict[str, tuple[Any, bytes]]]
# Fields that a line's body may have only as null, false or 0.
REFUSED = ("stream", "priority")


class InputLine(NamedTuple):
    """A request of a batch.

    `number` counts the input's lines from 0, without blank ones. `body` is the request's JSON, unchanged.
    `refused` names the fields of REFUSED that it sets. A line that can no longer be read has a `problem`
    instead.
    """

    number: int
    custom_id: str
    body: bytes
    refused: tuple[str, ...] = ()
    problem: "LineError | None" = None


class LineError(ValueError):
    """A line that does not fit this batch. `code` is OpenAI's."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def read_line(text: bytes, number: int, endpoint: str, members: ReadMembers) -> InputLine:
    """Parse a line of a batch's input. Raises LineError."""
    try:
        line = members(text)
    except ValueError as error:
        raise LineError("invalid_json_line", f"it cannot be read: {error!s:.200}") from error
    for name in line:
        if name not in _NAMES:
            message = f"{name[:100]!r} is not known; a line has {', '.join(_NAMES)}"
            raise LineError("invalid_request", message, name[:100])
    (custom_id, _), (method, _), (url, _), (body, body_text) = (
        line.get(name, (None, b"")) for name in _NAMES
    )
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= _MAX_ID:
        message = f"custom_id must be a text of 1 to {_MAX_ID} characters"
        raise LineError("missing_required_parameter", message, "custom_id")
    if method != "POST":
        raise LineError("invalid_method", 'method must be "POST"', "method")
    if url != endpoint:
        message = f"url is {url!r:.100}; the batch's endpoint is {endpoint!r}"
        raise LineError("mismatched_endpoint", message, "url")
    if not isinstance(body, dict):
        raise LineError("missing_required_parameter", "body must be a JSON object", "body")
    fields: dict[str, Any] = body
    refused = tuple(name for name in REFUSED if fields.get(name))
    if not refused and any(name in fields for name in REFUSED):
        body_text = json.dumps(
            {name: value for name, value in fields.items() if name not in REFUSED}
        ).encode()
    return InputLine(number, custom_id, body_text, refused)


class Validation:
    """Checks an input a few lines at a time. `errors` has the errors of the first wrong lines."""

    def __init__(self, file: IO[bytes], endpoint: str, max_line: int, members: ReadMembers) -> None:
        self.n_lines = 0
        self.errors: list[dict[str, Any]] = []
        self._file, self._endpoint, self._max_line, self._members = file, endpoint, max_line, members
        self._seen: set[bytes] = set()

    def read(self, n: int) -> bool:
        """Read up to `n` lines; False at the end."""
        for _ in range(n):
            text = self._file.readline(self._max_line + 1)
            if not text:
                if not self.n_lines:
                    self._wrong("empty_file", "the file has no line", None)
                return False
            if not text.strip():
                continue
            self.n_lines += 1
            if len(text) > self._max_line:
                self._wrong("line_too_large", f"it has more than {self._max_line} bytes", None)
                return False
            if self.n_lines > MAX_LINES:
                self._wrong("too_many_requests", f"a batch may have {MAX_LINES} lines", None)
                return False
            try:
                line = read_line(text, self.n_lines - 1, self._endpoint, self._members)
            except LineError as error:
                self._wrong(error.code, str(error), error.param)
            else:
                digest = hashlib.blake2b(
                    line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16
                ).digest()
                if digest in self._seen:
                    message = f"two lines have the custom_id {line.custom_id[:100]!r}"
                    self._wrong("duplicate_custom_id", message, "custom_id")
                self._seen.add(digest)
            if len(self.errors) >= _MOST_ERRORS:
                return False
        return True

    def _wrong(self, code: str, message: str, param: str | None) -> None:
        self.errors.append({"code": code, "line": self.n_lines or None, "message": message, "param": param})


def next_line(
    file: IO[bytes], endpoint: str, n_read: int, done: Container[int], members: ReadMembers
) -> tuple[InputLine | None, int]:
    """The next line that is not `done`, None at the end; and the number of lines that have been read by then.

    `n_read` lines have been read before. The input has been validated; a line that is wrong now, because the
    file or the server has changed, has a `problem`.
    """
    for text in iter(file.readline, b""):
        if not text.strip():
            continue
        number, n_read = n_read, n_read + 1
        if number in done:
            continue
        try:
            return read_line(text, number, endpoint, members), n_read
        except LineError as error:
            return InputLine(number, f"line {number + 1}", b"", problem=error), n_read
    return None, n_read


def result_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """A line of an output file, or for a status from 400 of an error file. `body` is JSON in one line."""
    head = json.dumps({"id": f"batch_req_{random_id()}", "custom_id": custom_id})
    response = f'{{"status_code": {status}, "request_id": {json.dumps(request_id)}, "body": '.encode()
    return b"".join((head[:-1].encode(), b', "response": ', response, body, b'}, "error": null}\n'))


def error_line(custom_id: str, code: str, message: str) -> bytes:
    """A line of an error file for a request that did not run."""
    line = {
        "id": f"batch_req_{random_id()}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return json.dumps(line).encode() + b"\n"
