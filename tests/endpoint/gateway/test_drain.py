"""Clients that vanish while the server drains: their requests end, and the drain ends with the last one."""

import asyncio
import contextlib
import json
from collections.abc import Callable

import grpc
import pytest

from orca_jax.config import ServingConfig
from orca_jax.request.request import FinishReason
from server.gateway.gateway import Phase
from server.rpc import generation_pb2 as pb
from server.rpc import generation_pb2_grpc
from tests.endpoint.harness import Server, serving, until
from tests.endpoint.http_client import post_head, raw
from tests.host.engines import SOON, GatedEngine, counting

CONFIG = ServingConfig(max_batch_size=2, n_slots=1024, max_batch_tokens=512, block_size=16)  # others wait


def posted(stream: bool, max_tokens: int) -> tuple[bytes, bytes]:
    body = json.dumps({"prompt": "bb", "max_tokens": max_tokens, "stream": stream}).encode()
    return post_head("/v1/completions", f"Content-Length: {len(body)}"), body


def over_http(stream: bool) -> Callable[[Server, contextlib.ExitStack], Callable[[], object]]:
    def ask(server: Server, stack: contextlib.ExitStack) -> Callable[[], object]:
        return stack.enter_context(raw(server, *posted(stream, 400))).close

    return ask


def over_grpc(server: Server, stack: contextlib.ExitStack) -> Callable[[], object]:
    channel = stack.enter_context(grpc.insecure_channel(server.grpc_address))
    sampling = pb.SamplingParams(max_tokens=400)
    request = pb.GenerateRequest(text="bb", sampling=sampling)
    return generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=SOON).cancel


def run_until(engine: GatedEngine, condition: Callable[[], bool]) -> None:
    """Let iterations return, one at a time, until the end of a request shows."""

    def is_true() -> bool:
        if condition():
            return True
        engine.let(1)
        return False

    until(is_true, "the end of a request")


@pytest.mark.parametrize(
    "asks",
    [
        [over_http(True)],
        [over_http(False)],
        [over_grpc],
        [over_http(True), over_http(False), over_grpc, over_http(True), over_http(False), over_grpc],
    ],
    ids=["stream", "answer", "grpc", "all"],
)
def test_a_drain_ends_when_the_last_client_vanishes(
    asks: list[Callable[[Server, contextlib.ExitStack], Callable[[], object]]],
) -> None:
    """The requests would run for long, and the drain's limit is longer than the test."""
    engine = GatedEngine(counting)
    with serving(engine=engine, config=CONFIG) as server, contextlib.ExitStack() as stack:
        leave = [ask(server, stack) for ask in asks]
        until(lambda: server.gateway.n_live == len(asks), "the requests")
        drain = asyncio.run_coroutine_threadsafe(server.gateway.drain(1e6), server.loop)
        until(lambda: server.gateway.phase is Phase.DRAINING, "the phase")
        for n_left, go in reversed(list(enumerate(leave))):
            assert not drain.done()
            go()
            run_until(engine, lambda n=n_left: server.gateway.n_live == n)
        assert drain.result(SOON) == 0, "none had to be ended by the drain"
        engine.let(100)
        until(lambda: len(server.service.timeline.requests) == len(asks), "the ends")
        reasons = {record.finish_reason for record in server.service.timeline.requests}
        assert reasons == {FinishReason.CANCELLED}


def test_a_drain_goes_on_for_the_client_that_stays() -> None:
    engine = GatedEngine(counting)
    with serving(engine=engine, config=CONFIG) as server, contextlib.ExitStack() as stack:
        leave = over_http(True)(server, stack)
        until(lambda: server.gateway.n_live == 1, "the first request")
        stays = stack.enter_context(raw(server, *posted(stream=False, max_tokens=400)))
        until(lambda: server.gateway.n_live == 2, "the second request")
        drain = asyncio.run_coroutine_threadsafe(server.gateway.drain(1e6), server.loop)
        until(lambda: server.gateway.phase is Phase.DRAINING, "the phase")
        leave()
        run_until(engine, lambda: server.gateway.n_live == 1)
        assert not drain.done()
        engine.let(1000)
        assert drain.result(SOON) == 0
        assert stays.recv(1 << 16).startswith(b"HTTP/1.1 200")
