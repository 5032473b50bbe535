"""Limits on gRPC clients without a key: connections, metadata, streams, and calls without a message."""

import queue
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from server.rpc.generation_pb2_grpc import GenerationStub
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import Server, serving, until
from tests.endpoint.http_client import received
from tests.endpoint.rpc_client import answer, asking, refusal
from tests.host.engines import SOON
from tests.log_records import records_of

KEY = "a-key-that-is-long"
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@contextmanager
def limited(seconds: float = 0.0, keys: ApiKeys | None = None, **limits: Any) -> Iterator[Server]:
    options = EndpointOptions(port=0, grpc_port=0, access_log="off", **limits)
    with serving(seconds=seconds, keys=keys, options=options) as server:
        yield server


@contextmanager
def channel(server: Server, *options: tuple[str, int]) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc_address, options=(*OWN_CONNECTION, *options)) as connection:
        yield connection


@contextmanager
def held_open(*messages: Any) -> Iterator[Iterator[Any]]:
    """Requests of a call: the messages, and the end only when the block ends.

    Without an end gRPC's thread waits on, and logs the timeout in the middle of another test.
    """
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for message in messages:
        requests.put(message)
    try:
        yield iter(lambda: requests.get(timeout=SOON), None)
    finally:
        requests.put(None)


def watch(connection: grpc.Channel) -> Any:
    stub: Any = HealthStub(connection)
    return stub.Watch(health_pb2.HealthCheckRequest(), timeout=SOON)


def check(connection: grpc.Channel, **options: Any) -> Any:
    stub: Any = HealthStub(connection)
    return stub.Check(health_pb2.HealthCheckRequest(), **{"timeout": SOON, **options})


def error_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    error: Any = caught.value
    return error.code(), error.details()


@contextmanager
def no_messages(server: Server) -> Iterator[socket.socket]:
    host, _, port = server.grpc_address.rpartition(":")
    with socket.create_connection((host, int(port)), SOON) as connection:
        yield connection


# Connections


def test_connections_over_the_limit_are_closed_until_others_close() -> None:
    with limited(max_connections=3) as server:
        with ExitStack() as stack:
            held = [stack.enter_context(channel(server)) for _ in range(3)]
            for each in held:
                check(each)
            with channel(server) as one_more:
                with pytest.raises(grpc.RpcError) as caught:
                    check(one_more)
                error: Any = caught.value
                assert error.code() is grpc.StatusCode.UNAVAILABLE
            for each in held:
                check(each)

        def served() -> bool:
            with channel(server) as connection:
                try:
                    return bool(check(connection, timeout=1))
                except grpc.RpcError:
                    return False

        until(served, "room")


def test_a_silent_connection_is_closed() -> None:
    with limited(header_timeout=0.3) as server:
        start = time.monotonic()
        with no_messages(server) as connection:
            received(connection)
        assert 0.29 < time.monotonic() - start < SOON / 2


def test_metadata_over_the_limit_is_rejected() -> None:
    larger = ("grpc.max_metadata_size", 1 << 20)
    with limited(max_header_bytes=4096) as server, channel(server, larger) as connection:
        assert check(connection, metadata=(("x", "y" * 3000),)).status
        with pytest.raises(grpc.RpcError) as caught:
            check(connection, metadata=(("x", "y" * 4096),))
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert check(connection).status


# Streams and calls


def test_watch_streams_are_limited() -> None:
    with limited(max_watch_streams=3) as server, channel(server) as connection:
        held = [watch(connection) for _ in range(3)]
        for each in held:
            next(each)
        code, message = error_of(watch(connection))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert message == ("3 streams without a key are open, the limit (orca serve --max-watch-streams)")
        assert check(connection).status, "a probe is no stream"
        with held_open() as requests:
            assert error_of(reflect(connection, requests))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert answer(GenerationStub(connection), asking(max_tokens=2)).messages, "nor is a request"
        held[0].cancel()

        def watches() -> bool:
            another = watch(connection)
            try:
                return bool(next(another))
            except grpc.RpcError:
                return False
            finally:
                another.cancel()

        until(watches, "room")


def test_a_limit_of_no_watch_streams() -> None:
    with limited(max_watch_streams=0) as server, channel(server) as connection:
        assert error_of(watch(connection))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


