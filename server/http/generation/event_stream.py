"""A stream of server-sent events: each piece leaves as soon as it comes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orca_jax.errors import OrcaError
from orca_jax.service.generation import Piece
from server.gateway.gateway import LiveRequest
from server.gateway.side_threads import run_for_response
from server.http.bodies.json_answer import as_json
from server.http.fields.both import StreamOptions
from server.http.fields.token_places import n_characters
from server.http.generation.choices import Choices
from server.http.generation.chunks import DONE, ChunkWriter, error_event

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # no proxy may hold events back

_Write = Callable[[bytes], Awaitable[None]]


class EventStream(Response):
    """The response to a request with `stream`. It submits the choices itself, before it begins to answer.

    So a request that cannot start is answered by a plain HTTP error, raised here. What fails later becomes
    an event with the error, and the stream ends without `[DONE]`. `has_text` is False for a model without a
    tokenizer, whose pieces are worth a chunk though their text is empty.
    """

    media_type = "text/event-stream"

    def __init__(
        self, choices: Choices, chunks: ChunkWriter, options: StreamOptions, *, has_text: bool
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._choices = choices
        self._is_plain = choices.telling is None  # nothing but the text as it comes
        self._chunks = chunks
        self._final_usage = bool(options.include_usage)
        self._running_usage = bool(options.continuous_usage_stats)
        self._has_text = has_text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One response, from its headers to its last event."""

        async def write(events: bytes) -> None:
            await send({"type": "http.response.body", "body": events, "more_body": True})

        async with self._choices.running(receive) as requests:
            await send({"type": "http.response.start", "status": 200, "headers": list(self.raw_headers)})
            try:
                if len(requests) == 1:
                    await self._one(requests[0], write)
                else:
                    await self._merged(requests, write)
                end = self._end()
            except OrcaError as error:
                end = error_event(error)
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _one(self, request: LiveRequest, write: _Write) -> None:
        async for piece in request:
            chunk = self._chunk(0, piece) if self._is_plain else await self._told(0, piece)
            if chunk:
                await write(chunk)

    async def _merged(self, requests: Sequence[LiveRequest], write: _Write) -> None:
        """A task for each choice brings its chunks; what is there at one time leaves in one message."""
        ready = asyncio.Queue[bytes | Exception | None](maxsize=len(requests))

        async def bring(index: int, request: LiveRequest) -> None:
            try:
                async for piece in request:
                    plain = self._is_plain
                    chunk = self._chunk(index, piece) if plain else await self._told(index, piece)
                    if chunk:
                        await ready.put(chunk)
                await ready.put(None)
            except Exception as error:
                await ready.put(error)

        tasks = [asyncio.create_task(bring(i, request)) for i, request in enumerate(requests)]
        n_open = len(tasks)
        try:
            while n_open:
                came = [await ready.get()]
                while not ready.empty():
                    came.append(ready.get_nowait())
                events = b"".join(chunk for chunk in came if isinstance(chunk, bytes))
                if events:
                    await write(events)
                for error in came:
                    if isinstance(error, Exception):
                        raise error
                n_open -= came.count(None)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _chunk(self, index: int, piece: Piece, logprobs: str | None = None) -> bytes:
        """Nothing where there is nothing to show yet, as in the middle of a character."""
        tally = self._choices.tally
        tally.take(index, piece)
        if not piece.text and piece.finish_reason is None and self._has_text and logprobs is None:
            return b""
        return self._chunks.chunk(index, piece, tally.usage() if self._running_usage else None, logprobs)

    async def _told(self, index: int, piece: Piece) -> bytes:
        """The same with what is to be told beside the text."""
        piece, tokens = await self._choices.take(index, piece)
        if not tokens:
            return self._chunk(index, piece)
        n = n_characters(tokens)
        told = await run_for_response(n, lambda: as_json(self._choices.logprobs(tokens), n))
        return self._chunk(index, piece, told)

    def _end(self) -> bytes:
        if not self._final_usage:
            return DONE
        return self._chunks.usage(self._choices.tally.usage()) + DONE
