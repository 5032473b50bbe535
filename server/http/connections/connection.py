"""One HTTP connection: uvicorn's protocol with limits that apply before the application runs.

Limits: the bytes of a request's head (request line and headers), the seconds for the head, the seconds for
the body, the seconds between two requests, and the number of pipelined requests that wait for a running one.

Bytes are counted as they arrive, and the parser gets no more than the limit allows, so a head that is too
large is rejected before it is stored. (A head that begins in the middle of a chunk counts from the next chunk
on, so at most twice the limit is ever stored.) One timer serves all timeouts, because at most one of them
runs at a time. It is set only if the received data left something incomplete, which is rare, so an ordinary
request needs no timer.
"""

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.http.bodies.errors import status_response
from server.http.connections.caller import Caller
from server.http.connections.listener import Place, Turns, response_bytes
from server.settings.endpoint_options import EndpointOptions

_MOST_FIELDS = 256  # header fields of a request: each takes more memory than its bytes
_MOST_PIPELINED = 16  # requests that wait for an earlier one on the same connection
_CUT_SECONDS = 5.0  # after a body's deadline; at the deadline the application answers 408 if it still waits
_LINGER_SECONDS = 2.0  # for a rejected client to read the error
_MOST_DROPPED = 1 << 20  # bytes that a rejected client may still send in that time
# A body may arrive as fast as loopback is, and reading it would keep the event loop busy. What nobody waits
# for, since the request has its answer already, is read in pieces with a pause after each.
_UNREAD_PIECE = 1 << 16  # bytes
_UNREAD_PAUSE_SECONDS = 0.005


class _Stage(Enum):
    BETWEEN = auto()  # no byte of the next request has arrived
    HEAD = auto()
    BODY = auto()
    OVER = auto()  # all further data is discarded


class _Stop(Exception):
    """Stops the parser immediately; `_refusal` holds the reason."""


