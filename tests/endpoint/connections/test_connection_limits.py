"""Limits on HTTP connections, in total and per client address, and the refusal over the limit."""

import asyncio
import errno
import json
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
import uvloop

from server.commands import endpoints
from server.commands.endpoints import with_room
from server.errors import TooManyConnections, TooManyFromAddress
from server.http.connections.listener import OpenConnections
from server.process.addresses import bound_socket
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import DATA, Server, serving, until
from tests.endpoint.http_client import raw, received, received_until
from tests.host.engines import SOON
from tests.log_records import messages_of, records_of

GET = b"GET /version HTTP/1.1\r\nHost: here\r\n\r\n"
LAST = b"GET /version HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
TLS = {"ssl_certfile": DATA / "localhost.pem", "ssl_keyfile": DATA / "localhost.key"}


@pytest.fixture(params=["asyncio", "uvloop"], autouse=True)
def event_loop_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use uvloop, as `orca serve` does."""
    if request.param == "uvloop":
        monkeypatch.setattr(asyncio, "new_event_loop", uvloop.new_event_loop)


@contextmanager
def limited(**limits: Any) -> Iterator[Server]:
    with serving(options=EndpointOptions(port=0, grpc_port=None, access_log="off", **limits)) as server:
        yield server


def is_served(server: Server) -> bool:
    with raw(server, LAST) as connection:
        return received(connection).startswith(b"HTTP/1.1 200 OK\r\n")


def refused(answer: bytes, status: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *headers = head.split(b"\r\n")
    assert first == b"HTTP/1.1 " + status
    assert {b"retry-after: 1", b"connection: close", b"content-type: application/json"} <= set(headers)
    return json.loads(body)["error"]


# The count


def test_ipv6_addresses_of_one_64_count_as_one() -> None:
    open_connections = OpenConnections(most=100, most_per_address=2)
    for same in (
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.2", "10.0.0.2"),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff:ffff:ffff:ffff"),
        ("fe80::1%eth0", "fe80::2%eth0"),
    ):
        for host in same:
            open_connections.take(host)
        for host in same:
            with pytest.raises(TooManyFromAddress):
                open_connections.take(host)
    open_connections.take("2001:db8:0:2::1")


def test_a_place_is_released_once_and_its_address_forgotten() -> None:
    open_connections = OpenConnections(most=2, most_per_address=2)
    places = [open_connections.take("a"), open_connections.take("b")]
    with pytest.raises(TooManyConnections):
        open_connections.take("c")
    for _ in range(3):
        places[0].release()
    open_connections.take("c")
    with pytest.raises(TooManyConnections):
        open_connections.take("c")
    assert set(open_connections._of_network) == {"b", "c"}


# The limits


def test_a_connection_over_the_limit_is_refused_until_another_closes() -> None:
    with limited(max_connections=3) as server, ExitStack() as stack:
        held = [stack.enter_context(raw(server, GET)) for _ in range(3)]
        for each in held:
            assert received_until(each, b'"}').startswith(b"HTTP/1.1 200 OK\r\n")
        for _ in range(100):  # more than the number of refused clients that may still read
            with raw(server, GET) as connection:
                assert refused(received(connection), b"503 Service Unavailable") == {
                    "message": "the server has 3 connections open, as many as it takes; try again later "
                    "(orca serve --max-connections)",
                    "type": "service_unavailable_error",
                    "param": None,
                    "code": "too_many_connections",
                }
        for each in held:  # which continue meanwhile
            each.sendall(GET)
            assert received_until(each, b'"}').startswith(b"HTTP/1.1 200 OK\r\n")
        held[0].close()
        until(lambda: is_served(server), "room")


def test_one_address_is_limited_to_a_share_of_the_connections() -> None:
    with limited(max_connections_per_address=2) as server, ExitStack() as stack:
        held = [stack.enter_context(raw(server, GET)) for _ in range(2)]
        for each in held:
            assert received_until(each, b'"}').startswith(b"HTTP/1.1 200 OK\r\n")
        with raw(server, GET) as connection:
            error = refused(received(connection), b"429 Too Many Requests")
        assert (error["type"], error["code"]) == ("rate_limit_error", "too_many_connections")
        assert "2 connections open" in error["message"]
        assert "--max-connections-per-address" in error["message"]
        port = urlsplit(server.url).port
        with socket.create_connection(("127.0.0.1", port or 0), SOON, ("127.0.0.2", 0)) as other:
            other.sendall(LAST)
            assert received(other).startswith(b"HTTP/1.1 200 OK\r\n")
        held[0].close()
        until(lambda: is_served(server), "room")


def test_refusals_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with limited(max_connections=1) as server, httpx2.Client(base_url=server.url, timeout=SOON) as client:
        client.get("/health")
        for _ in range(5):
            with raw(server, GET) as connection:
                refused(received(connection), b"503 Service Unavailable")
        figures = client.get("/metrics").text
    assert '{method="other",path="other",status="503"} 5.0' in figures
    assert messages_of(caplog, "orca.http") == [
        "a connection limit is reached (--max-connections, --max-connections-per-address)"
    ]


@pytest.mark.parametrize("end", ["answered", "reset", "malformed", "too slow"])
def test_every_closed_connection_frees_its_place(end: str) -> None:
    linger = b"\x01\0\0\0\0\0\0\0"
    with limited(max_connections=2, header_timeout=0.1 if end == "too slow" else SOON) as server:
        for _ in range(5):
            with raw(server, {"answered": LAST, "malformed": b"garbage\r\n\r\n"}.get(end, b"")) as connection:
                if end == "reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                else:
                    received(connection)
        until(lambda: is_served(server), "room")


def test_clients_that_connect_together_are_all_served() -> None:
    with limited() as server, ExitStack() as stack:
        held = [stack.enter_context(raw(server, GET)) for _ in range(300)]
        for each in held:
            assert received_until(each, b'"}').startswith(b"HTTP/1.1 200 OK\r\n")


# TLS


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(DATA / "localhost.pem"))


def is_served_by_tls(server: Server) -> bool:
    try:
        with httpx2.Client(base_url=server.url, verify=trusting(), timeout=SOON) as client:
            return client.get("/version").status_code == 200
    except httpx2.TransportError:
        return False


def test_a_tls_handshake_counts_and_has_a_timeout() -> None:
    with limited(max_connections=2, header_timeout=1.0, **TLS) as server:
        start = time.monotonic()
        with raw(server) as silent, raw(server, b"\x16\x03\x01") as half, raw(server) as third:
            assert received(third) == b"", "over the limit: closed"
            assert time.monotonic() - start < 1.0
            assert received(silent) == received(half) == b""
            assert time.monotonic() - start > 0.99
        until(lambda: is_served_by_tls(server), "room")


@pytest.mark.parametrize("begin", [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"\x16\x03\x01\x00\x05hello"])
def test_a_failed_tls_handshake_frees_its_place(begin: bytes) -> None:
    with limited(max_connections=1, **TLS) as server:
        for _ in range(3):
            with raw(server, begin) as connection:
                assert b"HTTP" not in received(connection)
        until(lambda: is_served_by_tls(server), "room")


def test_limits_over_tls() -> None:
    with limited(header_timeout=0.6, keep_alive_timeout=0.3, **TLS) as server:
        for begin, status in (
            (b"", b""),
            (b"GET / HTTP/1.1\r\n", b"HTTP/1.1 408 "),
            (b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000, b"HTTP/1.1 431 "),
            (GET, b"HTTP/1.1 200 "),
        ):
            with (
                raw(server) as plain,
                trusting().wrap_socket(plain, server_hostname="localhost") as connection,
            ):
                connection.sendall(begin)
                assert received(connection).startswith(status)


# Descriptors


def test_out_of_file_descriptors_clients_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Scarce(socket.socket):
        n_failures = 2

        def accept(self) -> Any:
            if self.n_failures:
                self.n_failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    def scarce(host: str, port: int, *, flag: str) -> socket.socket:
        with bound_socket(host, port, flag=flag) as bound:
            return Scarce(bound.family, bound.type, bound.proto, bound.detach())

    monkeypatch.setattr(endpoints, "bound_socket", scarce)
    with limited() as server:
        assert is_served(server)
    assert messages_of(caplog, "orca.http") == ["no connection can be accepted: Too many open files"]


class Limits:
    """A stand-in for the process's limit on file descriptors."""

    RLIMIT_NOFILE, RLIM_INFINITY = resource.RLIMIT_NOFILE, resource.RLIM_INFINITY

    def __init__(self, soft: int, hard: int, *, fixed: bool = False) -> None:
        self.now = (soft, hard)
        self._fixed = fixed

    def getrlimit(self, _: int) -> tuple[int, int]:
        return self.now

    def setrlimit(self, _: int, limits: tuple[int, int]) -> None:
        if self._fixed:
            raise OSError("not allowed")
        self.now = limits


@pytest.mark.parametrize(
    ("limits", "soft", "most"),
    [
        (Limits(1024, 4096), 2512, 1000),
        (Limits(1024, resource.RLIM_INFINITY), 2512, 1000),
        (Limits(resource.RLIM_INFINITY, resource.RLIM_INFINITY), resource.RLIM_INFINITY, 1000),
        (Limits(65536, 65536), 65536, 1000),
        (Limits(1024, 2000), 2000, (2000 - 512) // 2),
        (Limits(1024, 4096, fixed=True), 1024, (1024 - 512) // 2),
        (Limits(256, 256), 256, 1),
    ],
)
def test_the_descriptor_limit_is_raised_or_fewer_connections_allowed(
    limits: Limits, soft: int, most: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(endpoints, "resource", limits)
    assert with_room(EndpointOptions(max_connections=1000)).max_connections == most
    assert limits.now[0] == soft
    if most == 1000:
        assert not records_of(caplog, "orca.limits")
    else:
        assert f"max_connections is {most}, not 1000" in caplog.text and "ulimit -n" in caplog.text
