"""The outermost layer around the routes: a request gets its id here, and is logged and counted at its end."""

import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.request_id import HEADER, request_id
from server.metrics.access_log import log_access
from server.metrics.metrics import Metrics
from server.settings.config import AccessLog

_CLIENT_LEFT = 499  # what nginx made customary
_PROBES = frozenset(("/health", "/ready", "/metrics"))


class Observation:
    """ASGI middleware. Routes find the id and the facts for the log in the scope (generation/state.py)."""

    def __init__(self, app: ASGIApp, *, access_log: AccessLog, metrics: Metrics) -> None:
        self._app = app
        self._access_log: AccessLog = access_log
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, from its first byte to its last."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = request_id(scope["headers"])
        facts: dict[str, Any] = {}
        state["facts"] = facts
        exchange = _Exchange(receive, send, state["request_id"])
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            self._over(scope, exchange, facts)

    def _over(self, scope: Scope, exchange: "_Exchange", facts: dict[str, Any]) -> None:
        status = _CLIENT_LEFT if exchange.left else exchange.status if exchange.complete else 500
        path, method = scope["path"], scope["method"]
        route = getattr(scope.get("route"), "path", "other")  # never what a client made up
        self._metrics.http_request(route, method, status)
        if status < 400 and path in _PROBES:
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


class _Exchange:
    """One request's messages, watched as they pass; a chunk of a stream costs one call more."""

    __slots__ = ("_receive", "_send", "began", "complete", "left", "n_bytes", "request_id", "status")

    def __init__(self, receive: Receive, send: Send, request_id: str) -> None:
        self._receive = receive
        self._send = send
        self.request_id = request_id
        self.began = time.perf_counter()
        self.status = 0
        self.n_bytes = 0
        self.complete = False
        self.left = False  # the client, before it had all

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.left = not self.complete
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.n_bytes += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        else:
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (HEADER, self.request_id.encode("ascii"))]
        await self._send(message)
