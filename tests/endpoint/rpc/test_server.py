"""The gRPC server around Generate: health, reflection, keys, TLS, port, log and generated code."""

import asyncio
import json
import logging
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from orca_jax.errors import ConfigError, RequestTimedOut
from scripts import make_protos
from server.gateway.gateway import Gateway
from server.metrics.metrics import Metrics
from server.rpc import generation_pb2 as pb
from server.rpc.calls import Calls
from server.rpc.generation_pb2_grpc import GenerationStub
from server.rpc.server import create_server
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import DATA, Server, serving, until
from tests.endpoint.log_lines import Lines
from tests.host.engines import SOON, PacedEngine, writing

SERVICE = "orca.v1.Generation"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
KEY = "correct-horse-battery"


def code_of(call: Any) -> grpc.StatusCode:
    """The status with which a streaming or unary call ends."""
    try:
        list(call())
    except grpc.RpcError as error:
        return error.code()  # pyright: ignore[reportAttributeAccessIssue]
    return grpc.StatusCode.OK


@contextmanager
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc_address) as connection:
        yield connection


def health(connection: grpc.Channel, service: str = SERVICE) -> int:
    stub: Any = HealthStub(connection)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=SOON).status


def health_watch(connection: grpc.Channel, service: str = SERVICE) -> Any:
    stub: Any = HealthStub(connection)
    return stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=SOON)


def generate(connection: grpc.Channel, **metadata: str) -> grpc.StatusCode:
    request = pb.GenerateRequest(text="Go", sampling=pb.SamplingParams(max_tokens=2))
    stub = GenerationStub(connection)
    return code_of(lambda: stub.Generate(request, timeout=SOON, metadata=tuple(metadata.items())))


def test_health_follows_the_server_through_its_life() -> None:
    with serving(writing("ab"), ready=False) as server, channel(server) as connection:
        watch = health_watch(connection)
        assert next(watch).status == health(connection) == health(connection, "") == NOT_SERVING
        assert generate(connection) is grpc.StatusCode.UNAVAILABLE
        assert code_of(lambda: GenerationStub(connection).Models(pb.ModelsRequest())).name == "UNAVAILABLE"

        server.call(lambda: server.gateway.open(server.model))
        assert next(watch).status == health(connection) == health(connection, "") == SERVING
        assert generate(connection) is grpc.StatusCode.OK

        asyncio.run_coroutine_threadsafe(server.gateway.drain(SOON), server.loop).result(SOON)
        assert next(watch).status == health(connection) == health(connection, "") == NOT_SERVING
        assert generate(connection) is grpc.StatusCode.UNAVAILABLE


def test_health_of_a_failed_engine_and_of_an_unknown_service() -> None:
    engine = PacedEngine(writing("ab"), seconds=0.001)
    with serving(engine=engine) as server, channel(server) as connection:
        with pytest.raises(grpc.RpcError) as caught:
            health(connection, "orca.v1.Other")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND  # pyright: ignore[reportAttributeAccessIssue]
        other = health_watch(connection, "other")
        assert next(other).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        engine.error = RuntimeError("the device is gone")
        assert generate(connection) is grpc.StatusCode.UNAVAILABLE
        assert health(connection) == NOT_SERVING


def test_watch_ends_when_the_server_stops() -> None:
    with serving() as server:
        connection = grpc.insecure_channel(server.grpc_address)
        watch = health_watch(connection)
        assert next(watch).status == SERVING
    with connection:
        assert code_of(lambda: watch) is grpc.StatusCode.UNAVAILABLE


def test_reflection_describes_the_services() -> None:
    with serving() as server, channel(server) as connection:
        database = ProtoReflectionDescriptorDatabase(connection)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
        methods = DescriptorPool(database).FindServiceByName(SERVICE).methods_by_name
        assert set(methods) == {"Generate", "Cancel", "Embed", "Models"}
        assert methods["Generate"].server_streaming
        assert methods["Generate"].input_type.full_name == "orca.v1.GenerateRequest"


