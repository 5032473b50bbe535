"""Accepts HTTP connections, enforces the connection limits, and hands connections to uvicorn's protocol.

Connections are accepted here, not by asyncio's server, so that each counts from its first moment. Asyncio
hands a TLS connection over only after its handshake, so thousands could wait in handshakes uncounted.
"""

import asyncio
import logging
import socket
import ssl
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from functools import partial

from fastapi import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from server.errors import TooManyConnections, TooManyFromAddress
from server.http.bodies.errors import error_response
from server.process.addresses import network_of

_STARTED_AT_ONCE = 4  # pieces started per turn of the loop; starting a request takes up to 1 ms


class Turns:
    """Starts at most `at_once` pieces of work in each turn of one event loop, round-robin over networks.

    A thousand connections or requests that arrive together would block the event loop for a second if each
    started immediately. So another client waits for a few, not for a thousand.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, at_once: int = _STARTED_AT_ONCE) -> None:
        self._loop = loop
        self._most = self._room = at_once
        self._waiting: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()  # the next network first
        self._is_scheduled = False

    def begin(self, network: str, work: Callable[[], None]) -> None:
        """Call `work` now if this turn has room and nothing waits, else when it is this network's turn.

        Work of one network runs in order. `work` must not raise.
        """
        if self._room and not self._waiting:
            self._room -= 1
            self._schedule()
            work()
            return
        self._waiting.setdefault(network, deque()).append(work)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        self._room = self._most
        while self._room and self._waiting:
            network, own = self._waiting.popitem(last=False)
            work = own.popleft()
            if own:
                self._waiting[network] = own  # after the others
            self._room -= 1
            work()
        if self._waiting:
            self._schedule()


def response_bytes(response: Response) -> bytes:
    """The response as bytes, with a `Connection: close` header."""
    headers = [*response.raw_headers, (b"connection", b"close")]
    lines = [name + b": " + value + b"\r\n" for name, value in headers]
    return b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n", bytes(response.body)])


class OpenConnections:
    """The count of one server's connections. Not thread-safe."""

    def __init__(self, *, most: int, most_per_address: int) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._n = 0
        self._of_network = Counter[str]()

    def take(self, host: str) -> "Place":
        """Count one more connection from this address.

        Raises TooManyFromAddress or TooManyConnections without counting it.
        """
        network = network_of(host)
        if self._of_network[network] >= self._most_per_address:
            raise TooManyFromAddress(
                f"your address has {self._most_per_address} connections open, as many as it may have; reuse "
                "connections or close some (orca serve --max-connections-per-address)"
            )
        if self._n >= self._most:
            raise TooManyConnections(
                f"the server has {self._most} connections open, as many as it takes; try again later "
                "(orca serve --max-connections)"
            )
        self._n += 1
        self._of_network[network] += 1
        return Place(self, network)

    def release(self, network: str) -> None:
        """Stop counting one connection from this network."""
        self._n -= 1
        self._of_network[network] -= 1
        if not self._of_network[network]:
            del self._of_network[network]  # otherwise the table would grow with every address ever seen


class Place:
    """One connection's entry in the count, until `release`, which may be called more than once."""

    __slots__ = ("_connections", "_held", "network")

    def __init__(self, connections: OpenConnections, network: str) -> None:
        self.network = network  # of the client's address
        self._connections = connections
        self._held = True

    def release(self) -> None:
        if self._held:
            self._held = False
            self._connections.release(self.network)


_LOGGER = logging.getLogger("orca.http")

BACKLOG = 2048
_AT_ONCE = 8  # connections accepted before the event loop does other work: 64 took 60 ms
_PAUSE_SECONDS = 0.2  # before the next attempt when the system is out of file descriptors
_RETRY_SECONDS = 1  # the Retry-After of a refused client
_LEAVING_SECONDS = 1.0  # for a refused client to read the error
_MOST_LEAVING = 64
_SHUTDOWN_SECONDS = 5.0  # for a TLS client to complete the closing handshake
_LOG_SECONDS = 60.0  # between two identical log lines