def reflect(connection: grpc.Channel, requests: Iterator[Any]) -> Any:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(connection)
    return stub.ServerReflectionInfo(requests, timeout=SOON)


def test_an_idle_reflection_stream_is_ended() -> None:
    first = reflection_pb2.ServerReflectionRequest(list_services="")
    with limited(body_timeout=0.3) as server, channel(server) as connection, held_open(first) as requests:
        start = time.monotonic()
        answers = reflect(connection, requests)
        assert next(answers).list_services_response.service
        code, message = error_of(answers)
        assert (code, message) == (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "no message came within 0.3 seconds (orca serve --body-timeout)",
        )
        assert 0.29 < time.monotonic() - start < SOON / 2


@pytest.mark.parametrize(
    "path", ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/orca.v1.Generation/Generate"]
)
def test_a_call_whose_message_never_arrives(path: str) -> None:
    """gRPC itself would wait forever."""
    with limited(body_timeout=0.3) as server, channel(server) as connection, held_open() as requests:
        start = time.monotonic()
        call = connection.stream_stream(path)(requests, timeout=SOON)
        assert error_of(call)[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0.29 < time.monotonic() - start < SOON / 2


def test_a_call_that_ends_without_a_message() -> None:
    with limited() as server, channel(server) as connection:
        call = connection.stream_stream("/orca.v1.Generation/Generate")(iter(()), timeout=SOON)
        assert error_of(call) == (grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")


def test_the_key_is_checked_before_the_message_is_read() -> None:
    keys = ApiKeys([KEY])
    with limited(keys=keys) as server, channel(server) as connection, held_open() as requests:
        start = time.monotonic()
        call = connection.stream_stream("/orca.v1.Generation/Generate")(requests, timeout=SOON)
        assert error_of(call)[0] is grpc.StatusCode.UNAUTHENTICATED
        assert time.monotonic() - start < SOON / 2


def test_hundreds_of_calls_on_one_connection() -> None:
    with limited() as server, channel(server) as connection:
        stub = GenerationStub(connection)
        calls = [stub.Generate(asking(max_tokens=8, ignore_eos=True), timeout=SOON) for _ in range(250)]
        with ThreadPoolExecutor(16) as pool:
            n_tokens = list(pool.map(lambda call: sum(len(m.token_ids) for m in call), calls))
    assert n_tokens == [8] * 250


def test_as_many_calls_as_connections_may_be_open() -> None:
    with limited(seconds=0.02, max_connections=4) as server, channel(server) as connection:
        stub = GenerationStub(connection)
        held = [stub.Generate(asking(max_tokens=400, ignore_eos=True), timeout=SOON) for _ in range(4)]
        for each in held:
            next(each)
        assert refusal(stub, asking()).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for each in held:
            each.cancel()
        until(server.at_rest, "rest")
        until(lambda: _code(stub) is grpc.StatusCode.OK, "room")


def _code(stub: GenerationStub) -> grpc.StatusCode:
    call = stub.Generate(asking(max_tokens=2), timeout=SOON)
    try:
        list(call)
    except grpc.RpcError:
        pass
    return call.code()


@pytest.mark.parametrize(
    "method",
    [
        "grpc.health.v1.Health/Check",
        "grpc.health.v1.Health/Watch",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
def test_a_malformed_message_without_a_key_is_the_client_s_mistake(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC itself would log each with a traceback, and anybody could fill the log."""
    with limited(keys=ApiKeys([KEY])) as server, channel(server) as connection:
        begin: Any = connection.stream_stream(f"/{method}")
        code, details = error_of(begin(iter([b"\x0a\xff"]), timeout=SOON))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and details.startswith("the message is malformed: ")
    assert not records_of(caplog, "grpc", "server.rpc")


def test_the_statuses_of_all_services(caplog: pytest.LogCaptureFixture) -> None:
    with limited(keys=ApiKeys([KEY])) as server, channel(server) as connection:
        call: Any = connection.unary_unary("/grpc.health.v1.Health/List")
        listed: Any = health_pb2.HealthListResponse.FromString(call(b"", timeout=SOON))  # pyright: ignore[reportAttributeAccessIssue]
    serving = health_pb2.HealthCheckResponse.SERVING
    assert {name: each.status for name, each in listed.statuses.items()} == {
        "": serving,
        "orca.v1.Generation": serving,
    }
    assert not records_of(caplog, "grpc", "server.rpc")
