"""One HTTP connection: uvicorn's protocol, and what a client may take before the application is asked.

Limits: bytes of a request's head, seconds for the head, seconds for the body, seconds between two requests,
requests that wait behind one that runs. A request's head is its line and headers.

Bytes are counted as they arrive, and the parser gets no more than the limit leaves: a head that is too large
is refused before it is held. (One that begins in the middle of a piece counts from the next piece on, so that
no more than twice the limit is ever held.) One timer is enough, because each of its uses begins where another
ends. It is set only when data did not complete what it waits for, which is seldom, so an ordinary request
costs none.
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
from server.http.connections.open_connections import Place
from server.http.connections.refusal import whole_answer
from server.http.connections.turns import Turns
from server.settings.config import EndpointOptions

_MOST_FIELDS = 256  # header fields of a request: each costs more memory than its bytes say
_MOST_PIPELINED = 16  # requests that wait for the one before them
_CUT_SECONDS = 5.0  # after a body's deadline, at which the application answers with 408 if it still waits
_LINGER_SECONDS = 2.0  # for a refused client to read why
_MOST_DROPPED = 1 << 20  # bytes that it may still send then


class _Stage(Enum):
    BETWEEN = auto()  # no byte of the next request has come
    HEAD = auto()
    BODY = auto()
    OVER = auto()  # what still comes is dropped


class _Stop(Exception):
    """Stops the parser where it stands; `_refusal` says why."""


class Connection(HttpToolsProtocol):
    """`place` is released when the connection is lost; requests begin when `turns` says; `refused` is called
    with the status of a refusal.

    Refused is what never becomes a request of the application: 400, 408 and 431, in the shape of all errors.
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
        self._n_bytes = 0  # since the last byte of a body, or the last request's end
        self._n_dropped = 0
        self._refusal: tuple[int, str] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None

    # What the transport says.

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The first request's head is waited for from now on."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(self._options.header_timeout, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything, and tell the request that runs; uvicorn tells the one that came last."""
        self._place.release()
        self._stop_timer()
        self._unset_keepalive_if_required()
        if self._running is not None and not self._running.response_complete:
            _disconnect(self._running)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, a piece at a time, what the limits allow."""
        self._unset_keepalive_if_required()
        at = 0
        while at < len(data) and self._stage is not _Stage.OVER:
            room = self._options.max_header_bytes - self._n_bytes
            at += self._feed(data[at : at + room])
        if self._stage is _Stage.OVER:
            self._drop(len(data) - at)
        else:
            self._watch()

    # What the parser says.

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self._stage = _Stage.HEAD
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers are left out, which came after the headers were acted on."""
        if self._stage is _Stage.BODY:
            return
        if len(self.headers) >= _MOST_FIELDS:
            self._refusal = (431, f"the request has more than {_MOST_FIELDS} headers; send fewer")
            raise _Stop
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Let the application have the request, unless too many wait already."""
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise _Stop
        super().on_headers_complete()
        self._stop_timer()
        self._stage = _Stage.BODY
        self._n_bytes = 0

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._n_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request's last byte."""
        self._stop_timer()
        self._stage = _Stage.BETWEEN
        self._n_bytes = 0
        super().on_message_complete()

    # Ours.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._turns.begin(self._place.network, partial(self._run, cycle, app))

    def _run(self, cycle: RequestResponseCycle, app: Any) -> None:
        if not self.transport.is_closing():  # or nobody waits for it any more
            super()._start_asgi_task(cycle, app)

    def _feed(self, piece: bytes) -> int:
        """Give the parser a piece that is no larger than the limit leaves; return how much of it it took."""
        assert self.parser is not None
        n = len(piece)
        self._n_bytes += n
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as offer:  # of another protocol: nothing says that we must take it
            n = max(offer.args[0], 1)
        except httptools.HttpParserError:
            self._refuse(*(self._refusal or (400, "the request is malformed; HTTP/1.1 is spoken here")))
        else:
            if self._n_bytes >= self._options.max_header_bytes:
                most = self._options.max_header_bytes
                self._refuse(431, f"the headers have more than {most} bytes (orca serve --max-header-bytes)")
        return n

    def _watch(self) -> None:
        """Set the timer for what the data so far did not complete."""
        if self._timer is not None or self.transport.is_closing():
            return
        if self._stage is _Stage.BODY:
            self._wait_for_body()
        elif self._stage is _Stage.HEAD or self._n_bytes:
            self._timer = self.loop.call_later(self._options.header_timeout, self._head_is_late)
        elif self._is_idle():
            # Uvicorn sets this when a response is complete; here the request was complete after it.
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
        elif self._is_idle():  # it sent empty lines, or nothing
            self.transport.close()

    def _body_is_late(self) -> None:
        """The application has answered by now, or had no use for the body."""
        self._timer = None
        if self.pipeline or self.flow.read_paused:
            self._wait_for_body()  # it is not this request's turn, or nothing is read: not the client's fault
        else:
            self._stage = _Stage.OVER
            self.transport.close()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        """End the connection: with an answer if it is this request's turn, else after those before it."""
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
            self.cycle.keep_alive = False  # it came last, and is closed behind
            self.flow.resume_reading()  # or we would not see the client leave

    def _answer(self, status: int, message: str) -> None:
        self._refused(status)
        self.transport.write(whole_answer(status_response(status, message)))
        if not self.transport.can_write_eof():  # TLS has an end of its own
            self.transport.close()
            return
        # Closed at once, what the client still sends would meet a reset, and the answer may be lost with it.
        self.transport.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(_LINGER_SECONDS, self.transport.abort)

    def _drop(self, n: int) -> None:
        self._n_dropped += n
        if self._n_dropped > _MOST_DROPPED:
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Tell the application that the client has left, as far as this request goes."""
    cycle.disconnected = True
    cycle.message_event.set()
