"""An error answered without the application, to a client that it was not asked about."""

from fastapi import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE


def whole_answer(response: Response) -> bytes:
    """The answer as it travels; it tells the client that the connection is closed after it."""
    headers = [*response.raw_headers, (b"connection", b"close")]
    lines = [name + b": " + value + b"\r\n" for name, value in headers]
    return b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n", bytes(response.body)])
