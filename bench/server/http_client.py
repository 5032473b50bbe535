"""Just enough HTTP/1.1 to read a stream of server-sent events: one request on one connection."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self


def post(host: str, port: int, path: str, body: object, *, keep_alive: bool = False) -> bytes:
    """A POST of `body`, as JSON unless it is bytes.

    The server closes the connection after the answer, unless `keep_alive`.
    """
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: {'keep-alive' if keep_alive else 'close'}\r\n\r\n"
    )
    return head.encode() + content


def get(host: str, port: int, path: str) -> bytes:
    """A GET; the server closes the connection after the answer."""
    return f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()


def status_of(answer: bytes) -> int:
    """The status of an answer, of which at least the head was read."""
    return int(answer.split(b" ", 2)[1])


def body_of(answer: bytes) -> bytes:
    """The decoded body of a complete chunked answer. Raises ValueError if it is cut off."""
    head, end, rest = answer.partition(b"\r\n\r\n")
    if not end:
        raise ValueError("the answer ended in its head")
    if b"\r\ntransfer-encoding: chunked" not in head.lower():
        return rest
    body = bytearray()
    while True:
        size, end, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if not end or len(rest) < length + 2:
            raise ValueError("the answer ended in a chunk")
        if length == 0:
            return bytes(body)
        body += rest[:length]
        rest = rest[length + 2 :]


def events_of(body: bytes) -> list[str]:
    """The data of each server-sent event. Raises ValueError if the last one is cut off."""
    *blocks, last = body.decode().split("\n\n")
    if last:
        raise ValueError(f"the stream ended in an event: {last[:200]!r}")
    return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]


class Exchange:
    """One request on its own connection, and its answer as it arrives; an async context manager.

    Leaving the context closes the connection, even if the answer is not complete. `receive_buffer` limits the
    bytes that the system and this class read ahead, so that a slow reader is really slow.
    """

    def __init__(self, host: str, port: int, request: bytes, *, receive_buffer: int | None = None) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._address = (host, port)
        self._request = request
        self._receive_buffer = receive_buffer

    async def __aenter__(self) -> Self:
        connection = socket.socket()
        connection.setblocking(False)
        try:
            if self._receive_buffer is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
            await asyncio.get_running_loop().sock_connect(connection, self._address)
            limit = self._receive_buffer or 1 << 16
            self._reader, self._writer = await asyncio.open_connection(sock=connection, limit=limit)
        except BaseException:
            connection.close()
            raise
        self._writer.write(self._request)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.transport.abort()

    async def head(self) -> None:
        """Read `status` and `headers`."""
        status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        self.status = int(status.split(" ")[1])
        pairs = (line.partition(":") for line in lines if line)
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body's chunks; raises asyncio.IncompleteReadError if the connection ends before they do."""
        if self.headers.get("transfer-encoding") != "chunked":
            yield await self._reader.readexactly(int(self.headers["content-length"]))
            return
        while length := int(await self._reader.readuntil(b"\r\n"), 16):
            yield (await self._reader.readexactly(length + 2))[:-2]
        await self._reader.readexactly(2)

    async def body(self) -> bytes:
        """The rest of the body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def json(self) -> Any:
        """The rest of the body, as JSON."""
        return json.loads(await self.body())

    async def sip(self, n_bytes: int) -> bytes:
        """Up to `n_bytes` of raw data; empty at the end."""
        return await self._reader.read(n_bytes)
