"""Carries an HTTP request from a door to a replica as a value, and runs it there on an ASGI application."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from server.ray.routing.prefix_choice import NO_KEY, RoutingKey

_MOST_UNREAD = 1 << 20  # bytes of a response that may wait for their reader
_GRACE_SECONDS = 10.0  # for the application to end after its client has left


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpCall:
    """A whole HTTP request. Routers find a cached prompt and a loaded adapter by the hashes of `key`."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    client: tuple[str, int] | None
    body: bytes
    key: RoutingKey = NO_KEY

    def scope(self) -> Scope:
        """Make the request's ASGI scope."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": self.headers,
            "client": self.client,
            "server": None,
        }


async def responses(app: ASGIApp, call: HttpCall) -> AsyncGenerator[list[Message], None]:
    """Yield the response's ASGI messages, each time all that are ready.

    If the reader stops early, the application learns that its client has left. Exceptions of the application
    are raised here.
    """
    run = _Run(call)
    task = asyncio.create_task(run.run(app))
    try:
        while messages := await run.ready():
            yield messages
    finally:
        run.leave()
        await _end(task)


async def _end(task: asyncio.Task[None]) -> None:
    _, late = await asyncio.wait([task], timeout=_GRACE_SECONDS)
    if late:
        task.cancel()
        await asyncio.wait([task], timeout=_GRACE_SECONDS)


class _Run:
    """One request on the application's side: `receive`, `send`, and the unread messages of the response."""

    def __init__(self, call: HttpCall) -> None:
        self._call = call
        self._asked = False
        self._left = asyncio.Event()
        self._messages: list[Message] = []
        self._n_unread = 0
        self._changed = asyncio.Event()  # there are messages, or the application has ended
        self._taken = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self._call.scope(), self._receive, self._send)
        except Exception as error:  # the reader raises it
            self._error = error
        finally:
            self._ended = True
            self._changed.set()

    async def ready(self) -> list[Message]:
        """Wait for messages and take them; an empty list after the end of the response."""
        await self._changed.wait()
        messages, self._messages, self._n_unread = self._messages, [], 0
        self._taken.set()
        if not self._ended:
            self._changed.clear()
        if not messages and self._error is not None:
            raise self._error
        return messages

    def leave(self) -> None:
        """Tell the application that the reader is gone."""
        self._left.set()
        self._taken.set()

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._call.body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        while self._n_unread >= _MOST_UNREAD and not self._left.is_set():
            self._taken.clear()
            await self._taken.wait()
        if self._left.is_set():
            return
        self._messages.append(message)
        self._n_unread += len(message.get("body", b""))
        self._changed.set()
