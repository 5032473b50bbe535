"""The metrics at `/metrics`: the server's, the process's and, once a model is loaded, the engine's."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

import orca_jax
from server.gateway.gateway import Gateway, Phase
from server.gateway.served_model import ServedModel
from server.metrics.engine_metrics import EngineMetrics
from server.process.log_writer import LogWriter
from server.process.watchdog import LONG, Watchdog
from server.settings.endpoint_options import MetricNames

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


@dataclass(frozen=True, slots=True)
class _LoopState:
    """State that only the event loop may read. `n_tasks` is None if no event loop runs."""

    phase: Phase
    n_live: int
    n_tasks: int | None


class Metrics(Collector):
    """The metrics of one server, in a separate registry so that several servers in one process do not mix.

    Use it on the gateway's event loop; the engine's threads write only to the `EngineMetrics` that `attach`
    makes. A scrape is rendered on a thread, because it takes milliseconds and anyone may ask without a key.
    """

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(
        self,
        gateway: Gateway,
        names: MetricNames = "orca",
        *,
        log: LogWriter | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._gateway = gateway
        self._log, self._watchdog = log, watchdog
        self._names: MetricNames = names
        self._engine: EngineMetrics | None = None
        self._others: tuple[Callable[[], Iterable[Metric]], ...] = ()
        self.n_live_elsewhere: Callable[[], int] = lambda: 0  # requests of endpoint processes
        self._loop_state = self._read_loop_state()
        self._rendering: asyncio.Task[bytes] | None = None
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self._http = Counter(
            "orca_http_requests",
            "HTTP requests answered.",
            ["path", "method", "status"],
            registry=self.registry,
        )
        self._grpc = Counter(
            "orca_grpc_requests", "gRPC calls answered.", ["method", "code"], registry=self.registry
        )
        self.registry.register(self)

    def attach(self, model: ServedModel, *others: Callable[[], Iterable[Metric]]) -> None:
        """Observe the model's engine. Call it while no request is live.

        `others` make more metrics on each scrape, on any thread.
        """
        self._engine = EngineMetrics(model, self._names)
        self._others = others
        timeline = model.orca.timeline
        timeline.observers = (*timeline.observers, self._engine)

    def http_request(self, path: str, method: str, status: int, n: int = 1) -> None:
        """Count `n` HTTP requests. `path` is their route's template, so that clients cannot create labels."""
        self._http.labels(path, method if method in _METHODS else "other", str(status)).inc(n)

    def answered_elsewhere(self, counts: Mapping[tuple[str, str, int], int]) -> None:
        """Count requests by path, method and status, which an endpoint process has answered."""
        for (path, method, status), n in counts.items():
            self.http_request(path, method, status, n)

    def http_refusal(self, status: int) -> None:
        """Count a refusal before the application: malformed, too large, too slow or over a limit."""
        self.http_request("other", "other", status)

    def grpc_request(self, method: str, code: str) -> None:
        """Count a gRPC call by the name of a known method and the name of its final status."""
        self._grpc.labels(method, code).inc()

    def render(self) -> bytes:
        """Write all metrics in Prometheus's text format (`content_type`)."""
        self._loop_state = self._read_loop_state()
        return generate_latest(self.registry)

    async def scrape(self) -> bytes:
        """Render on a thread. Concurrent callers share one rendering."""
        if self._rendering is None:
            self._loop_state = self._read_loop_state()
            self._rendering = asyncio.create_task(asyncio.to_thread(generate_latest, self.registry))
            self._rendering.add_done_callback(self._rendered)
        return await asyncio.shield(self._rendering)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics but those of the process and the request counters, which the registry has."""
        state = self._loop_state
        yield InfoMetricFamily("orca_build", "What is running.", {"version": orca_jax.__version__})
        phase = GaugeMetricFamily("orca_server_phase", "1 for the phase the server is in.", labels=["phase"])
        for each in Phase:
            phase.add_metric([each.value], each is state.phase)
        yield phase
        yield GaugeMetricFamily(
            "orca_live_streams", "Requests whose clients have not received all output yet.", state.n_live
        )
        if state.n_tasks is not None:
            yield GaugeMetricFamily("orca_asyncio_tasks", "Tasks on the event loop.", state.n_tasks)
        if self._log is not None:
            text = "Log lines that were dropped because nobody read them."
            yield CounterMetricFamily("orca_log_lines_dropped", text, self._log.n_dropped)
        if self._watchdog is not None:
            yield from _holds(self._watchdog)
        if self._engine is not None:
            yield from self._engine.collect()
        for collect in self._others:
            yield from collect()

    def _read_loop_state(self) -> _LoopState:
        try:
            n_tasks = len(asyncio.all_tasks())
        except RuntimeError:  # no event loop runs on this thread
            n_tasks = None
        n_live = self._gateway.n_live + self.n_live_elsewhere()
        return _LoopState(self._gateway.phase, n_live, n_tasks)

    def _rendered(self, _: object) -> None:
        self._rendering = None


def _holds(watchdog: Watchdog) -> Iterator[Metric]:
    """Report how long something held the event loop or the GIL, while nobody else was answered."""
    longest = GaugeMetricFamily(
        "orca_longest_hold_seconds", "Longest hold since the last scrape.", labels=["what"]
    )
    number = CounterMetricFamily("orca_long_holds", f"Holds of {LONG:g} seconds and more.", labels=["what"])
    for what, seconds, n in zip(
        ("event loop", "gil"), watchdog.take_longest(), (watchdog.n_loop, watchdog.n_gil), strict=True
    ):
        longest.add_metric([what], seconds)
        number.add_metric([what], n)
    yield longest
    yield number
