"""Writes one reply as named events, for the Responses and Messages protocols."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from starlette.responses import Response
from starlette.types import Receive

from orca_jax.errors import OrcaError
from orca_jax.request.request import FinishReason
from orca_jax.service.output import Piece
from server.gateway.reply.events import ReplyEvent, Text
from server.gateway.side_threads import run_for_response
from server.http.bodies.json_text import as_json, as_json_bytes
from server.http.fields.logprobs import PlacedToken, n_characters
from server.http.generation.choices import Choices
from server.http.generation.reply_stream import ReplyStream, ReplyWriter


class Event(NamedTuple):
    """A server-sent event, named by its `type`. `n` is roughly how many characters its JSON has."""

    data: dict[str, Any]
    n: int = 0


class ReplyEnd(NamedTuple):
    """The end of a reply, and its token counts."""

    reason: FinishReason
    stop_string: str | None
    n_input: int
    n_cached: int
    n_output: int
    n_reasoning: int
    weights_version: int | None


class ReplyEvents(Protocol):
    """Turns a reply into a protocol's events, and collects the whole reply."""

    ping: Event | None  # keeps a silent connection alive
    whole: dict[str, Any]  # the reply so far
    n_characters: int  # of the whole reply, roughly

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


class EventWriter(ReplyWriter):
    """Writes the reply of `choices`, which has a single choice, as named events."""

    def __init__(self, choices: Choices, events: ReplyEvents) -> None:
        self.choices = choices
        self.ping = b"" if events.ping is None else _as_bytes(events.ping)
        self._events = events
        self._tokens: list[PlacedToken] = []  # tokens whose text the parser holds back

    async def complete(self, receive: Receive) -> None:
        """Generate the whole reply, which `events` collects.

        Raises QueueFull, NotReady, EngineError, or whatever ended the reply before it was complete.
        """
        async with self.choices.running(receive) as (request,):
            async for piece in request:
                await self._take(piece)
            await self._events.end(self._end())

    async def begin(self) -> bytes:
        return await _written(self._events.begin())

    async def take(self, index: int, piece: Piece) -> bytes:
        return await _written(await self._take(piece))

    async def end(self) -> bytes:
        return await _written(await self._events.end(self._end()))

    def fail(self, error: OrcaError) -> bytes:
        return b"".join(map(_as_bytes, self._events.fail(error)))

    async def _take(self, piece: Piece) -> list[Event]:
        """The events for a piece. Log-probabilities come with text; those of other parts are dropped."""
        piece, tokens = await self.choices.take(0, piece)
        tally = self.choices.tally
        tally.take(0, piece)
        self._tokens += tokens
        parts: Sequence[ReplyEvent]
        if tally.readers:
            parts = await self.choices.events(0, piece)
        else:
            parts = (Text(piece.text),) if piece.text or self._tokens else ()
        events = list[Event]()
        for part in parts:
            events += self._events.take(part, self._tokens if isinstance(part, Text) else ())
            self._tokens = []
        return events

    def _end(self) -> ReplyEnd:
        tally = self.choices.tally
        reason = tally.finish_reasons[0]
        assert reason is not None, "the request is complete"
        return ReplyEnd(
            reason,
            tally.first_choices[0].stop_string,
            tally.n_input,
            tally.n_cached,
            tally.n_output,
            sum(reader.n_reasoning_tokens for reader in tally.readers),
            tally.weights_versions[0],
        )


async def reply(choices: Choices, events: ReplyEvents, receive: Receive, *, stream: bool) -> Response:
    """Generate the reply and respond: with a stream, or with one JSON object when the reply is complete."""
    writer = EventWriter(choices, events)
    if stream:
        return ReplyStream(writer)
    await writer.complete(receive)
    n = events.n_characters
    text = await run_for_response(n, lambda: as_json_bytes(events.whole, n))
    return Response(text, media_type="application/json")


async def _written(events: Sequence[Event]) -> bytes:
    n = sum(event.n for event in events)
    return await run_for_response(n, lambda: b"".join(map(_as_bytes, events)))


def text_size(text: str, tokens: Sequence[PlacedToken] = ()) -> int:
    """Roughly how many characters a text and its tokens' log-probabilities take in an event."""
    return len(text) + n_characters(tokens)


def _as_bytes(event: Event) -> bytes:
    """ASCII only, so that no client mistakes a Unicode character for a line break."""
    return f"event: {event.data['type']}\ndata: {as_json(event.data, event.n)}\n\n".encode("ascii")
