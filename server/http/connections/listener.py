"""Where HTTP connections come in: accepted, counted, refused over the limits, and only then given to uvicorn.

They are accepted here rather than by the event loop because a connection must count from its first moment.
The loop hands a TLS connection over when its handshake is done, and thousands could wait in handshakes
uncounted.
"""

import asyncio
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable
from functools import partial

from server.errors import TooManyConnections, TooManyFromAddress
from server.http.bodies.errors import error_response
from server.http.connections.open_connections import OpenConnections, Place
from server.http.connections.refusal import whole_answer
from server.http.connections.turns import Turns

_LOGGER = logging.getLogger("orca.http")

_BACKLOG = 2048
_AT_ONCE = 8  # connections accepted before the loop does something else: 64 took it 60 ms
_PAUSE_SECONDS = 0.2  # when the system has no descriptor left: until it is asked again
_RETRY_SECONDS = 1  # what a refused client is told
_LEAVING_SECONDS = 1.0  # for a refused client to read why
_MOST_LEAVING = 64
_SHUTDOWN_SECONDS = 5.0  # for a TLS client to agree to the end
_TOLD_SECONDS = 60.0  # between two lines of log that say the same


class Listener:
    """Accepts on a bound socket, on the running loop, from its making until `close`.

    `make` is called for each connection and returns its protocol, which releases the place that it was given
    when the connection is lost. `refused` is called with the status of each connection that was refused.
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
        self._told: dict[str, float] = {}
        bound.setblocking(False)
        bound.listen(_BACKLOG)
        self._loop.add_reader(bound.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more. Connections that are open stay so, except those whose TLS handshake is not done."""
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
            except OSError as error:  # no descriptor, no memory: the next clients wait in the backlog
                self._tell(f"no connection can be accepted: {error.strerror}")
                self._loop.remove_reader(self._socket.fileno())
                self._pause = self._loop.call_later(_PAUSE_SECONDS, self._resume)
                return
            connection.setblocking(False)
            self._admit(connection, address[0])

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def _admit(self, connection: socket.socket, host: str) -> None:
        try:
            place = self._connections.take(host)
        except (TooManyConnections, TooManyFromAddress) as full:
            self._turn_away(connection, full)
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

    def _turn_away(self, connection: socket.socket, full: TooManyConnections | TooManyFromAddress) -> None:
        """Say why and close. Over TLS only close: a handshake would cost more than the connection itself."""
        response = error_response(full, retry_after=_RETRY_SECONDS)
        self._refused(response.status_code)
        self._tell("a connection limit is reached (--max-connections, --max-connections-per-address)")
        if self._tls is not None:
            connection.close()
            return
        try:
            connection.send(whole_answer(response))
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            connection.close()
            return
        # Closed at once, its own request would meet a reset, and the answer may be lost with it.
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

    def _tell(self, what: str) -> None:
        """A line of log, seldom enough that nobody can fill a disk with it."""
        now = self._loop.time()
        if now - self._told.get(what, -_TOLD_SECONDS) >= _TOLD_SECONDS:
            self._told[what] = now
            _LOGGER.warning("%s", what)
