"""Writes an error response directly to a connection, without the application."""

from fastapi import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE


def response_bytes(response: Response) -> bytes:
    """The response as bytes, with a `Connection: close` header."""
    headers = [*response.raw_headers, (b"connection", b"close")]
    lines = [name + b": " + value + b"\r\n" for name, value in headers]
    return b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n", bytes(response.body)])
