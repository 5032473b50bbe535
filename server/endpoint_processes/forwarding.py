"""Passes requests on from an endpoint process to the engine's process, which answers all other routes."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import httpx2
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import NotReady
from server.http.authentication import is_admin
from server.http.bodies.errors import error_response
from server.http.connections.caller import caller_of
from server.settings.endpoint_options import EndpointOptions

CLIENT = b"x-orca-client"  # the client's address, from this program alone
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 3.0  # servers close connections that rest for five seconds
_IDLE_CONNECTIONS = 64
_OF_A_CONNECTION = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"date"))


class Forwarding:
    """ASGI application that answers as the server on the Unix socket `path` does.

    The client that leaves is disconnected from there too.
    """

    def __init__(self, path: str) -> None:
        self._client = httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(
                uds=path,
                limits=httpx2.Limits(
                    max_connections=None,
                    max_keepalive_connections=_IDLE_CONNECTIONS,
                    keepalive_expiry=_IDLE_SECONDS,
                ),
            ),
            timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        headers = [
            (name, value)
            for name, value in scope["headers"]
            if name not in _OF_A_CONNECTION and name != CLIENT
        ]
        headers.append((CLIENT, json.dumps([*(scope.get("client") or ("", 0)), scope["scheme"]]).encode()))
        path = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        sent = self._client.build_request(
            scope["method"],
            httpx2.URL("http://engine", raw_path=path),
            headers=headers,
            content=_body(request) if has_body else None,
        )
        sending = asyncio.ensure_future(self._client.send(sent, stream=True))
        caller = caller_of(scope)
        if caller is not None:
            caller.on_departure(sending.cancel)
        try:
            answer = await sending
        except (ClientDisconnect, asyncio.CancelledError):
            if caller is None or not caller.has_left:
                raise
            return
        except httpx2.TransportError:
            error = NotReady("the engine's process does not answer; try again later")
            await error_response(error, path=scope["path"], retry_after=1)(scope, receive, send)
            return
        finally:
            sending.cancel()  # if it is not done
            if caller is not None:
                caller.on_departure(None)
        response = StreamingResponse(_relayed(answer), answer.status_code)
        response.raw_headers = [
            (name, value) for name, value in answer.headers.raw if name.lower() not in _OF_A_CONNECTION
        ]
        await response(scope, receive, send)


async def _relayed(answer: httpx2.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


async def _body(request: Request) -> AsyncIterator[bytes]:
    async for piece in request.stream():
        if piece:
            yield piece


def inner_options(options: EndpointOptions) -> EndpointOptions:
    """The options of the engine's process behind endpoint processes, which have the limits of addresses."""
    most = options.max_connections * options.endpoint_processes
    return replace(
        options, ssl_certfile=None, ssl_keyfile=None, max_connections=most, max_connections_per_address=most
    )


class Forwarded:
    """ASGI middleware of the engine's process: each request has the client that an endpoint process saw.

    `before_answer` is awaited before an operator's change is answered, so that all processes know it then.
    """

    def __init__(self, app: ASGIApp, *, before_answer: Callable[[], Awaitable[object]]) -> None:
        self._app = app
        self._before_answer = before_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            facts = next((value for name, value in scope["headers"] if name == CLIENT), None)
            if facts is not None:
                host, port, scope["scheme"] = json.loads(facts)
                scope["client"] = (host, port)
                scope["headers"] = [pair for pair in scope["headers"] if pair[0] != CLIENT]
            if is_admin(scope["path"]) and scope["method"] != "GET":

                async def send_known(message: Message) -> None:
                    if message["type"] == "http.response.start":
                        await self._before_answer()
                    await send(message)

                await self._app(scope, receive, send_known)
                return
        await self._app(scope, receive, send)
