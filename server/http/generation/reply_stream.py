"""One reply as it is generated: its events, in the protocol that a writer speaks."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orca_jax.errors import OrcaError
from orca_jax.request.request import FinishReason
from orca_jax.service.output import Piece
from server.gateway.gateway import LiveRequest
from server.gateway.reply.events import ReplyEvent, Text
from server.gateway.side_threads import run_for_response
from server.http.bodies.json_text import as_json
from server.http.fields.logprobs import PlacedToken, n_characters
from server.http.generation.choices import Choices
from server.http.generation.event_stream import HEADERS

PING_SECONDS = 10.0  # of silence, after which a protocol that has pings sends one


class Event(NamedTuple):
    """A server-sent event, named by its `type`. `n` is roughly how many characters its JSON has."""

    data: dict[str, Any]
    n: int = 0


class ReplyEnd(NamedTuple):
    """How a reply ended, and its counts of tokens."""

    reason: FinishReason
    stop_string: str | None
    n_input: int
    n_cached: int
    n_output: int
    n_reasoning: int
    weights_version: int | None


class ReplyWriter(Protocol):
    """Makes a protocol's events of a reply, and keeps the whole reply."""

    ping: Event | None  # keeps a silent connection alive

    def begin(self) -> list[Event]:
        """The events before the reply."""
        ...

    def take(self, event: ReplyEvent, tokens: Sequence[PlacedToken]) -> list[Event]:
        """The events for more of the reply; `tokens` are those whose log-probabilities come with it."""
        ...

    async def end(self, end: ReplyEnd) -> list[Event]:
        """The events after the reply."""
        ...

    def fail(self, error: OrcaError) -> list[Event]:
        """The events that end a stream early."""
        ...


_Emit = Callable[[list[Event]], Awaitable[None]]


class Reply:
    """The reply that `choices`, of which there is one, generate."""

    def __init__(self, choices: Choices, writer: ReplyWriter) -> None:
        self.choices = choices
        self.writer = writer
        self._tokens: list[PlacedToken] = []  # whose text the reader holds back

    async def complete(self, receive: Receive) -> None:
        """Generate the whole reply, which the writer then has.

        Raises QueueFull, NotReady, EngineError, or whatever ended the reply before it was complete.
        """

        async def nowhere(_: list[Event]) -> None:
            pass

        async with self.choices.running(receive) as requests:
            await self.generate(requests[0], nowhere)

    async def generate(self, request: LiveRequest, emit: _Emit) -> None:
        """Generate the reply, and emit its events as they come. Raises what ends it early."""
        writer = self.writer
        await emit(writer.begin())
        if writer.ping is not None:
            await emit([writer.ping])
        while (piece := await self._next_piece(request, emit)) is not None:
            shown, tokens = await self.choices.take(0, piece)
            self.choices.tally.take(0, shown)
            await self._emit_parts(await self._parts(shown), tokens, emit)
        await emit(await writer.end(self._end(request)))

    async def _next_piece(self, request: LiveRequest, emit: _Emit) -> Piece | None:
        while True:
            waiting = asyncio.timeout(PING_SECONDS)
            try:
                async with waiting:
                    return await anext(request, None)
            except TimeoutError:
                if not waiting.expired():  # it is the request's own
                    raise
                if self.writer.ping is not None:
                    await emit([self.writer.ping])

    async def _parts(self, piece: Piece) -> Sequence[ReplyEvent]:
        if self.choices.tally.readers:
            return await self.choices.events(0, piece)
        return (Text(piece.text),) if piece.text else ()

    async def _emit_parts(
        self, parts: Sequence[ReplyEvent], tokens: Sequence[PlacedToken], emit: _Emit
    ) -> None:
        """Log-probabilities come with the content of their tokens; those of other parts are dropped."""
        self._tokens += tokens
        if self._tokens and not parts and not self.choices.tally.readers:
            parts = (Text(""),)
        events = list[Event]()
        for part in parts:
            events += self.writer.take(part, self._tokens if isinstance(part, Text) else ())
            self._tokens = []
        if events:
            await emit(events)

    def _end(self, request: LiveRequest) -> ReplyEnd:
        tally = self.choices.tally
        reason = tally.finish_reasons[0]
        assert reason is not None, "the request is complete"
        return ReplyEnd(
            reason,
            request.stop_string,
            tally.n_input,
            tally.n_cached,
            tally.n_output,
            sum(reader.n_reasoning_tokens for reader in tally.readers),
            tally.weights_versions[0],
        )


class ReplyStream(Response):
    """A reply as server-sent events. It submits the request before it sends the response headers.

    So a request that cannot start gets an ordinary HTTP error, raised here. A later failure becomes the
    protocol's event for it.
    """

    media_type = "text/event-stream"

    def __init__(self, reply: Reply) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def emit(events: list[Event]) -> None:
            n = sum(event.n for event in events)
            body = await run_for_response(n, lambda: b"".join(map(_as_bytes, events)))
            await send({"type": "http.response.body", "body": body, "more_body": True})

        async with self._reply.choices.running(receive) as requests:
            await send({"type": "http.response.start", "status": 200, "headers": list(self.raw_headers)})
            try:
                await self._reply.generate(requests[0], emit)
            except OrcaError as error:
                await emit(self._reply.writer.fail(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def text_size(text: str, tokens: Sequence[PlacedToken] = ()) -> int:
    """Roughly how many characters a text and its tokens' log-probabilities take in an event."""
    return len(text) + n_characters(tokens)


def _as_bytes(event: Event) -> bytes:
    """ASCII only, so that no client mistakes a Unicode character for a line break."""
    return f"event: {event.data['type']}\ndata: {as_json(event.data, event.n)}\n\n".encode("ascii")