def test_models_describes_the_served_model() -> None:
    with serving() as server, channel(server) as connection:
        (model,) = GenerationStub(connection).Models(pb.ModelsRequest(), timeout=SOON).models
        created = server.model.created
    assert model == pb.Model(
        name="test", created=created, max_model_len=512, vocab_size=300, has_tokenizer=True
    )
    with serving(tokenizer=False) as server, channel(server) as connection:
        (model,) = GenerationStub(connection).Models(pb.ModelsRequest(), timeout=SOON).models
        assert not model.has_tokenizer
        assert generate(connection) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("message", [pb.CancelRequest, pb.EmbedRequest, pb.ModelsRequest])
def test_unknown_fields_of_the_other_methods(message: Any) -> None:
    request = message.FromString(b"\xf8\x06\x01")
    with serving() as server, channel(server) as connection:
        stub = GenerationStub(connection)
        methods = {pb.CancelRequest: stub.Cancel, pb.EmbedRequest: stub.Embed, pb.ModelsRequest: stub.Models}
        method: Any = methods[message]
        assert code_of(lambda: method(request, timeout=SOON)) is grpc.StatusCode.INVALID_ARGUMENT


def test_calls_need_a_key() -> None:
    with serving(writing("ab"), keys=ApiKeys([KEY])) as server, channel(server) as connection:
        stub = GenerationStub(connection)
        assert generate(connection, authorization=f"Bearer {KEY}") is grpc.StatusCode.OK
        for metadata in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}, {"x-api-key": KEY}):
            assert generate(connection, **metadata) is grpc.StatusCode.UNAUTHENTICATED
        assert code_of(lambda: stub.Models(pb.ModelsRequest(), timeout=SOON)).name == "UNAUTHENTICATED"
        assert code_of(lambda: stub.Cancel(pb.CancelRequest(), timeout=SOON)).name == "UNAUTHENTICATED"
        # The key is checked before the message is read: this message is not a valid GenerateRequest.
        raw = connection.unary_stream(f"/{SERVICE}/Generate")
        assert code_of(lambda: raw(b"\xff", timeout=SOON)) is grpc.StatusCode.UNAUTHENTICATED
        assert health(connection) == SERVING
        assert SERVICE in ProtoReflectionDescriptorDatabase(connection).get_services()


