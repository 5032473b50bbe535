"""An endpoint process: `python -m server.endpoint_processes.main LINE LISTENER`, the numbers of two sockets.

The engine's process starts it (supervisor.py), and it ends when its line does.
"""

import asyncio
import contextlib
import socket
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from orca_jax.errors import EngineError, QueueFull
from server.endpoint_processes.forwarding import Forwarding
from server.endpoint_processes.line import MOST_BYTES, Unpacker, packed
from server.endpoint_processes.messages import (
    Accepted,
    Begin,
    Delivered,
    Drain,
    Drained,
    Loaded,
    Refused,
    Report,
    Status,
)
from server.endpoint_processes.remote_service import RemoteService
from server.gateway.gateway import Gateway
from server.gateway.served_model import ServedModel
from server.gateway.side_threads import n_very_long
from server.http.app import create_app
from server.http.connections.server import HttpServer
from server.metrics.access_log import configure_logging
from server.metrics.metrics import Metrics
from server.process.freed_memory import give_back
from server.process.log_writer import LogWriter
from server.process.watchdog import Watchdog, settle
from server.settings.endpoint_options import EndpointOptions

LOCAL = frozenset(("/v1/completions", "/v1/chat/completions", "/v1/messages"))  # routes with POST
_REPORT_SECONDS = 1.0
_STOP_SECONDS = 5  # for complete answers to reach their clients
_LOG_SECONDS = 2.0  # for the last log lines to be read


class EngineLine(asyncio.Protocol):
    """The endpoint process's end of the line. `on_message` takes each message, and `on_lost` its end."""

    def __init__(self, on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._unpacker = Unpacker()
        self._transport: asyncio.Transport | None = None

    def send(self, message: object) -> None:
        """Send a message; nothing happens once the line is lost. Raises QueueFull if too much waits."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > MOST_BYTES:
            raise QueueFull("too many requests wait for the engine's process; try again later")
        transport.write(packed(message))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.feed(data):
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()


class CountedAnswers(Metrics):
    """Counts answers until they are taken: the engine's process has the metrics."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._counts = Counter[tuple[str, str, int]]()

    def http_request(self, path: str, method: str, status: int, n: int = 1) -> None:
        self._counts[path, method, status] += n

    def take(self) -> dict[tuple[str, str, int], int]:
        counts, self._counts = self._counts, Counter()
        return dict(counts)


class Divided:
    """ASGI application: `app` answers the routes that generate, and `others` all others."""

    def __init__(self, app: ASGIApp, others: ASGIApp) -> None:
        self._app, self._others = app, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_local = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in LOCAL
        await (self._app if is_local else self._others)(scope, receive, send)


class EndpointProcess:
    """One endpoint process, from its first message on."""

    def __init__(self, begin: Begin, line: EngineLine) -> None:
        self._options: EndpointOptions = begin.options
        self._line = line
        self._gateway = Gateway(request_timeout=begin.options.request_timeout)
        self._metrics = CountedAnswers(self._gateway)
        self._others = Forwarding(begin.others_at)
        app = create_app(self._gateway, begin.options, api_keys=begin.api_keys, metrics=self._metrics)
        self._http = HttpServer(
            Divided(app, self._others),
            begin.options,
            stop_seconds=_STOP_SECONDS,
            refused=self._metrics.http_refusal,
        )
        self._watchdog = Watchdog(self._gateway.loop)
        self._service: RemoteService | None = None
        self._draining: asyncio.Task[None] | None = None
        self.over = asyncio.Event()  # the process has nothing left to do

    async def serve(self, listener: socket.socket) -> None:
        """Serve until it is `over`."""
        tasks = [
            asyncio.create_task(self._http.serve(sockets=[listener]), name="http"),
            asyncio.create_task(self._gateway.watch(), name="gateway"),
            asyncio.create_task(give_back(n_very_long), name="freed memory"),
            asyncio.create_task(self._report(), name="reports"),
        ]
        over = asyncio.create_task(self.over.wait())
        try:
            await asyncio.wait([over, tasks[0]], return_when=asyncio.FIRST_COMPLETED)
            self._http.should_exit = True
            await asyncio.wait(tasks[:1], timeout=2 * _STOP_SECONDS)
        finally:
            self._watchdog.stop()
            for task in (over, *tasks):
                task.cancel()
            await asyncio.gather(over, *tasks, return_exceptions=True)
            await self._others.close()

    def take(self, message: Any) -> None:
        """Handle a message after the first."""
        service = self._service
        match message:
            case Loaded():
                self._open(message)
            case Drain():
                if self._draining is not None:
                    self._draining.cancel()
                self._draining = asyncio.create_task(self._drain(message.seconds))
            case _ if service is None:
                raise AssertionError(f"{type(message).__name__} before Loaded")
            case Delivered():
                service.delivered(message)
            case Accepted():
                service.accepted(message)
            case Refused():
                service.refused(message)
            case Status():
                service.follow(message)
            case _:
                raise AssertionError(f"{type(message).__name__} on the line")

    def lose(self) -> None:
        """The engine's process is gone."""
        if self._service is not None:
            self._service.lose(EngineError("the engine's process has ended"))
        self.over.set()

    def _open(self, loaded: Loaded) -> None:
        if loaded.chat_template is not None:
            loaded.chat_template.read_ahead()
        self._service = RemoteService(loaded, self._line.send)
        model = ServedModel(
            name=loaded.name,
            service=self._service,
            config=loaded.config,
            serving=loaded.serving,
            tokenizer=loaded.tokenizer,
            chat_template=loaded.chat_template,
            tool_format=loaded.tool_format,
            reasoning_format=loaded.reasoning_format,
            defaults=loaded.defaults,
            shows_versions=loaded.shows_versions,
            created=loaded.created,
        )
        settle()
        self._gateway.open(model)
        self._watchdog.start()

    async def _drain(self, seconds: float) -> None:
        n_ended = await self._gateway.drain(seconds)
        self._send_report()
        self._line.send(Drained(n_ended))
        self.over.set()

    async def _report(self) -> None:
        """Report once a second, and end what was dropped."""
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            if self._service is not None:
                self._service.end_dropped()
                self._send_report()

    def _send_report(self) -> None:
        with contextlib.suppress(QueueFull):
            self._line.send(Report(self._gateway.n_live, self._metrics.take()))


async def _run(line_number: int, listener_number: int) -> None:
    loop = asyncio.get_running_loop()
    process: EndpointProcess | None = None
    first: asyncio.Future[Begin | None] = loop.create_future()
    early = list[Any]()  # messages before the process is made

    def on_message(message: Any) -> None:
        if not first.done():
            first.set_result(message)
        elif process is None:
            early.append(message)
        else:
            process.take(message)

    def on_lost() -> None:
        if not first.done():
            first.set_result(None)
        elif process is not None:
            process.lose()

    _, line = await loop.create_connection(
        lambda: EngineLine(on_message, on_lost), sock=socket.socket(fileno=line_number)
    )
    begin = await first
    if begin is None:
        return
    log = LogWriter(sys.stderr.fileno())
    configure_logging(begin.options.access_log, log)
    process = EndpointProcess(begin, line)
    for message in early:
        process.take(message)
    with socket.socket(fileno=listener_number) as listener:
        await process.serve(listener)
    log.close(_LOG_SECONDS)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(int(sys.argv[1]), int(sys.argv[2])))
