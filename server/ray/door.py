"""The ingress of the application: takes HTTP requests and passes each to one of the engines."""

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from orca_jax.errors import OrcaError, QueueFull
from server.errors import Unauthorized
from server.gateway.gateway import Phase
from server.gateway.side_threads import run_for_request
from server.http.authentication import identify
from server.http.bodies.errors import NOT_READY_SECONDS, error_response, status_response
from server.http.connections.body_limit import read_body
from server.ray.asgi_call import HttpCall
from server.ray.relay import Relay
from server.ray.routing.prefix_choice import NO_KEY, RoutingKey
from server.ray.routing.prefix_key import routing_key
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions

_LOGGER = logging.getLogger("orca")
_ALL_SECONDS = 5.0  # in which all engines must answer what the door asks them
_SPARE_SECONDS = 30.0  # after request_timeout, at which the engine itself ends a request
_CLIENT_LEFT = 499


class Door:
    """Reads a whole request, chooses an engine by it, and passes the engine's response on as it comes.

    The door itself answers `/health`, `/ready` and `/metrics`, for all engines.
    """

    def __init__(
        self,
        engine: DeploymentHandle,
        options: EndpointOptions,
        *,
        model_name: str,
        api_keys: ApiKeys,
        admin_keys: ApiKeys,
    ) -> None:
        self._engine = engine
        self._call = engine.options(stream=True).call
        self._options, self._model_name = options, model_name
        self._keys = {"api_keys": api_keys, "admin_keys": admin_keys}
        self._metrics = DoorMetrics()
        self._name = serve.get_replica_context().replica_id.unique_id
        self._asking = dict[str, asyncio.Task[list[Any]]]()

    async def __call__(self, request: Request) -> Response:
        options, scope = self._options, request.scope
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # the application's route_prefix
        answer = {"/health": self._health, "/ready": self._ready, "/metrics": self._page}.get(path)
        if answer is not None and request.method in ("GET", "HEAD"):
            return await answer()
        self._metrics.began()
        try:
            body, key = await self._read(request, path)
        except HTTPException as error:
            self._metrics.ended(error.status_code)
            return status_response(error.status_code, error.detail, error.headers, path=path)
        except (ClientDisconnect, asyncio.CancelledError) as error:
            self._metrics.ended(_CLIENT_LEFT)
            if isinstance(error, asyncio.CancelledError):
                raise
            return Response(status_code=_CLIENT_LEFT)
        except Exception:  # our own defect; Ray would answer it with a page of text
            _LOGGER.exception("a request failed at the door")
            unexpected = OrcaError("the server failed in an unexpected way; its log has more")
            failure = error_response(unexpected, path=path)
            self._metrics.ended(failure.status_code)
            return failure
        call = HttpCall(
            method=scope["method"],
            path=path,
            query=scope["query_string"],
            headers=list(scope["headers"]),
            client=scope.get("client"),
            body=body,
            key=key,
        )
        stream = self._call.remote(call)
        assert isinstance(stream, DeploymentResponseGenerator)
        return Relay(
            stream, path=path, seconds=options.request_timeout + _SPARE_SECONDS, done=self._metrics.ended
        )

    async def _read(self, request: Request, path: str) -> tuple[bytes, RoutingKey]:
        """Read the body and make its hashes. API keys share no prefixes.

        The body of a request without a valid key is not read: any engine refuses it by its headers.
        """
        try:
            tenant = identify(request.scope, path, **self._keys)
        except Unauthorized:
            return b"", NO_KEY
        options = self._options
        body = await read_body(
            request.scope, request.receive, max_bytes=options.max_body_bytes, seconds=options.body_timeout
        )
        try:
            key = partial(routing_key, path, tenant.encode(), body, self._model_name)
            return body, await run_for_request(len(body), key)
        except QueueFull:  # any engine will do
            return body, NO_KEY

    async def _health(self) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self) -> Response:
        """Answer 200 if at least one engine takes requests; the body has the phase of each engine."""
        engines = dict[str, Phase](sorted(await self._ask_all("state")))
        if Phase.READY in engines.values():
            return JSONResponse({"status": Phase.READY, "engines": engines})
        reason = "no engine is ready"
        body = {"status": Phase.LOADING, "reason": reason, "engines": engines}
        return JSONResponse(body, 503, {"Retry-After": str(NOT_READY_SECONDS)})

    async def _page(self) -> Response:
        pages = dict[str, str](sorted(await self._ask_all("metrics_page")))
        pages = {self._name: self._metrics.page(len(pages)), **pages}
        text = await asyncio.to_thread(merged, pages)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _ask_all(self, method: str) -> list[Any]:
        """Return the answers of all engines but those that are gone; no answer at all if one is too slow.

        Concurrent callers share one question, because anyone may ask without a key.
        """
        asking = self._asking.get(method)
        if asking is None:
            asking = self._asking[method] = asyncio.create_task(self._answers(method))
            asking.add_done_callback(lambda _: self._asking.pop(method))
        return await asyncio.shield(asking)

    async def _answers(self, method: str) -> list[Any]:
        try:
            answers = await self._engine.broadcast(method).results_async(
                timeout_s=_ALL_SECONDS, return_exceptions=True
            )
        except (TimeoutError, RayError, RayServeException):  # RayServeException: there is no engine
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]