def test_a_message_that_is_too_large_or_malformed() -> None:
    options = EndpointOptions(port=0, grpc_port=0, access_log="off", max_body_bytes=4096)
    with serving(writing("ab"), options=options) as server, channel(server) as connection:
        stub = GenerationStub(connection)
        large = pb.GenerateRequest(text="x" * 4096)
        assert code_of(lambda: stub.Generate(large, timeout=SOON)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        raw = connection.unary_stream(f"/{SERVICE}/Generate")
        assert code_of(lambda: raw(b"\xff", timeout=SOON)) is grpc.StatusCode.INVALID_ARGUMENT
        assert generate(connection) is grpc.StatusCode.OK


def test_connections_use_tls() -> None:
    options = EndpointOptions(
        port=0,
        grpc_port=0,
        access_log="off",
        ssl_certfile=DATA / "localhost.pem",
        ssl_keyfile=DATA / "localhost.key",
    )
    trust = grpc.ssl_channel_credentials((DATA / "localhost.pem").read_bytes())
    with serving(writing("ab"), options=options) as server:
        with grpc.secure_channel(server.grpc_address, trust) as connection:
            assert generate(connection) is grpc.StatusCode.OK
        with channel(server) as connection:
            assert generate(connection) is grpc.StatusCode.UNAVAILABLE


def bound(host: str, port: int, **options: Any) -> int:
    """Bind, start and stop a server; return its port."""

    async def run() -> int:
        gateway = Gateway()
        endpoint = EndpointOptions(port=0, grpc_port=0, access_log="off", **options)
        server = create_server(gateway, endpoint, api_keys=ApiKeys(), metrics=Metrics(gateway))
        taken = await server.bind(host, port)
        await server.start()
        await server.stop(None)
        return taken

    return asyncio.run(run())


def test_a_port_that_is_taken() -> None:
    with serving() as server:
        port = int(server.grpc_address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1 port {port}: Address already in use"):
            bound("127.0.0.1", port)
    assert bound("127.0.0.1", port) == port  # free again


def test_an_address_that_cannot_be_bound_is_named() -> None:
    assert bound("localhost", 0) > 0
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1 port 0.*--grpc-port"):
        bound("192.0.2.1", 0)  # an address reserved for documentation, which no machine has
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
    assert bound("::1", 0) > 0


def test_a_certificate_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.key cannot be read"):
        bound("127.0.0.1", 0, ssl_certfile=DATA / "localhost.pem", ssl_keyfile=tmp_path / "none.key")


def test_each_call_is_logged_without_secrets_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    options = EndpointOptions(port=0, grpc_port=0, access_log="json")
    logger, log = logging.getLogger("orca.access"), Lines()
    logger.addHandler(log)
    caplog.set_level(logging.INFO, "orca.access")
    try:
        with serving(writing("ab"), options=options, keys=ApiKeys([KEY])) as server:
            with channel(server) as connection:
                assert generate(connection, authorization=f"Bearer {KEY}") is grpc.StatusCode.OK
                assert generate(connection, authorization="Bearer secret") is grpc.StatusCode.UNAUTHENTICATED
            until(lambda: len(log.lines) == 2, "two lines")
            scrape = urllib.request.Request(
                f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}
            )
            with urllib.request.urlopen(scrape, timeout=SOON) as response:
                metrics = response.read().decode()
    finally:
        logger.removeHandler(log)
    served, refused = (json.loads(line) for line in log.lines[:2])
    expected = {
        "protocol": "grpc",
        "client": "127.0.0.1",
        "method": "Generate",
        "status": "OK",
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "finish_reason": "length",
    }
    assert expected.items() <= served.items() and served["request_id"] and served["ms"] >= 0
    assert refused["status"] == "UNAUTHENTICATED"
    for secret in (KEY, "secret", "Go"):
        assert secret not in "".join(log.lines)
    assert 'orca_grpc_requests_total{code="OK",method="Generate"} 1.0' in metrics
    assert 'orca_grpc_requests_total{code="UNAUTHENTICATED",method="Generate"} 1.0' in metrics


def test_the_generated_code_matches_the_proto(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="it is made with grpcio-tools")
    make_protos.make(tmp_path)
    made = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py*"))
    assert made == [
        "orca_jax/control/worker_pb2.py",
        "orca_jax/control/worker_pb2.pyi",
        "server/rpc/generation_pb2.py",
        "server/rpc/generation_pb2.pyi",
        "server/rpc/generation_pb2_grpc.py",
    ]
    for path in made:
        committed = (make_protos.ROOT / path).read_text()
        assert committed == (tmp_path / path).read_text(), f"{path}: run python -m scripts.make_protos"


class Gone:
    """The context of a call whose client has just left: sending fails."""

    def __init__(self) -> None:
        self.n_tried = 0

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:4711"

    async def abort(self, *_: object) -> None:
        self.n_tried += 1
        raise grpc.aio.InternalError("the status could not be sent")


@pytest.mark.parametrize(
    "error", [RequestTimedOut("late"), RuntimeError("oh"), grpc.aio.InternalError("lost")]
)
def test_a_status_that_cannot_be_sent_ends_the_call_quietly(error: Exception) -> None:
    """gRPC accepts CancelledError as the end of a cancelled call; anything else logs a traceback."""
    context = Gone()

    async def call() -> None:
        gateway = Gateway()
        calls = Calls(gateway, api_keys=ApiKeys(), access_log="off", metrics=Metrics(gateway))
        async with calls.answered("Generate", cast(Any, context)):
            raise error

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(call())
    assert context.n_tried == (0 if isinstance(error, grpc.aio.BaseError) else 1)
