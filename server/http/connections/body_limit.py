"""Rejects request bodies that are too large or too slow, so that they cannot hold memory or connections.

After a 413 the connection stays open and the server discards the rest of the body: if it closed at once, the
client would fail while writing, before it could read the error. connection.py cuts off a client that never
stops sending.
"""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.bodies.errors import status_response
from server.http.connections.caller import Caller, caller_of


class Upload(NamedTuple):
    """Bounds on the size and the duration of a body."""

    max_bytes: int
    seconds: float


class BodyLimit:
    """ASGI middleware: 413 for a body of more than `max_bytes`, 408 for one that is too slow.

    A body may take `seconds` from the moment a route starts to read it until its last byte. `uploads` has
    separate bounds for paths whose routes write the body to a disk.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_bytes: int,
        seconds: float,
        uploads: Mapping[str, Upload] = MappingProxyType({}),
    ) -> None:
        self._app = app
        self._bounds = Upload(max_bytes, seconds)
        self._uploads = uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = _content_length(scope)
        max_bytes, seconds = self._uploads.get(scope["path"], self._bounds)
        if length > max_bytes:
            response = status_response(413, _too_large(f"{length} bytes", max_bytes), path=scope["path"])
            await response(scope, receive, send)
            return
        await self._app(scope, _Body(receive, max_bytes, seconds, caller_of(scope)), send)


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int, seconds: float) -> bytes:
    """The whole body. Raises HTTPException: 413 for more than `max_bytes`, 408 for one that is too slow."""
    length = _content_length(scope)
    if length > max_bytes:
        raise HTTPException(413, _too_large(f"{length} bytes", max_bytes))
    bounded, parts = _Body(receive, max_bytes, seconds, caller_of(scope)), list[bytes]()
    while True:
        message = await bounded()
        if message["type"] != "http.request":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


class _Body:
    """Counts and times what a request's `receive` returns, until the body is complete."""

    def __init__(self, receive: Receive, max_bytes: int, seconds: float, caller: Caller | None) -> None:
        self._receive = receive
        self._caller = caller
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._deadline: float | None = None
        self._n_bytes = 0
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        if self._caller is not None and self._caller.has_sent_all:
            return self._counted(await self._receive())  # without a deadline, since it does not wait
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError as error:
            problem = f"the body was not complete after {self._seconds:g} seconds"
            text = f"{problem}; send it faster (orca serve --body-timeout)"
            raise HTTPException(408, text, {"Connection": "close"}) from error
        return self._counted(message)

    def _counted(self, message: Message) -> Message:
        self._complete = not message.get("more_body", False)
        self._n_bytes += len(message.get("body", b""))
        if self._n_bytes > self._max_bytes:
            raise HTTPException(413, _too_large(f"more than {self._max_bytes} bytes", self._max_bytes))
        return message


def _too_large(size: str, allowed: int) -> str:
    return f"the body has {size}; {allowed} are allowed (orca serve --max-body-bytes)"


def _content_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value)  # the parser has already rejected values that are not numbers
    return 0
