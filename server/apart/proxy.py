"""The proxy between clients and servers of two roles, as an ASGI application.

Like the proxies of vLLM and llm-d, it sends each generating request twice: first with one output token to a
server that computes the prompt, and then, with the `kv_transfer_params` of the answer, to a server that
generates. If the first step fails, the second computes the prompt itself, so that no request is lost. Servers
of ours give these params while they compute the prompt, and both steps overlap.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

_log = logging.getLogger(__name__)

GENERATING = ("/v1/completions", "/v1/chat/completions")
# What a server that computes the prompt gets: all fields of vLLM's proxies, and one of our own.
_TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
    "offer_early": True,
}
_OFFERED = "x-orca-offered"  # the params are the first line of the answer (server/http/generation)
# About the output alone, or about its form.
_LEFT_OUT = ("stream_options", "min_tokens", "min_completion_tokens", "n", "best_of", "use_beam_search")
_MOST_ANSWER = 64 << 20  # bytes of an answer of the first step
_PASSED_ON = ("authorization", "content-type", "x-request-id", "accept", "traceparent", "x-api-key")
_RETURNED = ("content-type", "retry-after", "x-request-id", "x-orca-ignored", "cache-control")
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 3.0  # servers close connections that rest for five seconds
_IDLE_CONNECTIONS = 256
_FAILURES = (httpx2.TransportError, ValueError, TimeoutError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyOptions:
    """The addresses of servers of each role, as http://host:port.

    `prefill_seconds` bounds the first step, `idle_seconds` each wait for more of an answer.
    """

    prefill: Sequence[str]
    decode: Sequence[str]
    prefill_seconds: float = 60.0
    idle_seconds: float = 600.0
    max_body_bytes: int = 16 << 20


class Proxy:
    """Takes the servers of each role in turn. `n_alone` counts requests whose first step failed."""

    def __init__(self, options: ProxyOptions) -> None:
        self._options = options
        self._prefill: Iterator[int] = itertools.cycle(range(len(options.prefill)))
        self._decode: Iterator[int] = itertools.cycle(range(len(options.decode)))
        self.n_requests = self.n_alone = 0
        self._client = httpx2.AsyncClient(
            headers={"Accept-Encoding": "identity"},
            timeout=httpx2.Timeout(options.idle_seconds, connect=_CONNECT_SECONDS),
            limits=httpx2.Limits(
                max_connections=None,
                max_keepalive_connections=_IDLE_CONNECTIONS,
                keepalive_expiry=_IDLE_SECONDS,
            ),
            trust_env=False,
        )

    def app(self) -> Starlette:
        """The application, whose lifespan ends the connections to the servers."""
        routes = [Route(path, self.generate, methods=["POST"]) for path in GENERATING]
        passed = [Route(path, self.pass_on) for path in ("/v1/models", "/health", "/ready")]
        return Starlette(routes=[*routes, *passed], lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with self._client:
            yield

    async def generate(self, request: Request) -> Response:
        """Answer a generating request in two steps."""
        self.n_requests += 1
        try:
            content = await self._body(request)
        except ClientDisconnect:
            return Response(status_code=499)
        if content is None:
            most = self._options.max_body_bytes
            return _error(413, f"the request has more than {most} bytes, the most that the proxy takes")
        headers = _kept(request.headers, _PASSED_ON)
        try:
            body = json.loads(content)
        except ValueError:
            body = None  # the server says what is wrong with it
        first: asyncio.Task[None] | None = None
        if isinstance(body, dict):
            found: asyncio.Future[dict[str, Any] | None] = asyncio.get_running_loop().create_future()
            first = asyncio.create_task(self._first_step(request.url.path, body, headers, found))
            params = await found
            if params is None:
                self.n_alone += 1
            else:
                content = json.dumps({**body, "kv_transfer_params": params}).encode()
        return await self._answer("POST", request.url.path, headers, content, first)

    async def pass_on(self, request: Request) -> Response:
        """Answer as a server that generates does."""
        return await self._answer("GET", request.url.path, _kept(request.headers, _PASSED_ON), b"")

    async def _body(self, request: Request) -> bytes | None:
        found = bytearray()
        async for piece in request.stream():
            found += piece
            if len(found) > self._options.max_body_bytes:
                return None
        return bytes(found)

    async def _first_step(
        self,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        found: "asyncio.Future[dict[str, Any] | None]",
    ) -> None:
        """Let a server compute the prompt, and set `found` to its params, to None if it fails.

        Goes on until the prompt is computed, because a server ends the request when its client leaves.
        """
        first = {name: value for name, value in body.items() if name not in _LEFT_OUT}
        first |= {"kv_transfer_params": _TO_PREFILL, "stream": False, "max_tokens": 1}
        if "max_completion_tokens" in first:
            first["max_completion_tokens"] = 1
        at = self._options.prefill[next(self._prefill)]
        try:
            async with (
                asyncio.timeout(self._options.prefill_seconds),
                self._client.stream("POST", f"{at}{path}", headers=headers, json=first) as answer,
            ):
                if answer.status_code != 200:
                    _log.warning(
                        "%s answered %d, so another server computes the prompt", at, answer.status_code
                    )
                    return
                await _find_params(answer, found)
        except _FAILURES as error:
            _log.warning("%s failed, so another server computes the prompt: %r", at, error)
        finally:
            _set(found, None)

    async def _answer(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        first: "asyncio.Task[None] | None" = None,
    ) -> Response:
        """Pass on the answer of the first server that gives one. Its end ends the `first` step too."""
        servers, start = self._options.decode, next(self._decode)
        why = ""
        for i in range(len(servers)):
            at = servers[(start + i) % len(servers)]
            request = self._client.build_request(method, f"{at}{path}", headers=headers, content=body)
            try:
                answer = await self._client.send(request, stream=True)
            except _FAILURES as error:
                why = f"{at}: {error or type(error).__name__}"
                _log.warning("%s failed: %r", at, error)
                continue
            if answer.status_code == 503 and i + 1 < len(servers):  # it is loading or shuts down
                await answer.aclose()
                continue
            return StreamingResponse(
                _relayed(answer, first), answer.status_code, headers=_kept(answer.headers, _RETURNED)
            )
        if first is not None:
            first.cancel()
        return _error(502, f"no server that generates answers ({why})")


async def _find_params(answer: httpx2.Response, found: "asyncio.Future[dict[str, Any] | None]") -> None:
    """Set `found` to the params in an answer, as soon as they have come, and read it to its end.

    Raises ValueError if it is no JSON, or longer than an answer may be.
    """
    early, text = _OFFERED in answer.headers, bytearray()
    async for piece in answer.aiter_raw():
        text += piece
        if len(text) > _MOST_ANSWER:
            raise ValueError(f"the answer has more than {_MOST_ANSWER} bytes")
        if early and (end := text.find(b"\n")) >= 0:
            _set(found, _params(bytes(text[:end]).removesuffix(b",") + b"}"))
            early = False
    if not found.done():
        _set(found, _params(bytes(text)))


def _params(text: bytes) -> dict[str, Any] | None:
    """The params in a JSON object; None if it has none."""
    whole = json.loads(text)
    params = whole.get("kv_transfer_params") if isinstance(whole, dict) else None
    return params if isinstance(params, dict) and params else None


def _set(found: "asyncio.Future[dict[str, Any] | None]", params: dict[str, Any] | None) -> None:
    if not found.done():
        found.set_result(params)


async def _relayed(answer: httpx2.Response, first: "asyncio.Task[None] | None") -> AsyncIterator[bytes]:
    """The body's pieces; leaving it, as when the client does, disconnects from both servers."""
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        if first is not None:
            first.cancel()
        await answer.aclose()


def _kept(headers: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: headers[name] for name in names if name in headers}


def _error(status: int, message: str) -> JSONResponse:
    error = {"message": message, "type": "api_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status)
