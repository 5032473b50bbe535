"""The outermost middleware, which gives each request an id, and logs and counts it when it ends."""

import re
import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.gateway.random_ids import random_id
from server.http.bodies.errors import is_anthropic
from server.http.connections.caller import caller_of
from server.http.pages import PAGES, STATIC
from server.metrics.access_log import log_access
from server.metrics.metrics import Metrics
from server.settings.endpoint_options import AccessLog
from server.tracing import attributes
from server.tracing.call import AttributeValue, Call
from server.tracing.tracing import Tracing

HEADER = b"x-request-id"

_USABLE = re.compile(rb"[!-~]{1,128}").fullmatch  # printable ASCII without spaces


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id in the headers if it is 1 to 128 printable ASCII characters without spaces, else a new id."""
    for name, value in headers:
        if name == HEADER:
            return value.decode("ascii") if _USABLE(value) else random_id()
    return random_id()


_EVENTS = b"text/event-stream"
_CLIENT_LEFT = 499  # nginx's status for a client that closed the connection
_PROBES = frozenset(("/health", "/ready", "/metrics"))
_FILES = frozenset((*PAGES, f"{STATIC}{{name:path}}"))  # a page loads dozens of files
_OPERATIONS = {  # the names of routes in spans
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
}


class Observation:
    """ASGI middleware. Routes find the request id and the facts to log in the scope (http/state.py)."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        access_log: AccessLog,
        log_probes: bool = False,
        metrics: Metrics,
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._access_log: AccessLog = access_log
        self._log_probes = log_probes
        self._metrics = metrics
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = request_id(scope["headers"])
        facts: dict[str, Any] = {}
        state["facts"] = facts
        id_headers = (HEADER, b"request-id") if is_anthropic(scope["path"]) else (HEADER,)
        exchange = _Exchange(receive, send, state["request_id"], id_headers)
        call = None if self._tracing is None else self._tracing.begin(_texts(scope["headers"]))
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            caller = caller_of(scope)
            left = exchange.left or facts.get("disconnected", False)
            left = left or (caller is not None and caller.has_left and not exchange.complete)
            status = _CLIENT_LEFT if left else exchange.status if exchange.complete else 500
            route = getattr(scope.get("route"), "path", "other")  # never a path that a client made up
            self._log_and_count(scope, exchange, route, status, facts)
            if self._tracing is not None and call is not None:
                _end_call(self._tracing, call, scope["method"], route, status, exchange.streams, facts)

    def _log_and_count(
        self, scope: Scope, exchange: "_Exchange", route: str, status: int, facts: dict[str, Any]
    ) -> None:
        path, method = scope["path"], scope["method"]
        self._metrics.http_request(route, method, status)
        if status < 400 and not self._log_probes and (path in _PROBES or route in _FILES):
            return
        client = scope.get("client")
        record = {
            "request_id": exchange.request_id,
            "protocol": "http",
            "client": client[0] if client else None,
            "method": method,
            "path": path,
            "status": status,
            "ms": round(1000 * (time.perf_counter() - exchange.began), 1),
            "bytes": exchange.n_bytes,
        }
        log_access(self._access_log, {**record, **facts})


def _texts(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[str, str]]:
    return ((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)


def _end_call(
    tracing: Tracing, call: Call, method: str, route: str, status: int, streams: bool, facts: dict[str, Any]
) -> None:
    traced: dict[str, AttributeValue] = {
        attributes.HTTP_METHOD: method,
        attributes.HTTP_ROUTE: route,
        attributes.HTTP_STATUS: status,
        attributes.REQUEST_STREAM: streams,
    }
    if "n_input" in facts:
        traced[attributes.INPUT_TOKENS] = facts["n_input"]
        traced[attributes.CACHED_TOKENS] = facts["n_cached"]
        traced[attributes.OUTPUT_TOKENS] = facts["n_output"]
    if call.choices:  # their ids begin with the response's (generation/choices.py)
        traced[attributes.RESPONSE_ID] = call.choices[0].request_id.rpartition("-")[0]
    error = str(status) if status >= 500 else None
    tracing.end(call, operation=_OPERATIONS.get(route), error=error, attributes=traced)


class _Exchange:
    """Observes one request's ASGI messages, at the cost of one function call per chunk of a stream."""

    __slots__ = (
        *("_id_headers", "_receive", "_send", "began", "complete", "left", "n_bytes", "request_id", "status"),
        "streams",  # whether the response is a stream of events
    )

    def __init__(self, receive: Receive, send: Send, request_id: str, id_headers: Sequence[bytes]) -> None:
        """`id_headers` names the response's headers that get the request id."""
        self._id_headers = id_headers
        self._receive = receive
        self._send = send
        self.request_id = request_id
        self.began = time.perf_counter()
        self.status = 0
        self.n_bytes = 0
        self.complete = False
        self.streams = False
        self.left = False  # whether the client left before the response was complete

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.left = not self.complete
        return message

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.body":
            self.n_bytes += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        else:
            self.status = message["status"]
            headers = message.get("headers", ())
            self.streams = any(value.startswith(_EVENTS) for _, value in headers)
            ids = [(name, self.request_id.encode("ascii")) for name in self._id_headers]
            message["headers"] = [*headers, *ids]
        return self._send(message)