class Listener:
    """Accepts connections on a bound socket, on the running event loop, from construction until `close`.

    `make` is called for each connection and returns its protocol, which must release its place when the
    connection is lost. `refused` is called with the HTTP status of each refused connection.
    """

    def __init__(
        self,
        bound: socket.socket,
        make: Callable[[Place], asyncio.Protocol],
        connections: OpenConnections,
        turns: Turns,
        *,
        tls: ssl.SSLContext | None,
        handshake_timeout: float,
        refused: Callable[[int], None],
    ) -> None:
        self._socket = bound
        self._make = make
        self._connections = connections
        self._turns = turns
        self._is_closed = False
        self._tls = tls
        self._handshake_timeout = handshake_timeout
        self._refused = refused
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._leaving: deque[tuple[float, socket.socket]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._logged: dict[str, float] = {}
        bound.setblocking(False)
        bound.listen(BACKLOG)
        self._loop.add_reader(bound.fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting. Open connections stay open, except those still in their TLS handshake."""
        self._is_closed = True
        self._loop.remove_reader(self._socket.fileno())
        for timer in (self._timer, self._pause):
            if timer is not None:
                timer.cancel()
        for task in self._opening:
            task.cancel()
        while self._leaving:
            self._leaving.popleft()[1].close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, address = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # out of file descriptors or memory: new clients wait in the backlog
                self._log(f"no connection can be accepted: {error.strerror}")
                self._loop.remove_reader(self._socket.fileno())
                self._pause = self._loop.call_later(_PAUSE_SECONDS, self._resume)
                return
            connection.setblocking(False)
            self._admit(connection, address[0] if address else "")  # a Unix socket has none

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def _admit(self, connection: socket.socket, host: str) -> None:
        try:
            place = self._connections.take(host)
        except (TooManyConnections, TooManyFromAddress) as full:
            self._refuse(connection, full)
            return
        self._turns.begin(place.network, partial(self._begin, connection, place))

    def _begin(self, connection: socket.socket, place: Place) -> None:
        if self._is_closed:
            place.release()
            connection.close()
            return
        task = self._loop.create_task(self._open(connection, place), name="connection")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket, place: Place) -> None:
        seconds = {}
        if self._tls is not None:
            seconds = {
                "ssl_handshake_timeout": self._handshake_timeout,
                "ssl_shutdown_timeout": _SHUTDOWN_SECONDS,
            }
        try:
            await self._loop.connect_accepted_socket(
                partial(self._make, place), connection, ssl=self._tls, **seconds
            )
        except OSError:  # the handshake failed or took too long
            place.release()
            connection.close()
        except BaseException:
            place.release()
            connection.close()
            raise

    def _refuse(self, connection: socket.socket, full: TooManyConnections | TooManyFromAddress) -> None:
        """Send the error and close. Over TLS only close: a handshake would cost more than the connection."""
        response = error_response(full, retry_after=_RETRY_SECONDS)
        self._refused(response.status_code)
        self._log("a connection limit is reached (--max-connections, --max-connections-per-address)")
        if self._tls is not None:
            connection.close()
            return
        try:
            connection.send(response_bytes(response))
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            connection.close()
            return
        # If the connection closed at once, the client's request would cause a TCP reset, which may discard
        # the response before the client reads it.
        self._leaving.append((self._loop.time() + _LEAVING_SECONDS, connection))
        if len(self._leaving) > _MOST_LEAVING:
            self._leaving.popleft()[1].close()
        if self._timer is None:
            self._timer = self._loop.call_later(_LEAVING_SECONDS, self._close_left)

    def _close_left(self) -> None:
        now = self._loop.time()
        while self._leaving and self._leaving[0][0] <= now:
            self._leaving.popleft()[1].close()
        self._timer = None
        if self._leaving:
            self._timer = self._loop.call_at(self._leaving[0][0], self._close_left)

    def _log(self, message: str) -> None:
        """Log a warning, at most once a minute per message, so that clients cannot fill the disk."""
        now = self._loop.time()
        if now - self._logged.get(message, -_LOG_SECONDS) >= _LOG_SECONDS:
            self._logged[message] = now
            _LOGGER.warning("%s", message)
