"""The HTTP and gRPC endpoints on one event loop: bind, serve, stop."""

import asyncio
import logging
import resource
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from tempfile import TemporaryDirectory

from orca_jax.errors import EngineError
from server.batches.service import Batches
from server.endpoint_processes.forwarding import Forwarded, inner_options
from server.endpoint_processes.supervisor import EndpointProcesses
from server.gateway.gateway import Gateway
from server.gateway.served_model import ServedModel
from server.gateway.side_threads import n_very_long
from server.http.app import create_app
from server.http.connections.listener import BACKLOG
from server.http.connections.server import HttpServer
from server.metrics.metrics import Metrics
from server.process.addresses import bound_socket, check_certificate, in_url
from server.process.freed_memory import give_back
from server.rpc.server import create_server
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from server.tracing.tracing import Tracing
from server.web.feed import LiveView

_START_SECONDS = 60.0
_STOP_SECONDS = 5  # for complete answers to reach their clients
_UNREAD_SECONDS = 60  # disconnect a client that reads nothing for this long


class Endpoints:
    """HTTP and gRPC in front of one gateway. Must be created on the event loop that runs them.

    After `start`, `http_port` and `grpc_port` are the real ports (`grpc_port` None: gRPC is off).
    """

    def __init__(
        self,
        gateway: Gateway,
        options: EndpointOptions,
        *,
        api_keys: ApiKeys,
        admin_keys: ApiKeys | None = None,
        metrics: Metrics,
        live_view: LiveView | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        options = with_room(options)
        self.http_port = options.port
        self.grpc_port = options.grpc_port
        self._gateway = gateway
        self._options = options
        self._live_view = live_view
        self._batches = None
        if options.batch_dir is not None:
            self._batches = Batches(
                gateway,
                options.batch_dir,
                max_bytes=options.batch_bytes,
                max_line=options.max_body_bytes,
                shared=api_keys.n_keys > 1,
            )
        app = create_app(
            gateway,
            options,
            api_keys=api_keys,
            admin_keys=admin_keys,
            metrics=metrics,
            live_view=live_view,
            batches=self._batches,
            tracing=tracing,
        )
        self._processes: EndpointProcesses | None = None
        if options.endpoint_processes:
            self._processes = EndpointProcesses(options, api_keys, on_answered=metrics.answered_elsewhere)
            metrics.n_live_elsewhere = lambda: self.n_live - gateway.n_live
            app = Forwarded(app, before_answer=self.settle)
            options = inner_options(options)
        self._http = HttpServer(app, options, stop_seconds=_STOP_SECONDS, refused=metrics.http_refusal)
        self._closing = ExitStack()  # of sockets and folders
        self._rpc = None
        if options.grpc_port is not None:
            self._rpc = create_server(gateway, options, api_keys=api_keys, metrics=metrics, tracing=tracing)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def n_live(self) -> int:
        """Requests whose clients have not received all output yet."""
        elsewhere = 0 if self._processes is None else self._processes.n_live
        return self._gateway.n_live + elsewhere

    @property
    def process_ids(self) -> Sequence[int]:
        """The endpoint processes that run."""
        return () if self._processes is None else self._processes.pids

    @property
    def http_url(self) -> str:
        scheme = "http" if self._options.ssl_certfile is None else "https"
        return f"{scheme}://{in_url(self._options.host)}:{self.http_port}"

    @property
    def pages(self) -> str:
        """The addresses of the pages for people, as a text."""
        url = self.http_url
        return f"{url}/ to try prompts, {url}/live to watch the scheduler" if self._options.pages else "off"

    @property
    def grpc_address(self) -> str | None:
        return None if self.grpc_port is None else f"{in_url(self._options.host)}:{self.grpc_port}"

    async def start(self) -> None:
        """Bind both addresses and listen. Raises ConfigError; then nothing stays bound."""
        check_certificate(self._options)
        listener = bound_socket(self._options.host, self._options.port, flag="--port")
        # Each connection inherits this: the kernel closes it once its client stops reading.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _UNREAD_SECONDS)
        self.http_port = listener.getsockname()[1]
        inner, others_at = listener, ""
        if self._processes is not None:
            folder = self._closing.enter_context(TemporaryDirectory(prefix="orca-"))
            others_at = f"{folder}/http"
            inner = socket.socket(socket.AF_UNIX)
            inner.bind(others_at)
            self._closing.enter_context(listener)
            listener.listen(BACKLOG)  # clients wait until a process is up
        try:
            if self._rpc is not None:
                assert self._options.grpc_port is not None
                self.grpc_port = await self._rpc.bind(self._options.host, self._options.grpc_port)
                await self._rpc.start()
        except BaseException:
            listener.close()
            inner.close()
            self._closing.close()
            raise
        self._tasks = [
            asyncio.create_task(self._http.serve(sockets=[inner]), name="http"),
            asyncio.create_task(self._gateway.watch(), name="gateway"),
            asyncio.create_task(give_back(n_very_long), name="freed memory"),
        ]
        if self._batches is not None:
            self._batches.start()
        async with asyncio.timeout(_START_SECONDS):
            while not self._http.started:
                if self._tasks[0].done():
                    await self._tasks[0]
                    raise EngineError("the HTTP server exited while it was starting")
                await asyncio.sleep(0.01)
        if self._processes is not None:
            await self._processes.start(listener, others_at)

    async def open(self, model: ServedModel) -> None:
        """Accept requests: the model is loaded and warm. Raises EngineError if a process is not up."""
        if self._processes is not None:
            self._processes.open(model)
            deadline = self._gateway.loop.time() + _START_SECONDS
            while not await self._processes.settle():
                if self._gateway.loop.time() > deadline:
                    message = f"an endpoint process was not up within {_START_SECONDS:g} seconds"
                    raise EngineError(f"{message}; the log says more")
        self._gateway.open(model)

    async def settle(self) -> bool:
        """Wait some seconds until all endpoint processes know how the engine is; False if one does not."""
        return self._processes is None or await self._processes.settle()

    async def drain(self, seconds: float) -> int:
        """Reject new requests, and give live ones `seconds` to finish; returns how many were cancelled."""
        if self._processes is None:
            return await self._gateway.drain(seconds)
        return sum(await asyncio.gather(self._gateway.drain(seconds), self._processes.drain(seconds)))

    async def stop(self) -> None:
        """Stop both servers and their tasks, within seconds even if clients are slow."""
        if self._processes is not None:
            await self._processes.stop()
        if self._live_view is not None:
            await self._live_view.feed.close()
        if self._batches is not None:
            await self._batches.stop()
        self._http.should_exit = True
        if self._rpc is not None:
            await self._rpc.stop(_STOP_SECONDS)
        if not self._tasks:
            return
        http, *others = self._tasks
        for task in others:
            task.cancel()
        await asyncio.wait([*others, http], timeout=2 * _STOP_SECONDS)
        http.cancel()
        await asyncio.wait([http], timeout=_STOP_SECONDS)
        self._closing.close()


_LOGGER = logging.getLogger("orca.limits")

_OTHERS = 512  # for files, workers, the model's weights and refused connections


def with_room(options: EndpointOptions) -> EndpointOptions:
    """Raise the process's limit on open files as far as needed and allowed.

    If that is not enough, return options with a lower `max_connections` and log a warning.
    """
    n_endpoints = 1 if options.grpc_port is None else 2
    needed = n_endpoints * options.max_connections + _OTHERS
    limit = _raised(needed)
    if limit >= needed:
        return options
    most = max((limit - _OTHERS) // n_endpoints, 1)
    _LOGGER.warning(
        "max_connections is %d, not %d: the process may have %d files open (ulimit -n), and %d are needed",
        *(most, options.max_connections, limit, needed),
    )
    return replace(options, max_connections=most)


def _raised(needed: int) -> int:
    """Raise the soft limit towards `needed`; return the limit that now applies, at most `needed`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        return soft
    return allowed
