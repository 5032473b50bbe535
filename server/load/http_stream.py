"""HTTP/1.1 for the load client: one request at a time on each connection, answers handed on as they arrive.

Of 256 streams 256 small pieces arrive in every iteration of the server. A client that hands each to a task,
which waits for the next one, spends more on waking tasks than on reading. Here the event loop calls the
parser and the parser calls the answer's reader, so that a task runs once for a whole answer.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

_IDLE_SECONDS = 3.0  # servers close connections that rest for five seconds


class Reader(Protocol):
    """The reader of one answer. A ValueError that it raises ends the answer."""

    def begin(self, status: int) -> None:
        """The answer's head has arrived."""
        ...

    def take(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        ...


class Connections:
    """The connections of one process to one server, each used again for a later request."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._host, self._path = parts.hostname or "", parts.path
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        lines = [
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "Accept-Encoding: identity",
            "Content-Type: application/json",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        self._headers = "\r\n".join(lines)
        self._idle: list[tuple[_Connection, float]] = []

    async def post(self, path: str, body: bytes, reader: Reader) -> None:
        """Send a request, and hand its answer to `reader`.

        Raises OSError if the server cannot be reached or ends the connection early, and ValueError for an
        answer that is not HTTP or that the reader refuses. A cancelled call closes its connection.
        """
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._headers}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection = self._rested() or await self._connected()
        try:
            await connection.exchange(head.encode("latin-1") + body, reader)
        except BaseException:
            connection.close()
            raise
        if connection.is_reusable:
            self._idle.append((connection, time.monotonic()))
        else:
            connection.close()

    def close(self) -> None:
        """Close the connections that rest."""
        while self._idle:
            self._idle.pop()[0].close()

    def _rested(self) -> "_Connection | None":
        while self._idle:
            connection, since = self._idle.pop()
            if connection.is_reusable and time.monotonic() - since < _IDLE_SECONDS:
                return connection
            connection.close()
        return None

    async def _connected(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        return connection


@dataclass(slots=True)
class _Exchange:
    """The answer that a connection waits for. Its body is delimited if the head says where it ends."""

    reader: Reader
    done: asyncio.Future[None]
    has_head: bool = False
    is_delimited: bool = False


class _Connection(asyncio.Protocol):
    """A connection, which is its parser's protocol as well."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._feed: Callable[[bytes], None] = self._parser.feed_data
        self._exchange: _Exchange | None = None
        self.is_reusable = True

    async def exchange(self, request: bytes, reader: Reader) -> None:
        assert self._transport is not None and self._exchange is None
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._exchange = _Exchange(reader, done)
        self._transport.write(request)
        await done

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            raised = error.__context__  # by the reader, in one of the calls below
            self._end(raised if isinstance(raised, ValueError) else ValueError(f"not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        exchange = self._exchange
        if exchange is not None and exchange.has_head and not exchange.is_delimited and exc is None:
            self._end(None)  # such a body lasts until the connection ends
        else:
            self._end(exc or ConnectionError("the server closed the connection before the answer ended"))

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self._exchange
        if exchange is not None and name.lower() in (b"content-length", b"transfer-encoding"):
            exchange.is_delimited = True

    def on_headers_complete(self) -> None:
        status, exchange = self._parser.get_status_code(), self._exchange
        if exchange is not None and status >= 200:
            exchange.has_head = True
            exchange.reader.begin(status)

    def on_body(self, data: bytes) -> None:
        if self._exchange is not None:
            self._exchange.reader.take(data)

    def on_message_complete(self) -> None:
        if self._exchange is not None and self._exchange.has_head:  # and not an interim answer, as 103 is
            self.is_reusable = self.is_reusable and self._parser.should_keep_alive()
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        exchange, self._exchange = self._exchange, None
        if error is not None:
            self.is_reusable = False
        if exchange is None or exchange.done.done():
            return
        if error is None:
            exchange.done.set_result(None)
        else:
            exchange.done.set_exception(error)