class Connection(HttpToolsProtocol):
    """An HTTP connection that occupies `place` until it is lost, and whose requests start through `turns`.

    `refused` is called with the status, 400, 408 or 431, of each request rejected before the application sees
    it. Their bodies have the same form as all other errors.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        options: EndpointOptions,
        place: Place,
        turns: Turns,
        refused: Callable[[int], None],
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.timeout_keep_alive = options.keep_alive_timeout
        self._options = options
        self._place = place
        self._turns = turns
        self._refused = refused
        self._stage = _Stage.BETWEEN
        self._n_bytes = 0  # received since the last byte of a body or the end of the last request
        self._n_dropped = 0
        self._n_unread = 0  # of the body of an answered request, since the last pause
        self._refusal: tuple[int, str] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None

    # Called by the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self._options.header_timeout, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything and tell the running request; uvicorn tells the request that arrived last."""
        self._place.release()
        self._stop_timer()
        self._unset_keepalive_if_required()
        if self._running is not None and not self._running.response_complete:
            _disconnect(self._running)
        super().connection_lost(exc)
        # asyncio's transport refers to its own method, and only a garbage collection would free the two.
        getattr(self.transport, "__dict__", {}).pop("_read_ready_cb", None)  # uvloop's has neither

    def data_received(self, data: bytes) -> None:
        """Parse the data in chunks that the limits allow."""
        self._unset_keepalive_if_required()
        n_parsed = 0
        while n_parsed < len(data) and self._stage is not _Stage.OVER:
            room = self._options.max_header_bytes - self._n_bytes
            n_parsed += self._feed(data[n_parsed : n_parsed + room])
        if self._stage is _Stage.OVER:
            self._drop(len(data) - n_parsed)
        else:
            self._set_timer()

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._stage = _Stage.HEAD
        super().on_message_begin()
        self.scope.setdefault("state", {})["caller"] = Caller()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Ignores trailers: they arrive after the headers have been processed."""
        if self._stage is _Stage.BODY:
            return
        if len(self.headers) >= _MOST_FIELDS:
            self._refusal = (431, f"the request has more than {_MOST_FIELDS} headers; send fewer")
            raise _Stop
        is_host = len(name) == len(b"host") and name.lower() == b"host"
        if is_host and any(earlier == b"host" for earlier, _ in self.headers):
            # RFC 9112, 3.2: whoever routed this request by one of them may have meant another server.
            self._refusal = (400, "the request has two Host headers; send one")
            raise _Stop
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass the request to the application, unless too many are waiting already."""
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise _Stop
        super().on_headers_complete()
        self._stop_timer()
        self._stage = _Stage.BODY
        self._n_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._n_bytes = 0
        super().on_body(body)
        if self.cycle.response_complete:
            self._leave_unread(len(body))

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._stage = _Stage.BETWEEN
        self._n_bytes = 0
        super().on_message_complete()
        self.scope.get("state", {})["caller"].sent_all()

    # Limits.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._turns.begin(self._place.network, partial(self._run, cycle, app))

    def _run(self, cycle: RequestResponseCycle, app: Any) -> None:
        if not self.transport.is_closing():  # otherwise the client has gone
            super()._start_asgi_task(cycle, app)

    def _feed(self, chunk: bytes) -> int:
        """Feed the parser a chunk no larger than the limit allows; return how many bytes it consumed."""
        assert self.parser is not None
        n = len(chunk)
        self._n_bytes += n
        try:
            self.parser.feed_data(chunk)
        except httptools.HttpParserUpgrade as upgrade:  # an offer of another protocol, which may be ignored
            n = max(upgrade.args[0], 1)
        except httptools.HttpParserError:
            self._refuse(*(self._refusal or (400, "the request is malformed; HTTP/1.1 is spoken here")))
        else:
            if self._n_bytes >= self._options.max_header_bytes:
                most = self._options.max_header_bytes
                self._refuse(431, f"the headers have more than {most} bytes (orca serve --max-header-bytes)")
        return n

    def _set_timer(self) -> None:
        """Set the timeout for whatever the data so far left incomplete."""
        if self._timer is not None or self.transport.is_closing():
            return
        if self._stage is _Stage.BODY:
            self._wait_for_body()
        elif self._stage is _Stage.HEAD or self._n_bytes:
            self._timer = self.loop.call_later(self._options.header_timeout, self._head_is_late)
        elif self._is_idle():
            # Uvicorn sets this when a response is complete; here the request completed after its response.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _wait_for_body(self) -> None:
        seconds = self._options.body_timeout + _CUT_SECONDS
        self._timer = self.loop.call_later(seconds, self._body_is_late)

    def _head_is_late(self) -> None:
        self._timer = None
        if self._stage is _Stage.HEAD:
            seconds = f"{self._options.header_timeout:g} seconds"
            self._refuse(408, f"the headers were not complete after {seconds} (orca serve --header-timeout)")
        elif self._is_idle():  # the client sent empty lines, or nothing
            self.transport.close()

    def _body_is_late(self) -> None:
        """By now the application has answered or does not need the body."""
        self._timer = None
        if self.pipeline or (self.flow.read_paused and not self.cycle.response_complete):
            # An earlier request is still running, or this one reads no further: not the client's fault.
            self._wait_for_body()
        else:
            self._stage = _Stage.OVER
            self.transport.close()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        """Close the connection: after an error response if this request is next, else after earlier ones."""
        in_body = self._stage is _Stage.BODY
        self._stage = _Stage.OVER
        self._stop_timer()
        if in_body and (self.cycle.response_started or self.pipeline):
            self.transport.close()
        elif in_body or self._is_idle():
            if in_body:
                _disconnect(self.cycle)
            self._answer(status, message)
        else:
            self.cycle.keep_alive = False  # so that uvicorn closes the connection after the last request
            self.flow.resume_reading()  # to notice if the client leaves

    def _answer(self, status: int, message: str) -> None:
        self._refused(status)
        self.transport.write(response_bytes(status_response(status, message)))
        if not self.transport.can_write_eof():  # TLS has its own closing handshake
            self.transport.close()
            return
        # If the connection closed at once, data that the client still sends would cause a TCP reset, which
        # may discard the response before the client reads it.
        self.transport.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(_LINGER_SECONDS, self.transport.abort)

    def _drop(self, n: int) -> None:
        self._n_dropped += n
        if self._n_dropped > _MOST_DROPPED:
            self.transport.abort()

    def _leave_unread(self, n: int) -> None:
        """Count `n` bytes that nobody needs; pause after a piece."""
        self._n_unread += n
        if self._n_unread < _UNREAD_PIECE or self.flow.read_paused:
            return
        self._n_unread = 0
        self.flow.pause_reading()
        read_on = partial(self._turns.begin, self._place.network, self._read_on)
        self.loop.call_later(_UNREAD_PAUSE_SECONDS, read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Tell the application, for this request, that the client has left."""
    cycle.disconnected = True
    cycle.message_event.set()
    cycle.scope.get("state", {})["caller"].leave()
