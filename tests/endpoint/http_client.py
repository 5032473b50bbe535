"""HTTP access to a harness server: a client, raw connections, and a check of error bodies."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from server.commands import endpoints
from server.process.addresses import bound_socket
from tests.endpoint.harness import Server
from tests.host.engines import SOON

JSON = {"Content-Type": "application/json"}


@contextmanager
def connected(server: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=SOON, headers={"Connection": "close"}) as client:
        yield client


@contextmanager
def raw(server: Server, *parts: bytes) -> Iterator[socket.socket]:
    """A raw connection on which `parts` have been sent."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port or 0), timeout=SOON) as connection:
        connection.sendall(b"".join(parts))
        yield connection


@contextmanager
def unread(server: Server, *parts: bytes) -> Iterator[socket.socket]:
    """A raw connection on which `parts` have been sent, with a small receive buffer."""
    address = urlsplit(server.url)
    with socket.socket() as connection:
        connection.settimeout(SOON)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((address.hostname, address.port))
        connection.sendall(b"".join(parts))
        yield connection


def small_send_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the next server small send buffers too: the system's default holds megabytes."""

    def small(host: str, port: int, *, flag: str) -> socket.socket:
        bound = bound_socket(host, port, flag=flag)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return bound

    monkeypatch.setattr(endpoints, "bound_socket", small)


def status_line(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as lines:
        return lines.readline().rstrip()


def received(connection: socket.socket) -> bytes:
    """All data until the connection ends or is reset: a closing server may not have read everything."""
    parts: list[bytes] = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def received_until(connection: socket.socket, end: bytes) -> bytes:
    """All data up to `end`."""
    answer = b""
    while end not in answer:
        part = connection.recv(65536)
        assert part, f"the connection was closed before {end!r}"
        answer += part
    return answer


def post_head(path: str, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: here", "Content-Type: application/json", *headers, "", ""]
    return "\r\n".join(lines).encode()


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """The error object, after checking its form."""
    assert response.headers["content-type"] == "application/json"
    (name, error), *others = response.json().items()
    assert (name, others) == ("error", [])
    assert list(error) == ["message", "type", "param", "code"]
    return error
