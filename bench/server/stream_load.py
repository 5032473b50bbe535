"""Many concurrent streams against a server, from a process that does as little as possible with the data."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import grpc

from bench.other_process import answer_each
from bench.server.http_client import body_of, events_of, post, status_of
from server.rpc.generation_pb2 import GenerateRequest, SamplingParams, TokenIds
from server.rpc.generation_pb2_grpc import GenerationStub

_SECONDS = 240.0


@dataclass(frozen=True, slots=True)
class Streams:
    """One greedy stream per prompt of token ids, all started at once, with `n_output` tokens each."""

    protocol: Literal["HTTP", "gRPC"]
    host: str
    port: int
    prompts: Sequence[Sequence[int]]
    n_output: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result: seconds from the first request to the last end, tokens, messages that contain tokens.

    `cpu` is the client's own processor time in seconds.
    """

    seconds: float
    n_tokens: int
    n_messages: int
    cpu: float


def client(connection: Connection) -> None:
    """Entry point of an OtherProcess: answer each Streams with a Loaded."""
    answer_each(connection, load)


async def load(streams: Streams) -> Loaded:
    """Run the streams to their ends."""
    run = _http if streams.protocol == "HTTP" else _grpc
    return await asyncio.wait_for(run(streams), _SECONDS)


class _Stream(asyncio.Protocol):
    """Stores the data, unparsed, until the server closes the connection."""

    def __init__(self) -> None:
        self.answer = bytearray()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
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
            "max_tokens": streams.n_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for prompt in streams.prompts
    ]

    async def stream(body: dict[str, object]) -> bytearray:
        transport, protocol = await loop.create_connection(_Stream, streams.host, streams.port)
        transport.write(post(streams.host, streams.port, "/v1/completions", body))
        await protocol.done
        return protocol.answer

    cpu, start = time.process_time(), time.perf_counter()
    answers = await asyncio.gather(*(stream(body) for body in bodies))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    n_tokens = n_messages = 0
    for answer in map(bytes, answers):
        assert status_of(answer) == 200, answer[:1000]
        *events, done = events_of(body_of(answer))
        assert done == "[DONE]", answer[-1000:]
        n_tokens += json.loads(events[-1])["usage"]["completion_tokens"]
        n_messages += len(events) - 1
    return Loaded(seconds, n_tokens, n_messages, cpu)


async def _grpc(streams: Streams) -> Loaded:
    async with grpc.aio.insecure_channel(f"{streams.host}:{streams.port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), _SECONDS)
        generate = GenerationStub(channel).Generate
        cpu, start = time.process_time(), time.perf_counter()

        async def stream(prompt: Sequence[int]) -> tuple[int, int]:
            sampling = SamplingParams(max_tokens=streams.n_output, temperature=0.0, ignore_eos=True)
            n_tokens = n_messages = 0
            call = generate(GenerateRequest(token_ids=TokenIds(ids=prompt), sampling=sampling))
            async for response in call:
                n_tokens += len(response.token_ids)
                n_messages += 1
            return n_tokens, n_messages

        counts = await asyncio.gather(*(stream(prompt) for prompt in streams.prompts))
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return Loaded(seconds, sum(n for n, _ in counts), sum(n for _, n in counts), cpu)
