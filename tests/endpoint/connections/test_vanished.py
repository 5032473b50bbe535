"""A gRPC client that vanishes without closing its connection."""

from contextlib import ExitStack

import grpc
import pytest

from orca_jax.request.request import FinishReason
from server.rpc import generation_pb2 as pb
from server.rpc import server as rpc_server
from server.rpc.generation_pb2_grpc import GenerationStub
from tests.endpoint.harness import serving, until
from tests.host.engine.test_grpc_channel import Relay
from tests.host.engines import SOON, GatedEngine


def test_its_request_ends_within_the_keepalive_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = tuple(
        (name, value // 40 if name.endswith("_ms") else value) for name, value in rpc_server._OPTIONS
    )
    monkeypatch.setattr(rpc_server, "_OPTIONS", quick)
    engine = GatedEngine()
    with serving(engine=engine) as server, ExitStack() as ends:
        ends.callback(engine.let, 1000)
        relay = Relay(ends, int(server.grpc_address.rpartition(":")[2]))
        channel = ends.enter_context(grpc.insecure_channel(f"127.0.0.1:{relay.port}"))
        request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=6, ignore_eos=True))
        generated = GenerationStub(channel).Generate(request, timeout=10 * SOON)
        engine.let(1)
        assert next(generated).text == "a"
        relay.silent.set()
        until(lambda: server.gateway.n_live == 0, "its end")  # with gRPC's default it would take a minute
        engine.let(1)
        until(server.at_rest, "rest")
        (record,) = server.service.timeline.requests
        assert record.finish_reason is FinishReason.CANCELLED
