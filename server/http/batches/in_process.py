"""Answers a line of a batch by calling the endpoint's routes in this process.

A line is thus checked, run and answered exactly as if its client had sent it as a request.
"""

import asyncio
import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message

from orca_jax.errors import NotSupported
from orca_jax.request.scheduling_params import PRIORITY_RANGE
from server.batches.batch import Batch
from server.batches.lines import InputLine
from server.batches.runner import Answered
from server.gateway.gateway import Gateway
from server.gateway.lanes import act_for
from server.http.bodies.errors import error_response, status_response
from server.http.observation import request_id

_LOGGER = logging.getLogger("orca")
_MOST_BYTES = 16 << 20  # of an answer
_LOWEST = PRIORITY_RANGE[1]
_REFUSED = {
    "stream": "stream is true; a line of a batch has one answer, so leave it out",
    "priority": "a line of a batch runs at the lowest priority; leave it out",
}


class InProcess:
    """Implements server.batches.runner.Answer. `tenant_of` finds an API key's name by its fingerprint."""

    def __init__(self, app: ASGIApp, gateway: Gateway, *, tenant_of: Callable[[str], str | None]) -> None:
        self._app, self._gateway, self._tenant_of = app, gateway, tenant_of

    async def answer(self, batch: Batch, line: InputLine) -> Answered:
        """Run the line's request."""
        name = request_id(())
        tenant = self._tenant_of(batch.tenant)
        if tenant is None:
            message = "the batch's API key is not known any more"
            response = status_response(401, message, path=batch.endpoint)
            return Answered(401, name, bytes(response.body))
        for field in line.refused:
            response = error_response(NotSupported(_REFUSED[field], param=field), path=batch.endpoint)
            return Answered(400, name, bytes(response.body))
        body = line.body
        model = self._gateway.served
        if model is not None and model.serving.scheduling.scheduling_policy == "priority":
            # The body is an object without this name. It stays text, because parsing it here would block the
            # event loop.
            inside = body[1:-1].strip()
            body = b"{%s%s}" % (inside + b", " if inside else b"", b'"priority": %d' % _LOWEST)
        exchange = _Exchange(body)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": batch.endpoint,
            "raw_path": batch.endpoint.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            "state": {"facts": {}, "request_id": name, "tenant": tenant, "owner": tenant or batch.owner},
        }
        act_for(tenant or batch.owner)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception:
            if not exchange.status:
                raise
            _LOGGER.exception("a line of batch %s failed", batch.id)
        if exchange.n_bytes > _MOST_BYTES:
            message = f"the answer has more than {_MOST_BYTES} bytes; ask for less in one line"
            response = status_response(400, message, path=batch.endpoint)
            return Answered(400, name, bytes(response.body))
        return Answered(exchange.status, name, b"".join(exchange.parts).replace(b"\n", b" "))


class _Exchange:
    """The client's side of one ASGI call: it sends one body, never leaves, and keeps what it receives."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = self.n_bytes = 0
        self.parts: list[bytes] = []

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.get_running_loop().create_future()  # until it is cancelled
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        body: bytes = message.get("body", b"")
        self.n_bytes += len(body)
        if self.n_bytes <= _MOST_BYTES:
            self.parts.append(body)
