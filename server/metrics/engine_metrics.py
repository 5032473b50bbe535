"""An engine's metrics for Prometheus: counters and histograms fed by its timeline, and gauges read on scrape.

The names match other engines' dashboards, with the prefix `orca_`, or are vLLM's own (`metric_name`; source:
vllm/v1/metrics/loggers.py of vLLM 0.32), which routers of the Gateway API inference extension and dashboards
know. What vLLM counts differently keeps our name: its `iteration_tokens_total`, for instance, counts the
tokens that come out of an iteration besides those that go in. Every metric has the label `model_name`.
"""

import threading
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from orca_jax.request.request import FinishReason
from orca_jax.scheduling.cache_kinds import slots_to_reserve
from orca_jax.scheduling.select import Why
from orca_jax.scheduling.timeline import IterationRecord, RequestRecord
from orca_jax.service.orca import Orca
from server.gateway.served_model import CompileCounts, ServedModel
from server.metrics.worker_metrics import WorkerMetrics
from server.settings.router_options import MetricNames

_SAME_IN_VLLM = frozenset(
    (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
        *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens"),
        *("generation_tokens", "request_success", "request_prompt_tokens", "request_generation_tokens"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
        "request_queue_time_seconds",
    )
)
_ENGINE = "0"  # vLLM numbers the engines of a server; ours has one
_VLLM_REASONS = {FinishReason.CANCELLED: "abort", FinishReason.TIMEOUT: "abort"}


@dataclass(frozen=True, slots=True)
class MetricName:
    """A metric's whole name, and the names and values of the labels that all its samples have."""

    name: str
    labels: tuple[str, ...]
    values: tuple[str, ...]
    is_vllm: bool

    def reason(self, reason: FinishReason) -> str:
        """How the label `finished_reason` says it."""
        return _VLLM_REASONS.get(reason, reason.value) if self.is_vllm else reason.value


def metric_name(name: str, model: str, names: MetricNames) -> MetricName:
    """The metric that our code calls `name`, of the model that clients call `model`."""
    if names == "vllm" and name in _SAME_IN_VLLM:
        return MetricName(f"vllm:{name}", ("model_name", "engine"), (model, _ENGINE), is_vllm=True)
    return MetricName(f"orca_{name}", ("model_name",), (model,), is_vllm=False)


def engine_load(service: Orca) -> float:
    """The slots that all live requests may take to their ends, over all slots of the engine.

    Above 1 not all live requests fit to their ends. Admitted requests count with what Algorithm 1 promises
    them, `max_tokens` in whole blocks, and waiting ones with what they will ask for. So a request counts the
    same from its arrival to its end, whatever the policy reserves and however far it is. Blocks that several
    requests share count for each of them.

    For any thread; O(live requests), microseconds for a full batch and below a millisecond for a full queue.
    """
    kv = service.scheduler.kv
    n_slots = sum([slots_to_reserve(req, kv.block_size) for req in service.pool.live()])
    return n_slots / (kv.n_blocks * kv.block_size)


def batch_load(service: Orca) -> float:
    """The places that all live requests take in a batch, over the places of all batches in flight.

    Above 1 requests wait for a place, even where slots are left. A beam search takes a place for each beam.
    For any thread; O(live requests).
    """
    scheduler = service.scheduler
    n_places = scheduler.config.max_batch_size * scheduler.engine.n_workers
    return sum([req.kind.n_rows for req in service.pool.live()]) / n_places


_MANY = 32  # from this many values on numpy is faster than a loop


class Histogram:
    """Counts of values by ascending, inclusive upper bounds, with one bucket above the last bound.

    Not thread-safe: callers that share it need a lock.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._limits: npt.NDArray[np.float64] = np.asarray(self._bounds, np.float64)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Count many values. An `array` of doubles is fastest."""
        if len(values) < _MANY:
            for value in values:
                self.observe(value)
            return
        numbers = np.asarray(values, np.float64)
        counts = np.bincount(np.searchsorted(self._limits, numbers), minlength=len(self._counts))
        self._counts = [a + b for a, b in zip(self._counts, counts.tolist(), strict=True)]
        self._sum += float(numbers.sum())

    def read(self) -> tuple[list[int], float]:
        """The count of each bucket, in order, ending with the one above the last bound, and the sum."""
        return list(self._counts), self._sum


_LABELS = ("model_name",)
_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)

# Upper bounds of histogram buckets, in seconds:
_WAIT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
_WHOLE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# Upper bounds of histogram buckets, as counts:
_TOKENS = tuple(float(n * 10**power) for power in range(6) for n in (1, 2, 5))
_ROWS = tuple(float(1 << power) for power in range(13))
_BATCH_TOKENS = (1.0, *(float(1 << power) for power in range(3, 18)))


