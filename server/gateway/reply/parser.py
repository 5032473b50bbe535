"""The parser of one output: what a format reads, driven piece by piece."""

from collections.abc import Callable, Container

from server.gateway.reply.events import ReplyEvent
from server.gateway.reply.reply import Reply
from server.gateway.reply.source import Reading, Source

Read = Callable[[Source, Reply], Reading]


class ReplyParser:
    """Turns an output's text into events as it arrives. Takes time in proportion to the text, and keeps no
    more
    than a possible beginning of a marker and the text of the call that is being read.
    """

    def __init__(self, read: Read, offered: Container[str] = ()) -> None:
        """`read` is a format's, and `offered` are the names of the functions that may be called."""
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
        """Where the output is reasoning, markers included: from and to which character; None: to the end."""
        return self._reply.reasoning_spans

    def feed(self, text: str) -> list[ReplyEvent]:
        """What is certain with this piece."""
        if text:
            self._source.add(text)
            next(self._reading, None)
        return self._reply.take()

    def finish(self) -> list[ReplyEvent]:
        """The output has ended: what is left."""
        self._source.ended = True
        for _ in self._reading:
            pass
        self._reply.finish()
        return self._reply.take()


def _to_the_end(read: Read, source: Source, reply: Reply) -> Reading:
    yield from read(source, reply)
    yield from source.rest(reply.text)
