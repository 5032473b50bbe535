"""Streams replies as server-sent events, each piece as soon as it is generated, in any protocol."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orca_jax.errors import OrcaError
from orca_jax.service.output import Piece
from server.gateway.gateway import LiveRequest
from server.http.generation.choices import Choices

PING_SECONDS = 10.0  # of silence, after which a ping is sent in protocols that have pings

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # keep proxies from buffering events

_Write = Callable[[bytes], Awaitable[None]]


class ReplyWriter(Protocol):
    """Writes the events of a response in one protocol, as bytes, which are empty for no events."""

    choices: Choices
    ping: bytes  # keeps a silent connection alive; empty for a protocol that has none

    async def begin(self) -> bytes:
        """The events before the reply."""
        ...

    async def take(self, index: int, piece: Piece) -> bytes:
        """The events for the next piece of choice `index`; none in the middle of a character."""
        ...

    async def end(self) -> bytes:
        """The events after the reply."""
        ...

    def fail(self, error: OrcaError) -> bytes:
        """The events that end a stream early."""
        ...


class ReplyStream(Response):
    """The response to a request with `stream`.

    The choices are submitted before the response headers are sent, so a request that cannot start gets an
    ordinary HTTP error, which is raised here. A later failure becomes the protocol's error event, which ends
    the stream.
    """

    media_type = "text/event-stream"

    def __init__(self, writer: ReplyWriter) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = self._writer

        def write(events: bytes) -> Awaitable[None]:  # no coroutine: each token would pay for it
            return send({"type": "http.response.body", "body": events, "more_body": True})

        async with writer.choices.running(receive) as requests:
            await send({"type": "http.response.start", "status": 200, "headers": list(self.raw_headers)})
            last = b""
            try:
                if begin := await writer.begin() + writer.ping:
                    await write(begin)
                if len(requests) == 1:
                    last = await self._stream_one(requests[0], write)
                else:
                    last = await self._stream_merged(requests, write)
                end = await writer.end()
            except OrcaError as error:
                end = writer.fail(error)
        await send({"type": "http.response.body", "body": last + end, "more_body": False})

    async def _stream_one(self, request: LiveRequest, write: _Write) -> bytes:
        """Write all events but those of the last piece, which it returns: they go with those after it."""
        take = self._writer.take
        pieces = self._with_pings(request, write) if self._writer.ping else request
        last = b""
        async for piece in pieces:
            events = await take(0, piece)
            if piece.finish_reason is not None:
                last = events
            elif events:
                await write(events)
        return last

    async def _with_pings(self, request: LiveRequest, write: _Write) -> AsyncIterator[Piece]:
        """The request's pieces. A ping is written whenever the request is silent for PING_SECONDS."""
        while True:
            waiting = asyncio.timeout(PING_SECONDS)
            try:
                async with waiting:
                    piece = await anext(request, None)
            except TimeoutError:
                if not waiting.expired():  # the request's own timeout
                    raise
                await write(self._writer.ping)
                continue
            if piece is None:
                return
            yield piece

    async def _stream_merged(self, requests: Sequence[LiveRequest], write: _Write) -> bytes:
        """Queue each choice's events in a task, and send all that are ready in one message.

        Returns the last message's events, as `_stream_one` does.
        """
        ready = asyncio.Queue[bytes | Exception | None](maxsize=len(requests))

        async def enqueue(index: int, request: LiveRequest) -> None:
            try:
                async for piece in request:
                    if events := await self._writer.take(index, piece):
                        await ready.put(events)
                await ready.put(None)
            except Exception as error:
                await ready.put(error)

        tasks = [asyncio.create_task(enqueue(i, request)) for i, request in enumerate(requests)]
        n_open = len(tasks)
        items: list[bytes | Exception | None] = []
        errors: list[Exception] = []
        events = b""
        try:
            while n_open:
                items.append(await ready.get())
                while not ready.empty():
                    items.append(ready.get_nowait())
                events = b"".join(item for item in items if isinstance(item, bytes))
                n_open -= items.count(None)
                if events and n_open:
                    await write(events)
                errors += [item for item in items if isinstance(item, Exception)]
                if errors:
                    raise errors.pop(0)
                items.clear()
            return events
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # Errors' tracebacks refer to this frame and the queue; neither may refer to the errors.
            items.clear()
            errors.clear()
            while not ready.empty():
                ready.get_nowait()
