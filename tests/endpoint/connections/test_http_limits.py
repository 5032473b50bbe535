"""Limits of one HTTP connection before the application runs, against hostile clients."""

import asyncio
import json
import random
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvloop

from orca_jax.request.request import FinishReason
from server.http.connections import connection as connection_module
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import Server, serving, until
from tests.endpoint.http_client import JSON, error_of, post_head, raw, received, received_until
from tests.host.engines import SOON, counting

GET = b"GET /version HTTP/1.1\r\nHost: here\r\n\r\n"
LAST = b"GET /version HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
CHUNKED = post_head("/tokenize", "Transfer-Encoding: chunked")
MANY_BYTES = 64 << 20  # effectively endless: no test sends this much
DRIP_SECONDS = 15.0  # effectively endless: the timeouts here are at most half a second


@pytest.fixture(params=["asyncio", "uvloop"], autouse=True)
def event_loop_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use uvloop, as `orca serve` does: its transports differ from asyncio's."""
    if request.param == "uvloop":
        monkeypatch.setattr(asyncio, "new_event_loop", uvloop.new_event_loop)


@contextmanager
def limited(seconds: float = 0.0, **limits: Any) -> Iterator[Server]:
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", **limits)
    with serving(counting, seconds=seconds, options=options) as server:
        yield server


def flood(connection: socket.socket, part: bytes) -> int:
    """Send `part` repeatedly until the server refuses; returns the number of bytes sent."""
    n_bytes = 0
    try:
        while n_bytes < MANY_BYTES:
            connection.sendall(part)
            n_bytes += len(part)
    except OSError:
        pass
    return n_bytes


def drip(connection: socket.socket, part: bytes, start: float) -> float:
    """Send `part` every 20 ms until the server answers or closes; returns the seconds since `start`."""
    while not select.select([connection], [], [], 0.02)[0]:
        assert time.monotonic() - start < DRIP_SECONDS, "the server takes this for ever"
        if part:
            connection.sendall(part)
    return time.monotonic() - start


