"""Streams over HTTP whose texts are known, repeated and checked."""

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from bench.server.http_client import Exchange, get, post

_REQUEST_SECONDS = 180.0
_ARRIVALS = 1 << 18
_MAX_WRONG = 20


@dataclass(slots=True)
class Ended:
    """The result of a stream: its text and pieces, the number of tokens by its usage, how it ended."""

    status: int = 0
    text: str = ""
    n_pieces: int = 0
    n_tokens: int = 0
    reasons: list[str] = field(default_factory=list[str])
    done: bool = False
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownStream:
    """A request and its text without disturbances; `sure` is the part that must come in any case.

    `seed` None is greedy, otherwise it samples at temperature 1.
    """

    prompt: tuple[int, ...]
    n_output: int
    seed: int | None
    text: str
    sure: str

    def body(self) -> dict[str, Any]:
        """The body for /v1/completions."""
        sampling = {"temperature": 0} if self.seed is None else {"temperature": 1, "seed": self.seed}
        return {
            "prompt": list(self.prompt),
            "max_tokens": self.n_output,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling,
        }

    def complaint(self, ended: Ended) -> str | None:
        """The fault of the stream's result; None if it has none."""
        if ended.reasons != ["length"] or not ended.done:
            done = "with" if ended.done else "without"
            return f"a stream ended {done} [DONE], {ended.reasons}, status {ended.status}, {ended.error}"
        if ended.n_tokens != self.n_output:
            return f"a stream of {self.n_output} tokens had {ended.n_tokens}"
        if ended.text == self.text or (self.sure != self.text and ended.text.startswith(self.sure)):
            return None
        return f"a stream said {ended.text!r} instead of {self.text!r}, whose certain part is {self.sure!r}"


class RepeatedStreams:
    """A client for each of `known` that repeats it; an async context manager.

    On exit each client finishes its current stream. With `once` each is sent once; a stream that ends with an
    error is not repeated either. `ended` are all results, and `wrong` what was wrong with them.
    """

    def __init__(self, address: tuple[str, int], known: Sequence[KnownStream], *, once: bool = False) -> None:
        self.wrong: list[str] = []
        self.ended: list[Ended] = []
        self.arrivals = deque[float](maxlen=_ARRIVALS)  # of pieces, by time.monotonic
        self._address = address
        self._known = known
        self._once = once
        self._live: list[Ended | None] = [None for _ in known]
        self._stopping = False
        self._arrived = asyncio.Event()
        self._group = asyncio.TaskGroup()

    @property
    def n_between(self) -> int:
        """The number of streams between their first and their second-last token."""
        return sum(
            live is not None and 0 < live.n_pieces < known.n_output - 1
            for live, known in zip(self._live, self._known, strict=True)
        )

    async def arrival(self) -> None:
        """Wait for the next piece."""
        self._arrived.clear()
        await self._arrived.wait()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        for number, known in enumerate(self._known):
            self._group.create_task(self._run(number, known))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        await self._group.__aexit__(kind, error, trace)

    async def _run(self, number: int, known: KnownStream) -> None:
        while True:
            ended = self._live[number] = Ended()
            try:
                async with asyncio.timeout(_REQUEST_SECONDS):
                    await self._stream(known, ended)
            except (OSError, EOFError, ValueError, LookupError) as error:  # TimeoutError is an OSError
                ended.error = f"{type(error).__name__}: {error}"
            self._live[number] = None
            self.ended.append(ended)
            complaint = known.complaint(ended)
            if complaint is not None and len(self.wrong) < _MAX_WRONG:
                self.wrong.append(complaint)
            if self._once or self._stopping or ended.status != 200 or ended.error is not None:
                return

    async def _stream(self, known: KnownStream, ended: Ended) -> None:
        host, port = self._address
        async with Exchange(host, port, post(host, port, "/v1/completions", known.body())) as exchange:
            await exchange.head()
            ended.status = exchange.status
            if exchange.status != 200:
                ended.error = (await exchange.body()).decode()
                return
            async for data in _events(exchange):
                if data == "[DONE]":
                    ended.done = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    ended.error = event["error"]["message"]
                    continue
                if event.get("usage"):
                    ended.n_tokens = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    ended.text += choice["text"]
                    ended.n_pieces += 1
                    if choice["finish_reason"] is not None:
                        ended.reasons.append(choice["finish_reason"])
                    self.arrivals.append(time.monotonic())
                    self._arrived.set()


async def asked(address: tuple[str, int], path: str) -> tuple[int, str]:
    """Status and body of a GET."""
    async with asyncio.timeout(30), Exchange(*address, get(*address, path)) as exchange:
        await exchange.head()
        return exchange.status, (await exchange.body()).decode()


async def _events(exchange: Exchange) -> AsyncIterator[str]:
    rest = b""
    async for chunk in exchange.chunks():
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield event.removeprefix(b"data: ").decode()
    if rest:
        raise ValueError(f"the stream ended in an event: {rest[:200]!r}")
