"""Streams output as server-sent events, each piece as soon as it is generated."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orca_jax.errors import OrcaError
from orca_jax.service.output import Piece
from server.gateway.gateway import LiveRequest
from server.gateway.reply.events import ReplyEvent
from server.gateway.side_threads import run_for_response
from server.http.bodies.json_text import as_json
from server.http.fields.generation import StreamOptions
from server.http.fields.logprobs import n_characters
from server.http.generation.chat_reply import deltas_of
from server.http.generation.choices import Choices
from server.http.generation.chunks import DONE, NO_EXTRAS, ChoiceEnd, ChunkWriter, PieceExtras, error_event

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # keep proxies from buffering events

_DIGITS = 6  # roughly, of a token id with its comma
_Write = Callable[[bytes], Awaitable[None]]


class EventStream(Response):
    """The response to a request with `stream`. It submits the choices before it sends the response headers.

    So a request that cannot start gets an ordinary HTTP error, raised here. A later failure becomes an error
    event, and the stream ends without `[DONE]`. `has_text` is False for a model without a tokenizer, whose
    pieces get a chunk each although their text is empty.
    """

    media_type = "text/event-stream"

    def __init__(
        self, choices: Choices, chunks: ChunkWriter, options: StreamOptions, *, has_text: bool
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        self._choices = choices
        self._is_plain = choices.extras is None and not choices.tally.readers  # only text
        self._chunks = chunks
        self._final_usage = bool(options.include_usage)
        self._running_usage = bool(options.continuous_usage_stats)
        self._has_text = has_text
        self._begun = set[int]()  # choices that have sent the ids of their prompt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(events: bytes) -> None:
            await send({"type": "http.response.body", "body": events, "more_body": True})

        async with self._choices.running(receive) as requests:
            await send({"type": "http.response.start", "status": 200, "headers": list(self.raw_headers)})
            try:
                if len(requests) == 1:
                    await self._stream_one(requests[0], write)
                else:
                    await self._stream_merged(requests, write)
                end = self._end()
            except OrcaError as error:
                end = error_event(error)
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _stream_one(self, request: LiveRequest, write: _Write) -> None:
        async for piece in request:
            chunk = self._chunk(0, piece) if self._is_plain else await self._rich_chunk(0, piece)
            if chunk:
                await write(chunk)

    async def _stream_merged(self, requests: Sequence[LiveRequest], write: _Write) -> None:
        """One task per choice queues its chunks; all chunks that are ready leave in one message."""
        ready = asyncio.Queue[bytes | Exception | None](maxsize=len(requests))

        async def enqueue(index: int, request: LiveRequest) -> None:
            try:
                async for piece in request:
                    plain = self._is_plain
                    chunk = self._chunk(index, piece) if plain else await self._rich_chunk(index, piece)
                    if chunk:
                        await ready.put(chunk)
                await ready.put(None)
            except Exception as error:
                await ready.put(error)

        tasks = [asyncio.create_task(enqueue(i, request)) for i, request in enumerate(requests)]
        n_open = len(tasks)
        try:
            while n_open:
                items = [await ready.get()]
                while not ready.empty():
                    items.append(ready.get_nowait())
                events = b"".join(chunk for chunk in items if isinstance(chunk, bytes))
                if events:
                    await write(events)
                for error in items:
                    if isinstance(error, Exception):
                        raise error
                n_open -= items.count(None)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _chunk(self, index: int, piece: Piece, extras: PieceExtras = NO_EXTRAS) -> bytes:
        """The chunk for a piece; empty if there is nothing to show yet, as in the middle of a character."""
        tally = self._choices.tally
        tally.take(index, piece)
        if not piece.text and piece.finish_reason is None and self._has_text and not extras.need_chunk:
            return b""
        usage = tally.usage() if self._running_usage else None
        return self._chunks.chunk(index, piece, usage, extras)

    def _reply_chunks(
        self, index: int, piece: Piece, events: Sequence[ReplyEvent], extras: PieceExtras
    ) -> bytes:
        """The chunks for a piece of a chat whose replies are more than text."""
        tally = self._choices.tally
        tally.take(index, piece)
        deltas = deltas_of(events)
        end = None
        if piece.finish_reason is not None:
            end = ChoiceEnd(tally.finish_reason(index), piece.weights_version)
        usage = tally.usage() if self._running_usage else None
        return self._chunks.deltas(index, deltas, end, usage, extras)

    async def _rich_chunk(self, index: int, piece: Piece) -> bytes:
        """Like `_chunk`, with the echoed prompt, log-probabilities, token ids and experts, or a chat's
        reasoning and calls.
        """
        events = await self._choices.events(index, piece)
        piece, tokens = await self._choices.take(index, piece)
        logprobs = routed = token_ids = prompt_ids = None
        if tokens:
            n = n_characters(tokens)
            logprobs = await run_for_response(n, lambda: as_json(self._choices.logprobs(tokens), n))
        if piece.finish_reason is not None and (n := self._choices.routed_size(index)):
            routed = await run_for_response(n, lambda: as_json(self._choices.routed_experts(index), n))
        if self._choices.tells_token_ids:
            token_ids = as_json(piece.token_ids)
            if index not in self._begun:
                self._begun.add(index)
                ids = [*self._choices.prompt_ids(index)]
                n = _DIGITS * len(ids)
                prompt_ids = await run_for_response(n, lambda: as_json(ids, n))
        extras = PieceExtras(logprobs, token_ids, prompt_ids, routed)
        if self._choices.tally.readers:
            return self._reply_chunks(index, piece, events, extras)
        return self._chunk(index, piece, extras)

    def _end(self) -> bytes:
        if not self._final_usage:
            return DONE
        return self._chunks.usage(self._choices.tally.usage()) + DONE
