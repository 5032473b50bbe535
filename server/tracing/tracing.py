"""Follows clients' requests through the timeline, and writes their spans on a separate thread."""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Protocol

from orca_jax.errors import ConfigError, install_line
from orca_jax.request.request import Request
from orca_jax.scheduling.timeline import RequestRecord, TimelineObserver
from server.gateway.served_model import ServedModel
from server.tracing.call import AttributeValue, Call, Choice

_LOGGER = logging.getLogger("orca.traces")
_MOST_CALLS = 4096  # that wait to be written
_IDLE_SECONDS = 1.0
_LOOK_SECONDS = 0.05  # between two checks whether a call's last request has ended
_LATE_SECONDS = 60.0  # after which a call is written without its last request
_CLOSE_SECONDS = 5.0

# The call of this task and of the tasks that it starts.
_CURRENT: ContextVar[Call | None] = ContextVar("call", default=None)


class Writer(Protocol):
    """Writes the spans of calls, on one thread."""

    def write(self, call: Call, model: str) -> None:
        """Write the spans of a call that has ended. Clients call the model `model`."""
        ...

    def close(self, seconds: float) -> None:
        """Send the rest, within `seconds`."""
        ...


class Tracing(TimelineObserver):
    """Follows the requests of one server. The endpoints call `begin` and `end` on their event loop.

    A request in the service belongs to the call whose task submits it. The scheduler's thread only stores the
    record of each request that ends; another thread makes all spans later. Calls that come too fast for that
    thread are not traced. Use `start` and `close` once each.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._model = ""
        self._live: dict[int, Choice] = {}  # by arrival number
        self._ended: deque[Call] = deque()
        self._has_complained = False
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="orca-traces", daemon=True)

    def start(self, model: ServedModel) -> None:
        """Begin to trace the model's requests. Call it while none is live."""
        self._model = model.name
        timeline = model.orca.timeline
        timeline.observers = (*timeline.observers, self)
        self._thread.start()

    def close(self) -> None:
        """Write and send the rest, within seconds. Call it when both endpoints have stopped."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS / 2)
        self._writer.close(max(deadline - time.monotonic(), 0.0))

    # The endpoints call these.

    def begin(self, headers: Iterable[tuple[str, str]]) -> Call:
        """Begin a client's request with these headers; their names are in lower case."""
        call = Call.begin(headers)
        _CURRENT.set(call)
        return call

    def end(
        self,
        call: Call,
        *,
        operation: str | None,
        error: str | None,
        attributes: dict[str, AttributeValue],
    ) -> None:
        """End a request that has been answered. `error` names a failure of the server.

        It is traced if it has an `operation`, or if it submitted requests to the service.
        """
        _CURRENT.set(None)
        if operation is None and not call.choices:
            return
        call.operation = operation or call.operation
        call.error = error
        call.attributes = attributes
        call.ended = time.time_ns()
        if len(self._ended) >= _MOST_CALLS:
            if not self._has_complained:
                _LOGGER.warning("requests end faster than their spans are made: some are not traced")
            self._has_complained = True
            return
        self._ended.append(call)
        self._wake.set()

    # The timeline calls these.

    def arrived(self, request: Request, at: float) -> None:
        call = _CURRENT.get()
        if call is not None and not call.ended:
            choice = Choice.of(request, at)
            call.choices.append(choice)
            self._live[request.arrival] = choice

    def ended(self, record: RequestRecord, request: Request) -> None:
        choice = self._live.pop(record.arrival, None)
        if choice is not None:
            choice.record = record

    # These run on the thread of the spans.

    def _run(self) -> None:
        waiting: list[Call] = []
        while not self._closing:
            self._wake.wait(_LOOK_SECONDS if waiting else _IDLE_SECONDS)
            self._wake.clear()
            waiting = self._write(waiting)
        for call in self._write(waiting):
            self._write_one(call)

    def _write(self, waiting: Sequence[Call]) -> list[Call]:
        """Write the calls that are complete. Return the others, whose clients left before the end."""
        calls = [*waiting, *(self._ended.popleft() for _ in range(len(self._ended)))]
        late = time.time_ns() - int(_LATE_SECONDS * 1e9)
        rest: list[Call] = []
        for call in calls:
            if call.complete or call.ended < late:
                self._write_one(call)
            else:
                rest.append(call)
        return rest

    def _write_one(self, call: Call) -> None:
        try:
            self._writer.write(call, self._model)
        except Exception:  # neither a request nor the spans of the next may suffer
            if not self._has_complained:
                _LOGGER.exception("the spans of a request could not be made")
            self._has_complained = True


_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def tracing_to(endpoint: str | None, environ: Mapping[str, str]) -> Tracing | None:
    """Make the tracing to a collector's address; None without an address.

    Raises ConfigError if the libraries are missing or a variable has a wrong value.
    """
    if endpoint is None:
        return None
    if not (_is_installed("opentelemetry.sdk") and _is_installed("opentelemetry.exporter.otlp.proto.http")):
        raise ConfigError(
            f"otlp_traces_endpoint needs OpenTelemetry: {install_line('otel')} (or leave it out)"
        )
    # Imported on demand, because a server without traces does not need the extra.
    from server.tracing.otlp import otlp_writer

    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "http/protobuf")
    return Tracing(otlp_writer(endpoint, protocol.strip().lower()))


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False
