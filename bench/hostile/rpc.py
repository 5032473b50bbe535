"""Attacks over gRPC: many Watch streams, huge metadata, reused ids, silent connections."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from bench.hostile.target import Target
from server.rpc.generation_pb2 import GenerateRequest, ModelsRequest, SamplingParams, TokenIds
from server.rpc.generation_pb2_grpc import GenerationStub

# Each channel has its own connection and no limit on what it sends.
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_metadata_size", 1 << 26),
    ("grpc.max_send_message_length", -1),
)


@asynccontextmanager
async def _channel(target: Target) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(target.rpc, options=_OPTIONS) as channel:
        yield channel


async def watch_streams(target: Target) -> None:
    """600 streams of the health service, over twelve connections."""

    async def watch(stub: Any) -> None:
        call = stub.Watch(HealthCheckRequest(), timeout=target.left)
        try:
            async for _ in call:
                target.answers.note("a status")
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                target.answers.note("left open")
            else:
                target.note_error(error)

    async def connection() -> None:
        async with _channel(target) as channel:
            stub: Any = HealthStub(channel)
            await asyncio.gather(*(watch(stub) for _ in range(50)))

    await asyncio.gather(*(connection() for _ in range(12)))


async def huge_metadata(target: Target) -> None:
    """Calls with metadata of 8 KB to 4 MB."""
    sizes = itertools.cycle((8_000, 64_000, 1_000_000, 4_000_000))

    async with _channel(target) as channel:
        models = GenerationStub(channel).Models

        async def attempt() -> None:
            metadata = [(f"x-{i}", "a" * 4000) for i in range(next(sizes) // 4000)]
            try:
                await models(ModelsRequest(), metadata=metadata, timeout=target.left or 1e-3)
                target.answers.note("OK")
            except grpc.aio.AioRpcError as error:
                target.note_error(error)

        await target.repeat(4, attempt)


async def reused_ids(target: Target) -> None:
    """Four request ids shared by 32 clients, each of which cancels its call at once."""
    numbers = itertools.count()
    async with _channel(target) as channel:
        generate = GenerationStub(channel).Generate

        async def attempt() -> None:
            request = GenerateRequest(
                request_id=f"mine-{next(numbers) % 4}",
                token_ids=TokenIds(ids=[1, 2, 3]),
                sampling=SamplingParams(max_tokens=400, ignore_eos=True),
            )
            call = generate(request, timeout=target.left or 1e-3)
            try:
                if await call.initial_metadata():
                    target.answers.note("accepted, and cancelled")
                    call.cancel()
                else:
                    target.answers.note((await call.code()).name, await call.details() or "")
            except grpc.aio.AioRpcError as error:
                target.note_error(error)

        await target.repeat(32, attempt)


async def four_million_integers(target: Target) -> None:
    """Prompts of as many tokens as fit into 4 MB, and as many allowed tokens."""
    ids = TokenIds(ids=[5] * ((4 << 20) - 100))
    some = TokenIds(ids=[5])
    requests = itertools.cycle(
        (
            GenerateRequest(token_ids=ids),
            GenerateRequest(token_ids=some, sampling=SamplingParams(allowed_token_ids=ids)),
            GenerateRequest(text="a" * ((4 << 20) - 100)),
        )
    )
    async with _channel(target) as channel:
        generate = GenerationStub(channel).Generate

        async def attempt() -> None:
            try:
                async for _ in generate(next(requests), timeout=target.left or 1e-3):
                    pass
                target.answers.note("OK")
            except grpc.aio.AioRpcError as error:
                target.note_error(error)

        await target.repeat(2, attempt)


async def silent_rpc_connections(target: Target) -> None:
    """300 connections to gRPC's port: silent, with half a greeting, with garbage."""
    host, _, port = target.rpc.rpartition(":")
    greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    words = (b"", greeting[:10], greeting, greeting + os.urandom(64), os.urandom(64))

    async def attempt(number: int) -> None:
        try:
            async with asyncio.timeout(target.left):
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    writer.write(words[number % len(words)])
                    while await reader.read(4096):
                        pass
                    target.answers.note("closed by the server")
                finally:
                    writer.transport.abort()
        except TimeoutError:
            target.answers.note("left open")
        except OSError as error:
            target.note_error(error)

    await asyncio.gather(*(attempt(number) for number in range(300)))


ATTACKS = (watch_streams, huge_metadata, reused_ids, four_million_integers, silent_rpc_connections)
