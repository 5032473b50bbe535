"""Bodies that are too large or come too slowly: no request may hold memory, or a place, for nothing.

The connection stays open after a 413, and the server drops what still comes: if it closed, the client's own
writing would fail before it could read why. A client that never ends is cut by connection.py.
"""

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.bodies.errors import status_response


class BodyLimit:
    """ASGI middleware: a body of more than `max_bytes` is answered with 413, a slow one with 408.

    It may take `seconds` from when a route asks for it to its last byte, whatever its pace in between.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer at once what says that it is too large, and watch the others."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = _content_length(scope)
        if length > self._max_bytes:
            response = status_response(413, _too_large(f"{length} bytes", self._max_bytes))
            await response(scope, receive, send)
            return
        await self._app(scope, _Body(receive, self._max_bytes, self._seconds), send)


class _Body:
    """A request's `receive`, counted and timed until the body is complete."""

    def __init__(self, receive: Receive, max_bytes: int, seconds: float) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._deadline: float | None = None
        self._n_bytes = 0
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError as error:
            late = f"the body was not complete after {self._seconds:g} seconds"
            text = f"{late}; send it faster (orca serve --body-timeout)"
            raise HTTPException(408, text, {"Connection": "close"}) from error
        self._complete = not message.get("more_body", False)
        self._n_bytes += len(message.get("body", b""))
        if self._n_bytes > self._max_bytes:
            came = f"more than {self._max_bytes} bytes"
            raise HTTPException(413, _too_large(came, self._max_bytes))
        return message


def _too_large(came: str, allowed: int) -> str:
    return f"the body has {came}; {allowed} are allowed (orca serve --max-body-bytes)"


def _content_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value)  # the server has refused what is no number
    return 0
