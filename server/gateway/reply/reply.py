"""Parses one output into events: a format's generator reads the text, and `Reply` collects what it finds."""

import json
from collections.abc import Callable, Container

from server.gateway.random_ids import random_id
from server.gateway.reply.events import (
    CallArguments,
    CallBegin,
    CallCut,
    CallEnd,
    Reasoning,
    ReplyEvent,
    Text,
)
from server.gateway.reply.source import Reading, Source


class Reply:
    """The events of one output. `offered` are the names of the functions that may be called.

    White space between the parts of a reply belongs to none of them: it is kept only inside a text, and in an
    output that is nothing but text.
    """

    def __init__(self, offered: Container[str] = ()) -> None:
        self.offered = offered
        self.n_calls = 0  # complete ones
        self.reasoning_spans: list[tuple[int, int | None]] = []  # characters of the output; None: not ended
        self._n_begun = 0
        self._events: list[ReplyEvent] = []
        self._space: list[str] = []  # white space that may be the end of the current part
        self._strips = False  # drop white space before the next text
        self._arguments: list[str] = []

    def take(self) -> list[ReplyEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        """Append text to the content."""
        text = self._without_space(text)
        if text:
            self._events.append(Text(text))

    def reasoning(self, text: str) -> None:
        """Append text to the reasoning, between `begin_reasoning` and `end_reasoning`."""
        text = self._without_space(text)
        if text:
            self._events.append(Reasoning(text))

    def begin_reasoning(self, offset: int) -> None:
        """Reasoning begins, its marker included, after `offset` characters of the output."""
        self._end_part()
        self.reasoning_spans.append((offset, None))

    def end_reasoning(self, offset: int) -> None:
        """Reasoning has ended, its marker included, after `offset` characters of the output."""
        self._end_part()
        begin, _ = self.reasoning_spans.pop()
        self.reasoning_spans.append((begin, offset))

    def begin(self, name: str) -> None:
        """Begin a call of this function, which is offered."""
        self._end_part()
        self._events.append(CallBegin(self._n_begun, f"call_{random_id()[:24]}", name))
        self._n_begun += 1
        self._arguments = []

    def arguments(self, text: str) -> None:
        """Append text to the current call's arguments."""
        self._arguments.append(text)
        self._events.append(CallArguments(self._n_begun - 1, text))

    def end(self, is_complete: bool, raw: str) -> bool:
        """End the call, whose whole text is `raw`. True if its arguments are complete JSON."""
        is_call = is_complete and is_json_object("".join(self._arguments))
        self._arguments = []
        index = self._n_begun - 1
        self._events.append(CallEnd(index) if is_call else CallCut(index, raw))
        self._strips = is_call  # the text of an invalid call is content
        self.n_calls += is_call
        return is_call

    def finish(self) -> None:
        """End the output. White space at its end is text, unless it follows reasoning or a call."""
        if self._space and not self._strips:
            self._events.append(Text("".join(self._space)))
            self._space.clear()

    def _end_part(self) -> None:
        self._space.clear()
        self._strips = True

    def _without_space(self, text: str) -> str:
        """The text without white space at its end, which is kept until more text follows."""
        if self._strips:
            text = text.lstrip()
            if not text:
                return ""
            self._strips = False
        kept = text.rstrip()
        if not kept:
            self._space.append(text)
            return ""
        text, space = "".join([*self._space, kept]), text[len(kept) :]
        self._space = [space] if space else []
        return text


def is_json_object(text: str) -> bool:
    """Whether this is the text of a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


Read = Callable[[Source, Reply], Reading]


class ReplyParser:
    """Parses an output's text into events as it arrives.

    It takes time in proportion to the text, and keeps at most the beginning of a marker and the text of the
    call that is being read.
    """

    def __init__(self, read: Read, offered: Container[str] = ()) -> None:
        """`read` reads a format; `offered` are the names of the functions that may be called."""
        self._source = Source()
        self._reply = Reply(offered)
        self._reading = _to_the_end(read, self._source, self._reply)
        next(self._reading, None)

    @property
    def n_calls(self) -> int:
        """Complete calls so far."""
        return self._reply.n_calls

    @property
    def n_pending(self) -> int:
        """Characters that are not read yet."""
        return self._source.n_pending

    @property
    def reasoning_spans(self) -> list[tuple[int, int | None]]:
        """Spans of characters that are reasoning, with markers; an end of None is the end of the output."""
        return self._reply.reasoning_spans

    def feed(self, text: str) -> list[ReplyEvent]:
        """The events that are certain with this piece."""
        if text:
            self._source.add(text)
            next(self._reading, None)
        return self._reply.take()

    def finish(self) -> list[ReplyEvent]:
        """The remaining events, when the output has ended."""
        self._source.ended = True
        for _ in self._reading:
            pass
        self._reply.finish()
        return self._reply.take()


def _to_the_end(read: Read, source: Source, reply: Reply) -> Reading:
    yield from read(source, reply)
    yield from source.rest(reply.text)