class DoorMetrics:
    """The metrics of one door. Use it on the door's event loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._answered = Counter(
            "orca_door_requests",
            "HTTP requests answered by a door; 499: the client left.",
            ["status"],
            registry=self._registry,
        )
        self._lost = Counter(
            "orca_door_lost_engines",
            "Requests that ended with an error because their engine was gone.",
            registry=self._registry,
        )
        self._live = Gauge(
            "orca_door_live_requests", "Requests that a door has not answered yet.", registry=self._registry
        )
        self._engines = Gauge(
            "orca_door_engines", "Engines whose metrics are on this page.", registry=self._registry
        )

    def began(self) -> None:
        """Count a request that has come."""
        self._live.inc()

    def ended(self, status: int, lost: bool = False) -> None:
        """Count a response that has ended."""
        self._live.dec()
        self._answered.labels(str(status)).inc()
        if lost:
            self._lost.inc()

    def page(self, n_engines: int) -> str:
        """Write the door's metrics in Prometheus's text format."""
        self._engines.set(n_engines)
        return generate_latest(self._registry).decode()


_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_COMMENT = re.compile(r"# (?:HELP|TYPE) (\S+)")


def merged(pages: Mapping[str, str]) -> str:
    """Merge the replicas' pages in Prometheus's text format into one.

    The samples of a metric are together, as the format requires; its help is that of the first page.
    """
    comments = dict[str, list[str]]()
    samples = dict[str, list[str]]()
    for replica, page in pages.items():
        for metric, line in _lines(page):
            known = comments.setdefault(metric, [])
            if not line.startswith("#"):
                samples.setdefault(metric, []).append(_labelled(line, replica))
            elif metric not in samples and len(known) < 2:
                known.append(line)
    lines = (line for metric in comments for line in (*comments[metric], *samples.get(metric, ())))
    return "".join(f"{line}\n" for line in lines)


def _lines(page: str) -> Iterator[tuple[str, str]]:
    """Yield each line with its metric; a metric begins with its comments."""
    metric = ""
    for line in page.split("\n"):
        if comment := _COMMENT.match(line):
            metric = comment[1]
        if line and (comment or not line.startswith("#")):
            yield metric, line


def _labelled(sample: str, replica: str) -> str:
    name = _NAME.match(sample)
    assert name is not None, sample
    rest = sample[name.end() :]
    if not rest.startswith("{"):
        return f'{name[0]}{{replica="{replica}"}}{rest}'
    comma = "" if rest.startswith("{}") else ","
    return f'{name[0]}{{replica="{replica}"{comma}{rest[1:]}'
