"""Attacks by connections: many, slow, endless, or incomplete."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

from bench.hostile.target import ADDRESS, COMPLETIONS, Streams, Target
from bench.server.http_client import get

_DRIP_SECONDS = 0.2
_MOST_SENT = 200 << 20  # bytes sent on one endless connection
_LINES = b"X-Line: " + b"a" * 8000 + b"\r\n"


async def _held(target: Target, n: int, use: Callable[[Streams], Awaitable[None]]) -> None:
    """Open `n` connections and `use` each; record the server's answer, or that there is none."""

    async def client() -> None:
        try:
            async with target.connection() as streams:
                await use(streams)
                async with asyncio.timeout(target.left):
                    await target.note_answer(streams[0])
        except TimeoutError:
            target.answers.note("left open")
        except OSError as error:
            target.note_error(error)

    await asyncio.gather(*(client() for _ in range(n)))


async def _send_for_ever(target: Target, streams: Streams, piece: bytes) -> None:
    """Write until the server answers or closes or the time is over, buffering no more than the system."""
    reader, writer = streams
    n_sent = 0
    while target.left and n_sent < _MOST_SENT and not reader.at_eof():
        writer.write(piece)
        n_sent += len(piece)
        target.answers.n_bytes += len(piece)
        try:
            async with asyncio.timeout(target.left):
                await writer.drain()
        except TimeoutError:
            return
        await asyncio.sleep(0)


async def endless_headers(target: Target) -> None:
    """Endless header lines: long ones, short ones, and one that never ends."""
    kinds = iter((_LINES * 8, b"a:\r\n" * 16_000, b"a" * 65_536, _LINES * 8))

    async def use(streams: Streams) -> None:
        piece = next(kinds)
        streams[1].write(b"GET /health HTTP/1.1\r\nHost: here\r\n")
        await _send_for_ever(target, streams, piece)

    await _held(target, 4, use)


async def half_sent_headers(target: Target) -> None:
    """300 connections whose headers stop in the middle, with another byte now and then."""

    async def use(streams: Streams) -> None:
        streams[1].write(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nX-Slow: ")
        await _drip(target, streams)

    await _held(target, 300, use)


async def idle_connections(target: Target) -> None:
    """300 connections without any request, or with one and then nothing."""
    request = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
    numbers = iter(range(300))

    async def use(streams: Streams) -> None:
        if next(numbers) % 2:
            streams[1].write(request)

    await _held(target, 300, use)


async def dripping_bodies(target: Target) -> None:
    """100 bodies that arrive a byte at a time."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        b'Content-Length: 4000000\r\n\r\n{"prompt":"'
    )

    async def use(streams: Streams) -> None:
        streams[1].write(head)
        await _drip(target, streams)

    await _held(target, 100, use)


async def _drip(target: Target, streams: Streams) -> None:
    reader, writer = streams
    while target.left and not reader.at_eof():
        writer.write(b"a")
        await asyncio.sleep(min(_DRIP_SECONDS, target.left))


async def bodies_after_413(target: Target) -> None:
    """Bodies of a gigabyte, sent whatever the server answers."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        b"Content-Length: 1000000000\r\n\r\n"
    )

    async def use(streams: Streams) -> None:
        streams[1].write(head)
        await _send_for_ever(target, streams, b"a" * 65_536)

    await _held(target, 4, use)


async def many_connections(target: Target) -> None:
    """1,000 connections at once, a request on each, all kept open."""
    request = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"

    async def use(streams: Streams) -> None:
        streams[1].write(request)

    await _held(target, 1000, use)


async def short_connections(target: Target) -> None:
    """Connections opened and closed as fast as possible, some with garbage."""
    rubbish = (b"", b"\x16\x03\x01\x02\x00\x01\x00", b"GET", b"\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    numbers = iter(range(1 << 62))

    async def client() -> None:
        number = next(numbers)
        try:
            async with target.connection() as (_, writer):
                writer.write(rubbish[number % len(rubbish)])
                writer.write(os.urandom(100) if number % 7 == 0 else b"")
                target.answers.note("opened")
        except OSError as error:
            target.note_error(error)

    await target.repeat(8, client)


async def pipelining(target: Target) -> None:
    """Thousands of requests on a connection before the first answer is read."""
    gets = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n" * 5_000
    body = b'{"prompt":"a","max_tokens":200,"n":4}'
    posts = (
        b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    ) * 1_000
    kinds = iter((gets, posts) * 8)

    async def use(streams: Streams) -> None:
        streams[1].write(next(kinds))

    await _held(target, 16, use)


async def slow_readers(target: Target) -> None:
    """64 long streams whose clients read nothing."""
    body = {"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True, "logprobs": 20}
    request = target.post(COMPLETIONS, body)

    async def client() -> None:
        connection = socket.socket()
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.bind((ADDRESS, 0))
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(target.left):
                await loop.sock_connect(connection, (target.host, target.port))
                await loop.sock_sendall(connection, request)
                head = await loop.sock_recv(connection, 16)
            target.answers.note(head.split(b" ")[1].decode() if b" " in head else "closed without an answer")
            await asyncio.sleep(target.left)
        except TimeoutError:
            target.answers.note("no answer")
        except OSError as error:
            target.note_error(error)
        finally:
            connection.close()

    await asyncio.gather(*(client() for _ in range(64)))


async def metrics_hammered(target: Target) -> None:
    """/metrics in a loop, on four connections at once."""
    await target.flood(4, [get(target.host, target.port, "/metrics")])


ATTACKS = (
    endless_headers,
    half_sent_headers,
    idle_connections,
    dripping_bodies,
    bodies_after_413,
    many_connections,
    short_connections,
    pipelining,
    slow_readers,
    metrics_hammered,
)
