"""One HTTP/1.1 request to a server and its response as it arrives, on a connection of its own."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Mapping
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from server.errors import UsageError

_MOST_HEAD = 1 << 16  # bytes
_PIECE = 1 << 16


class Address(NamedTuple):
    """A server's address; `prefix` goes before each path."""

    host: str
    port: int
    tls: bool
    prefix: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"


def address(url: str) -> Address:
    """Parse "http://host:port", with or without /v1. Raises UsageError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(f"the address is {url!r}; it must have the form http://host:port")
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Address(parts.hostname, port or (443 if tls else 80), tls, prefix)


class Upstream:
    """An async context manager: sends a request, and reads the response's head. Leaving it disconnects.

    Raises OSError, EOFError or ValueError if there is no whole response, and TimeoutError if a wait takes
    longer than `seconds`.
    """

    def __init__(
        self,
        at: Address,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        body: bytes = b"",
        seconds: float,
    ) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._at, self._seconds = at, seconds
        host = f"{at.host}:{at.port}"
        fixed = {"Host": host, "Content-Length": str(len(body)), "Connection": "close"}
        lines = [f"{name}: {value}" for name, value in (dict(headers) | fixed).items()]
        head = "\r\n".join([f"{method} {at.prefix}{path} HTTP/1.1", *lines, "", ""])
        self._request = head.encode("latin-1") + body

    async def __aenter__(self) -> Self:
        async with asyncio.timeout(self._seconds):
            self._reader, self._writer = await asyncio.open_connection(
                self._at.host,
                self._at.port,
                ssl=ssl.create_default_context() if self._at.tls else None,
                limit=_MOST_HEAD,
            )
            try:
                self._writer.write(self._request)
                await self._writer.drain()
                await self._read_head()
            except BaseException:
                self._writer.transport.abort()
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.transport.abort()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body's pieces as they arrive."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while length := int(await self._within(self._reader.readuntil(b"\r\n")), 16):
                while length:
                    piece = await self._within(self._reader.read(min(length, _PIECE)))
                    if not piece:
                        raise EOFError("the response ended in a chunk")
                    length -= len(piece)
                    yield piece
                await self._within(self._reader.readexactly(2))
            return
        left = int(self.headers.get("content-length", 0))
        while left:
            piece = await self._within(self._reader.read(min(left, _PIECE)))
            if not piece:
                raise EOFError("the response ended early")
            left -= len(piece)
            yield piece

    async def body(self, most: int) -> bytes:
        """The whole body. Raises ValueError if it has more than `most` bytes."""
        found = bytearray()
        async for piece in self.pieces():
            found += piece
            if len(found) > most:
                raise ValueError(f"the response has more than {most} bytes")
        return bytes(found)

    async def _read_head(self) -> None:
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError as error:
            raise ValueError("the response's head is too long") from error
        status, *lines = head.decode("latin-1").split("\r\n")
        parts = status.split(" ")
        if len(parts) < 2 or not parts[0].startswith("HTTP/1."):
            raise ValueError(f"this is no HTTP response: {status[:80]!r}")
        self.status = int(parts[1])
        pairs = (line.partition(":") for line in lines if line)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}

    async def _within(self, reading: Awaitable[bytes]) -> bytes:
        async with asyncio.timeout(self._seconds):
            return await reading