def refused(answer: bytes) -> tuple[int, str]:
    """Status and message of an error response, after checking that it has the usual form and closes."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *headers = head.decode().split("\r\n")
    assert "connection: close" in headers and "content-type: application/json" in headers
    assert f"content-length: {len(body)}" in headers
    error = json.loads(body)["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return int(status.split()[1]), error["message"]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# Bytes


ENDLESS = {
    "one header": (b"GET / HTTP/1.1\r\nX: ", b"x" * 65536),
    "many headers": (b"GET / HTTP/1.1\r\n", b"X: " + b"y" * 1000 + b"\r\n"),
    "short headers": (b"GET / HTTP/1.1\r\n", b"a:\r\n" * 16384),
    "a header's name": (b"GET / HTTP/1.1\r\n", b"x" * 65536),
    "a path": (b"GET /", b"x" * 65536),
    "trailers": (CHUNKED + b"1\r\n{\r\n0\r\n", b"X: " + b"y" * 1000 + b"\r\n"),
    "one trailer": (CHUNKED + b"1\r\n{\r\n0\r\nX: ", b"y" * 65536),
    "a chunk's extension": (CHUNKED + b"1;x=", b"y" * 65536),
    "empty lines": (b"", b"\r\n" * 32768),
}


@pytest.mark.parametrize(("begin", "part"), ENDLESS.values(), ids=ENDLESS)
def test_an_endless_head_is_rejected_before_it_is_stored(begin: bytes, part: bytes) -> None:
    with limited() as server, raw(server, begin) as connection:
        before = resident_bytes()
        assert flood(connection, part) < MANY_BYTES, "the connection was never cut"
        assert resident_bytes() - before < 16 << 20
        status, message = refused(received(connection))
        assert status == 431
        assert "--max-header-bytes" in message or "more than 256 headers" in message


def head_of(n_bytes: int) -> bytes:
    begin, end = b"GET /version HTTP/1.1\r\nHost: here\r\nX: ", b"\r\n\r\n"
    return begin + b"x" * (n_bytes - len(begin) - len(end)) + end


@pytest.mark.parametrize("n_pieces", [1, 7])
def test_a_head_of_exactly_the_allowed_size(n_pieces: int) -> None:
    with limited(max_header_bytes=4096) as server:
        for n_bytes, status in ((4096, 200), (4097, 431)):
            head, size = head_of(n_bytes), -(-n_bytes // n_pieces)
            with raw(server) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for at in range(0, n_bytes, size):
                    connection.sendall(head[at : at + size])
                assert connection.recv(65536).startswith(b"HTTP/1.1 %d " % status)


def test_a_head_after_a_body_has_the_full_limit() -> None:
    """The preceding body, in the same packet, does not count towards the head."""
    body = b'{"prompt": "a"}' + b" " * 3000
    post = post_head("/tokenize", f"Content-Length: {len(body)}") + body
    with limited(max_header_bytes=1024) as server, raw(server, post * 3, head_of(1000), LAST) as connection:
        assert received(connection).count(b"HTTP/1.1 200 OK\r\n") == 5


def test_too_many_headers() -> None:
    with limited() as server:
        for n, status in ((255, 200), (256, 431)):  # with Host
            with raw(server, GET[:-2], *repeat(b"a:\r\n", n), b"\r\n") as connection:
                assert connection.recv(65536).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("second", [b"Host: there", b"hOsT: here"])
def test_two_host_headers(second: bytes) -> None:
    with limited() as server, raw(server, GET[:-2], second, b"\r\n\r\n") as connection:
        status, message = refused(received(connection))
        assert (status, message) == (400, "the request has two Host headers; send one")


def test_trailers_are_not_headers() -> None:
    """Trailers arrive after the headers were processed, and must not change them."""
    body = b'f\r\n{"prompt": "a"}\r\n0\r\nX-Request-Id: trailing\r\n\r\n'
    with limited() as server, raw(server, CHUNKED, body, LAST) as connection:
        answer = received(connection)
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert b"trailing" not in answer


@pytest.mark.parametrize("seed", range(8))
def test_a_malformed_request(seed: int) -> None:
    with limited() as server, raw(server, random.Random(seed).randbytes(1024)) as connection:
        assert refused(received(connection)) == (400, "the request is malformed; HTTP/1.1 is spoken here")


def test_a_body_that_becomes_malformed() -> None:
    with limited() as server, raw(server, CHUNKED, b"1\r\n{\r\nwhat?\r\n") as connection:
        assert refused(received(connection))[0] == 400


def test_refusals_are_counted() -> None:
    with limited(header_timeout=0.5) as server:
        for begin in (b"garbage\r\n\r\n", head_of(40_000), b"GET / HTTP/1.1\r\n"):
            with raw(server, begin) as connection:
                refused(received(connection))
        with httpx2.Client(base_url=server.url, timeout=SOON) as client:
            figures = client.get("/metrics").text
    for status in (400, 431, 408):
        assert f'{{method="other",path="other",status="{status}"}} 1.0' in figures


# Seconds


@pytest.mark.parametrize("begin", [b"", GET], ids=["first", "second"])
@pytest.mark.parametrize("part", [b"", b"a"], ids=["silent", "dripping"])
def test_a_head_that_takes_too_long(begin: bytes, part: bytes) -> None:
    start = time.monotonic()
    with limited(header_timeout=0.3) as server, raw(server, begin) as connection:
        if begin:
            received_until(connection, b'"}')
        connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert drip(connection, part, start) > 0.29
        assert refused(received(connection)) == (
            408,
            "the headers were not complete after 0.3 seconds (orca serve --header-timeout)",
        )


@pytest.mark.parametrize("part", [b"", b"\r\n"], ids=["silent", "empty lines"])
def test_a_connection_without_a_request(part: bytes) -> None:
    start = time.monotonic()
    with limited(header_timeout=0.3) as server, raw(server) as connection:
        assert drip(connection, part, start) > 0.29
        assert received(connection) == b""


def test_a_connection_that_is_idle_after_a_request() -> None:
    start = time.monotonic()
    with limited(keep_alive_timeout=0.4, header_timeout=SOON) as server, raw(server, GET) as connection:
        assert b"connection: close" not in received_until(connection, b'"}')
        assert drip(connection, b"", start) > 0.39
        assert received(connection) == b""


def test_a_connection_that_is_idle_after_an_unread_body() -> None:
    """The response completes before the body, so the keep-alive timeout starts when the body ends."""
    body = b" " * 5000
    head = post_head("/tokenize", f"Content-Length: {len(body)}")
    limits = {"keep_alive_timeout": 0.4, "max_body_bytes": 1024, "body_timeout": SOON}
    start = time.monotonic()
    with limited(**limits) as server, raw(server, head) as connection:
        assert received_until(connection, b"}}").startswith(b"HTTP/1.1 413 ")
        connection.sendall(body)
        assert drip(connection, b"", start) > 0.39
        assert received(connection) == b""


def test_a_client_that_keeps_sending_after_413_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_CUT_SECONDS", 0.2)
    head = post_head("/tokenize", "Content-Length: 1000000")
    start = time.monotonic()
    with limited(body_timeout=0.2, max_body_bytes=1024) as server, raw(server, head) as connection:
        assert received_until(connection, b"}}").startswith(b"HTTP/1.1 413 ")
        assert drip(connection, b" ", start) > 0.39
        assert received(connection) == b""


def test_a_body_that_nobody_reads_is_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    n_pauses = 0
    read_on = connection_module.Connection._read_on

    def counted(connection: connection_module.Connection) -> None:
        nonlocal n_pauses
        assert connection.flow.read_paused
        n_pauses += 1
        read_on(connection)

    monkeypatch.setattr(connection_module.Connection, "_read_on", counted)
    n_bytes = 4 << 20
    head = post_head("/tokenize", f"Content-Length: {n_bytes}")
    with limited(max_body_bytes=1024) as server, raw(server, head) as connection:
        assert received_until(connection, b"}}").startswith(b"HTTP/1.1 413 ")
        connection.sendall(b" " * n_bytes + LAST)
        assert received(connection).startswith(b"HTTP/1.1 200 ")
    assert n_pauses >= n_bytes // (512 << 10)  # both event loops read 256 KiB at once


def test_a_body_that_waits_for_a_stream_does_not_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is paused meanwhile, so the client cannot send."""
    monkeypatch.setattr(connection_module, "_CUT_SECONDS", 0.0)
    body = b'{"prompt": "a"}'
    post = post_head("/tokenize", f"Content-Length: {len(body)}")
    with limited(seconds=0.01, body_timeout=0.5) as server, raw(server, stream_of(60), post) as connection:
        received_until(connection, b"[DONE]")
        connection.sendall(body + LAST)
        assert b"HTTP/1.1 200 OK\r\n" in received(connection)