class EngineMetrics:
    """Observes the timeline, on the timeline's threads. `collect` may be called on any thread.

    Prompt tokens count when the first output token comes, because only then have they been processed.
    End-to-end latency, normalized latency and tokens per request cover requests that ended with `stop` or
    `length`; queue time covers requests that got a first token. Requests that were already live when
    observation began are not counted correctly.
    """

    def __init__(self, model: ServedModel, names: MetricNames = "orca") -> None:
        self._model = model
        self._names: MetricNames = names
        self._workers = WorkerMetrics(model)
        self._lock = threading.Lock()  # held only briefly: the scheduler waits for it
        self._arrived_before = model.service.timeline.n_arrived
        self._n_prompt_tokens = 0
        self._n_output_tokens = 0
        self._n_iterations = 0
        self._n_padding = 0
        self._n_ended = dict.fromkeys(FinishReason, 0)
        self._histograms: dict[str, tuple[str, Sequence[float], Histogram]] = {}

        new = self._histogram
        self._first_token = new(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _WAIT
        )
        self._queue_time = new(
            "request_queue_time_seconds", "From a request's arrival to its first iteration.", _WAIT
        )
        self._gap = new(
            "inter_token_latency_seconds", "From a token to the next of the same request.", _TOKEN
        )
        self._latency = new(
            "e2e_request_latency_seconds", "From a request's arrival to its end, if it completed.", _WHOLE
        )
        self._normalized = new(
            "request_normalized_latency_seconds_per_token",
            "End-to-end latency over generated tokens (ORCA 6.2), of complete requests.",
            _TOKEN,
        )
        self._request_input = new("request_prompt_tokens", "Prompt tokens of complete requests.", _TOKENS)
        self._request_output = new(
            "request_generation_tokens", "Generated tokens of complete requests.", _TOKENS
        )
        self._rows = new("iteration_batch_size", "Requests in an iteration.", _ROWS)
        self._tokens = new("iteration_tokens", "Input tokens of an iteration.", _BATCH_TOKENS)
        self._bucket = new(
            "iteration_bucket_tokens", "Input tokens of an iteration, padding included.", _BATCH_TOKENS
        )
        self._seconds = new("iteration_seconds", "From an iteration's issue to its return.", _TOKEN)

    # Called by the timeline.

    def returned(self, record: IterationRecord) -> None:
        assert record.returned is not None
        n_tokens = record.n_tokens
        with self._lock:
            self._n_iterations += 1
            self._n_padding += record.bucket - n_tokens
            self._rows.observe(record.n_rows)
            self._tokens.observe(n_tokens)
            self._bucket.observe(record.bucket)
            self._seconds.observe(record.returned - record.issued)

    def delivered(self, gaps: "array[float]", first: Sequence[RequestRecord]) -> None:
        """An iteration's tokens were delivered: `first` are the requests that got their first token.

        `gaps` are the seconds since the previous token of each other request.
        """
        with self._lock:
            self._n_output_tokens += len(gaps) + len(first)
            self._gap.observe_all(gaps)
            for record in first:
                assert record.time_to_first_token is not None and record.queue_time is not None
                self._n_prompt_tokens += record.n_input
                self._first_token.observe(record.time_to_first_token)
                self._queue_time.observe(record.queue_time)

    def ended(self, record: RequestRecord) -> None:
        assert record.finish_reason is not None and record.finished is not None
        with self._lock:
            self._n_ended[record.finish_reason] += 1
            if record.finish_reason in _COMPLETE:
                assert record.normalized_latency is not None
                self._latency.observe(record.finished - record.arrived)
                self._normalized.observe(record.normalized_latency)
                self._request_input.observe(record.n_input)
                self._request_output.observe(record.n_output)

    # Called on a scrape.

    def collect(self) -> Iterator[Metric]:
        """All metrics. Counters and histograms are a consistent snapshot."""
        with self._lock:
            n_arrived = self._model.service.timeline.n_arrived - self._arrived_before
            counts = (
                ("requests", "Requests accepted.", n_arrived),
                ("prompt_tokens", "Prompt tokens processed.", self._n_prompt_tokens),
                ("generation_tokens", "Tokens generated.", self._n_output_tokens),
                ("iterations", "Iterations completed.", self._n_iterations),
                ("iteration_padding_tokens", "Padding tokens computed.", self._n_padding),
            )
            ended = dict(self._n_ended)
            histograms = {name: histogram.read() for name, (_, _, histogram) in self._histograms.items()}
        for name, documentation, count in (*counts, *self._of_scheduler()):
            full = self._name(name)
            counter = CounterMetricFamily(full.name, documentation, labels=full.labels)
            counter.add_metric(full.values, count)
            yield counter
        full = self._name("request_success")
        reasons = CounterMetricFamily(
            full.name, "Requests that ended, by reason.", labels=(*full.labels, "finished_reason")
        )
        by_reason: Counter[str] = Counter()
        for reason, count in ended.items():
            by_reason[full.reason(reason)] += count
        for reason, count in by_reason.items():
            reasons.add_metric((*full.values, reason), count)
        yield reasons
        for name, (documentation, bounds, _) in self._histograms.items():
            full = self._name(name)
            histogram = HistogramMetricFamily(full.name, documentation, labels=full.labels)
            histogram.add_metric(full.values, *_cumulative(bounds, *histograms[name]))
            yield histogram
        for name, documentation, value in self._gauges():
            full = self._name(name)
            gauge = GaugeMetricFamily(full.name, documentation, labels=full.labels)
            gauge.add_metric(full.values, value)
            yield gauge
        yield self._held()
        yield self._cache_config()
        if self._model.compiles is not None:
            yield from _compiles(self._model.compiles(), [self._model.name])
        yield from self._workers.collect()

    def _of_scheduler(self) -> tuple[tuple[str, str, int], ...]:
        """What the scheduler and the prefix cache count themselves; without a cache its counts are 0."""
        scheduler = self._model.service.scheduler
        prefixes = scheduler.kv.prefixes
        n_queries, n_hits, n_evictions = (
            (0, 0, 0) if prefixes is None else (prefixes.n_queries, prefixes.n_hits, prefixes.n_evictions)
        )
        return (
            ("num_preemptions", "Requests preempted for others.", scheduler.n_preemptions),
            ("recomputed_tokens", "Tokens computed again after preemptions.", scheduler.n_recomputed),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", n_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", n_hits),
            ("prefix_cache_evictions", "Blocks evicted from the prefix cache.", n_evictions),
        )

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        service = self._model.service
        pool, kv = service.pool, service.scheduler.kv
        n_reserved = service.scheduler.n_rsrv
        # The newest token of a request is not in the cache yet. Before the first, only cached tokens count.
        used = sum([req.n_tokens - 1 if req.output_ids else req.n_cached for req in pool.admitted()])
        n_held = sum(kv.slots_of) + int(kv.encoder_blocks.sum()) * kv.block_size
        n_shared = n_held - n_reserved  # held by several requests, and counted for each
        # The scheduler's thread may have changed one of these meanwhile.
        used = min(max(0, used - n_shared), n_reserved)
        yield "num_requests_running", "Requests admitted to iterations.", pool.n_running
        yield "num_requests_waiting", "Requests waiting to be admitted.", pool.n_waiting
        yield (
            "kv_cache_usage_perc",
            "K/V cache blocks in use, as a fraction from 0 to 1.",
            1 - kv.n_free_blocks / kv.n_blocks,
        )
        yield "engine_load", "Slots that live requests may take, over all slots.", engine_load(service)
        yield "batch_load", "Batch places that live requests take, over all places.", batch_load(service)
        yield "slots_total", "Slots: tokens whose keys and values fit.", kv.n_blocks * kv.block_size
        yield "slots_reserved", "Slots reserved for requests (n_rsrv).", n_reserved
        yield "slots_used", "Slots that hold a token's keys and values.", used
        n_cached = 0 if kv.prefixes is None else len(kv.prefixes)
        yield "prefix_cache_blocks", "Blocks that the prefix cache can find.", n_cached

    def _held(self) -> Metric:
        full = self._name("request_held")
        gauge = GaugeMetricFamily(
            full.name, "1 for why a request had to wait at the last choice.", labels=(*full.labels, "reason")
        )
        held = self._model.service.scheduler.held
        for reason in get_args(Why):
            gauge.add_metric((*full.values, reason), held is not None and held[1] == reason)
        return gauge

    def _cache_config(self) -> Metric:
        """A gauge that is always 1 and says in its labels how large the K/V cache is, as vLLM's."""
        kv = self._model.service.scheduler.kv
        facts = {
            "block_size": kv.block_size,
            "num_gpu_blocks": kv.n_blocks,
            "enable_prefix_caching": kv.prefixes is not None,
        }
        full = self._name("cache_config_info")
        gauge = GaugeMetricFamily(
            full.name, "The size of the K/V cache in its labels.", labels=(*full.labels, *facts)
        )
        gauge.add_metric((*full.values, *map(str, facts.values())), 1)
        return gauge

    def _name(self, name: str) -> MetricName:
        return metric_name(name, self._model.name, self._names)

    def _histogram(self, name: str, documentation: str, bounds: Sequence[float]) -> Histogram:
        histogram = Histogram(bounds)
        self._histograms[name] = (documentation, bounds, histogram)
        return histogram


def _compiles(counts: CompileCounts, label: Sequence[str]) -> Iterator[Metric]:
    for name, documentation, count in (
        ("compiles", "Programs that JAX compiled or read from disk in this process.", counts.programs),
        ("compiles_from_disk", "Programs that JAX read from disk.", counts.from_disk),
        ("compile_seconds", "Time spent compiling or reading programs, summed over threads.", counts.seconds),
    ):
        counter = CounterMetricFamily(f"orca_{name}", documentation, labels=_LABELS)
        counter.add_metric(label, count)
        yield counter


def _cumulative(
    bounds: Sequence[float], counts: Sequence[int], total: float
) -> tuple[list[tuple[str, float]], float]:
    """A histogram in Prometheus's form: cumulative counts by upper bound, and the sum of all values."""
    buckets: list[tuple[str, float]] = []
    n = 0
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        n += count
        buckets.append((floatToGoString(bound), n))
    return buckets, total
