"""Many concurrent streams against a server, from a process that does as little as possible with the data."""

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from multiprocessing.connection import Connection
from typing import Any, Literal

import grpc

from bench.other_process import answer_each
from bench.server.http_client import body_of, events_of, post, status_of
from server.rpc.generation_pb2 import GenerateRequest, SamplingParams, TokenIds
from server.rpc.generation_pb2_grpc import GenerationStub

_SECONDS = 240.0


@dataclass(frozen=True, slots=True)
class Streams:
    """One greedy stream per prompt of token ids, all started at once.

    `n_output` is each stream's number of tokens, or one number for all.
    """

    protocol: Literal["HTTP", "gRPC"]
    host: str
    port: int
    prompts: Sequence[Sequence[int]]
    n_output: int | Sequence[int]

    def requests(self) -> Iterable[tuple[Sequence[int], int]]:
        """Pair each stream's prompt with its number of output tokens."""
        each = repeat(self.n_output) if isinstance(self.n_output, int) else self.n_output
        return zip(self.prompts, each, strict=False)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result: seconds from the first request to the last end, tokens, messages that contain tokens.

    `cpu` is the client's own processor time in seconds. `first` and `gaps`, of HTTP alone, are each stream's
    seconds to its first data and all seconds between data.
    """

    seconds: float
    n_tokens: int
    n_messages: int
    cpu: float
    first: list[float] = field(default_factory=list[float])
    gaps: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True)
class Repeated:
    """The same request from `n_connections` connections, on each `n_times` one after the other."""

    host: str
    port: int
    path: str
    body: dict[str, Any]
    n_connections: int
    n_times: int


@dataclass(frozen=True, slots=True)
class Asked:
    """The result of a Repeated: seconds in all, of each answer, and the client's processor time."""

    seconds: float
    waits: list[float]
    cpu: float


def client(connection: Connection) -> None:
    """Entry point of an OtherProcess: answer each Streams with a Loaded, each Repeated with an Asked."""
    answer_each(connection, _answer)


async def _answer(question: Streams | Repeated) -> Loaded | Asked:
    if isinstance(question, Streams):
        return await load(question)
    return await asyncio.wait_for(_repeated(question), _SECONDS)


async def load(streams: Streams) -> Loaded:
    """Run the streams to their ends."""
    run = _http if streams.protocol == "HTTP" else _grpc
    return await asyncio.wait_for(run(streams), _SECONDS)


class _Stream(asyncio.Protocol):
    """Stores the data, unparsed, until the server closes the connection."""

    def __init__(self) -> None:
        self.answer = bytearray()
        self.times: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        self.answer += data

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(exc)


async def _http(streams: Streams) -> Loaded:
    loop = asyncio.get_running_loop()
    bodies = [
        {
            "prompt": list(prompt),
            "max_tokens": n_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for prompt, n_output in streams.requests()
    ]

    async def stream(body: dict[str, object]) -> _Stream:
        transport, protocol = await loop.create_connection(_Stream, streams.host, streams.port)
        transport.write(post(streams.host, streams.port, "/v1/completions", body))
        await protocol.done
        return protocol

    cpu, start = time.process_time(), time.perf_counter()
    ended = await asyncio.gather(*(stream(body) for body in bodies))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    n_tokens = n_messages = 0
    for answer in (bytes(one.answer) for one in ended):
        assert status_of(answer) == 200, answer[:1000]
        *events, done = events_of(body_of(answer))
        assert done == "[DONE]", answer[-1000:]
        n_tokens += json.loads(events[-1])["usage"]["completion_tokens"]
        n_messages += len(events) - 1
    # The first data is the head of the answer.
    first = [one.times[min(1, len(one.times) - 1)] - start for one in ended]
    gaps = [later - earlier for one in ended for earlier, later in pairwise(one.times[1:])]
    return Loaded(seconds, n_tokens, n_messages, cpu, first, gaps)


class _Answers(asyncio.Protocol):
    """Reads complete answers of a connection that stays open."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._answered: asyncio.Future[None] | None = None

    async def ask(self, transport: asyncio.Transport, request: bytes) -> None:
        self._answered = asyncio.get_running_loop().create_future()
        transport.write(request)
        await self._answered

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end or self._answered is None:
            return
        assert head.startswith(b"HTTP/1.1 200 "), bytes(self._data[:1000])
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) == length:
            self._data.clear()
            self._answered.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(exc or EOFError("the server closed the connection"))


async def _repeated(repeated: Repeated) -> Asked:
    request = post(repeated.host, repeated.port, repeated.path, repeated.body, keep_alive=True)
    waits: list[float] = []
    loop = asyncio.get_running_loop()

    async def ask_all() -> None:
        transport, answers = await loop.create_connection(_Answers, repeated.host, repeated.port)
        try:
            for _ in range(repeated.n_times):
                began = time.perf_counter()
                await answers.ask(transport, request)
                waits.append(time.perf_counter() - began)
        finally:
            transport.close()

    cpu, start = time.process_time(), time.perf_counter()
    await asyncio.gather(*(ask_all() for _ in range(repeated.n_connections)))
    return Asked(time.perf_counter() - start, waits, time.process_time() - cpu)


async def _grpc(streams: Streams) -> Loaded:
    async with grpc.aio.insecure_channel(f"{streams.host}:{streams.port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), _SECONDS)
        generate = GenerationStub(channel).Generate
        cpu, start = time.process_time(), time.perf_counter()

        async def stream(prompt: Sequence[int], n_output: int) -> tuple[int, int]:
            sampling = SamplingParams(max_tokens=n_output, temperature=0.0, ignore_eos=True)
            n_tokens = n_messages = 0
            call = generate(GenerateRequest(token_ids=TokenIds(ids=prompt), sampling=sampling))
            async for response in call:
                n_tokens += len(response.token_ids)
                n_messages += 1
            return n_tokens, n_messages

        counts = await asyncio.gather(*(stream(*request) for request in streams.requests()))
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return Loaded(seconds, sum(n for n, _ in counts), sum(n for _, n in counts), cpu)