# Pipelined requests


def stream_of(n_tokens: int) -> bytes:
    body = json.dumps({"prompt": "a", "max_tokens": n_tokens, "ignore_eos": True, "stream": True}).encode()
    return post_head("/v1/completions", f"Content-Length: {len(body)}") + body


def test_pipelined_requests_are_answered_in_order() -> None:
    gets = [f"GET /version HTTP/1.1\r\nHost: here\r\nX-Request-Id: id-{i}-\r\n\r\n" for i in range(16)]
    with limited() as server, raw(server, "".join(gets).encode() + LAST) as connection:
        answer = received(connection)
    places = [answer.index(f"x-request-id: id-{i}-".encode()) for i in range(16)]
    assert places == sorted(places)


def test_the_number_of_pipelined_requests_is_limited() -> None:
    """The accepted requests are answered, then the connection closes; the client must retry the rest."""
    with limited() as server, raw(server, GET * 10_000) as connection:
        answer = received(connection)
        assert answer.count(b"HTTP/1.1 200 OK\r\n") == 17
        assert answer.count(b"connection: close") == 1
        with raw(server, GET) as other:
            assert other.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("bad", [b"garbage\r\n\r\n", head_of(500_000), b"GET / HT"])
def test_malformed_data_after_a_stream_request_does_not_break_the_stream(bad: bytes) -> None:
    limits = {"seconds": 0.01, "header_timeout": 0.4}
    with limited(**limits) as server, raw(server, stream_of(60), bad) as connection:
        answer = received(connection)
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.rstrip().endswith(b"data: [DONE]\n\n\r\n0")


def test_a_stray_line_after_a_stream_request_does_not_end_the_stream() -> None:
    limits = {"seconds": 0.01, "header_timeout": 0.4}
    with limited(**limits) as server, raw(server, stream_of(60)) as connection:
        received_until(connection, b"data: ")
        connection.sendall(b"\r\n")
        received_until(connection, b"[DONE]")


def test_a_client_that_leaves_with_a_pipelined_request_ends_the_running_one() -> None:
    with limited(seconds=0.02) as server:
        with raw(server, stream_of(500), GET) as connection:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")
            until(lambda: server.gateway.n_live == 1, "the stream")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset
        until(server.at_rest, "the end of the stream")
        (record,) = server.service.timeline.requests
        assert record.finish_reason is FinishReason.CANCELLED


def test_a_protocol_upgrade_is_ignored() -> None:
    offer = GET[:-2] + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n"
    with limited() as server, raw(server, offer + LAST) as connection:
        assert received(connection).count(b"HTTP/1.1 200 OK\r\n") == 2


def test_a_rejected_client_can_read_the_error() -> None:
    """However much the client has sent, it sees an orderly close, not a reset that could discard data."""
    with limited() as server:
        for _ in range(5):
            with raw(server, head_of(500_000)) as connection:
                answer = received_until(connection, b"}}")
                assert connection.recv(1) == b""
                assert refused(answer)[0] == 431


def test_errors_and_later_requests_still_work() -> None:
    with limited() as server, httpx2.Client(base_url=server.url, timeout=SOON, headers=JSON) as client:
        for _ in range(3):
            assert error_of(client.post("/tokenize", content=b"{"))["code"] is None
            assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200
