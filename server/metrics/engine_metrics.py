"""An engine's metrics for Prometheus: counters and histograms fed by its timeline, and gauges read on scrape.

The names match other engines' dashboards, with the prefix `orca_`, or are vLLM's own (source:
vllm/v1/metrics/loggers.py of vLLM 0.32), which routers of the Gateway API inference extension and dashboards
know. What vLLM counts differently keeps our name: its `iteration_tokens_total`, for instance, counts the
tokens that come out of an iteration in addition to those that go in. Every metric has the label `model_name`.
"""

import threading
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from orca_jax.engine.stage_counters import RemoteCounters, StageCounters
from orca_jax.request.request import FinishReason, Request
from orca_jax.scheduling.cache_kinds import slots_to_reserve
from orca_jax.scheduling.select import Why
from orca_jax.scheduling.timeline import IterationRecord, RequestRecord, TimelineObserver
from orca_jax.service.orca import Orca
from server.gateway.served_model import ServedModel
from server.settings.endpoint_options import MetricNames

_LABELS = ("model_name",)
_STAGE_LABELS = (*_LABELS, "stage")


@runtime_checkable
class Workers(Protocol):
    """An engine's `workers` if they are processes: they have counters."""

    @property
    def counters(self) -> RemoteCounters: ...
    @property
    def stages(self) -> Sequence[StageCounters]: ...


def workers_of(model: ServedModel) -> Workers | None:
    """Return the worker processes of a model's engine; None for an engine without them."""
    workers = getattr(model.orca.scheduler.engine, "workers", None)
    return workers if isinstance(workers, Workers) else None


def worker_metrics(model: ServedModel) -> Iterator[Metric]:
    """Yield the metrics of a model's worker processes, on any thread."""
    recovery = model.orca.recovery
    if not recovery.recoverable:
        return
    counts: list[tuple[str, str, float]] = [
        ("worker_losses", "Workers lost.", recovery.losses),
        ("worker_recoveries", "Recoveries from lost workers.", recovery.recoveries),
        ("worker_blamed_requests", "Requests ended because they killed workers.", recovery.n_blamed),
        ("worker_down_seconds", "Time from losing workers to recovery, in total.", recovery.down_seconds),
    ]
    workers = workers_of(model)
    if workers is not None:
        sent = workers.counters
        counts += [
            ("control_messages", "Control messages sent.", sent.messages),
            ("control_message_bytes", "Bytes of control messages.", sent.message_bytes),
            ("control_stale_frames", "Frames from an earlier epoch.", sent.stale),
            ("control_duplicate_frames", "Frames received twice.", sent.duplicates),
            ("control_rubbish_frames", "Malformed frames.", sent.malformed),
        ]
    for name, documentation, count in counts:
        counter = CounterMetricFamily(f"orca_{name}", documentation, labels=_LABELS)
        counter.add_metric([model.name], count)
        yield counter
    last = GaugeMetricFamily(
        "orca_worker_last_recovery_seconds",
        "Duration of the latest completed recovery, from loss to recovery.",
        labels=_LABELS,
    )
    if recovery.last_recovery_seconds is not None:
        last.add_metric([model.name], recovery.last_recovery_seconds)
    yield last
    if workers is not None:
        yield from _stages(model.name, workers.stages, recovery.troubled_stage)


def _stages(model: str, stages: Sequence[StageCounters], troubled: int | None) -> Iterator[Metric]:
    up = GaugeMetricFamily("orca_worker_up", "0 for a lost stage, else 1.", labels=_STAGE_LABELS)
    link_bytes = CounterMetricFamily(
        "orca_link_bytes", "Bytes of activations sent to the next stage.", labels=_STAGE_LABELS
    )
    # The last stage returns tokens instead of reporting an iteration as done, so only `received` compares.
    iterations = CounterMetricFamily(
        "orca_stage_iterations", "Iterations received by the stage.", labels=_STAGE_LABELS
    )
    for index, stage in enumerate(stages):
        label = [model, str(index + 1)]
        up.add_metric(label, index != troubled)
        link_bytes.add_metric(label, stage.link_bytes)
        iterations.add_metric(label, stage.received)
    yield from (up, link_bytes, iterations)


_SAME_IN_VLLM = frozenset(
    (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
        *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens"),
        *("generation_tokens", "request_success", "request_prompt_tokens", "request_generation_tokens"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *(
            "request_queue_time_seconds",
            "lora_requests_info",
            "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens",
        ),
    )
)
_ENGINE = "0"  # vLLM numbers the engines of a server; ours has one
_VLLM_REASONS = {FinishReason.CANCELLED: "abort", FinishReason.TIMEOUT: "abort"}


def engine_load(service: Orca) -> float:
    """Compute the slots that all live requests may need until they end, as a fraction of the engine's slots.

    Above 1 the live requests do not all fit until they end. From its arrival to its end a request counts with
    its `max_tokens` in whole blocks, as Algorithm 1 reserves them, whatever the policy reserves and however
    far the request is. Blocks that several requests share count for each of them.

    For any thread; O(live requests), microseconds for a full batch and below a millisecond for a full queue.
    """
    kv = service.scheduler.kv
    n_slots = sum([slots_to_reserve(req, kv.block_size) for req in service.pool.live()])
    return n_slots / (kv.n_blocks * kv.block_size)


def batch_load(service: Orca) -> float:
    """Compute the rows that all live requests need, as a fraction of the rows of all batches in flight.

    Above 1 requests wait for a row, even where slots are left. A beam search needs a row for each beam.
    For any thread; O(live requests).
    """
    scheduler = service.scheduler
    n_places = scheduler.config.max_batch_size * scheduler.engine.n_workers
    return sum([req.kind.n_rows for req in service.pool.live()]) / n_places


_MANY = 32  # values from which numpy is faster than a loop


class Histogram:
    """A histogram with ascending, inclusive upper bounds, and one bucket above the last bound.

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
        """Return the count of each bucket, in the order of the bounds, and the sum of all values."""
        return list(self._counts), self._sum


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


# Each histogram's documentation and bounds, by its name.
_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", _WAIT),
    "request_queue_time_seconds": ("From a request's arrival to its first iteration.", _WAIT),
    "inter_token_latency_seconds": ("From a token to the next of the same request.", _TOKEN),
    "e2e_request_latency_seconds": ("From a request's arrival to its end, if it completed.", _WHOLE),
    "request_normalized_latency_seconds_per_token": (
        "End-to-end latency over generated tokens (ORCA 6.2), of complete requests.",
        _TOKEN,
    ),
    "request_prompt_tokens": ("Prompt tokens of complete requests.", _TOKENS),
    "request_generation_tokens": ("Generated tokens of complete requests.", _TOKENS),
    "iteration_batch_size": ("Requests in an iteration.", _ROWS),
    "iteration_tokens": ("Input tokens of an iteration.", _BATCH_TOKENS),
    "iteration_bucket_tokens": ("Input tokens of an iteration, padding included.", _BATCH_TOKENS),
    "iteration_seconds": ("From an iteration's issue to its return.", _TOKEN),
}


class EngineMetrics(TimelineObserver):
    """Observes the timeline, on the timeline's threads. `collect` may be called on any thread.

    Prompt tokens count when the first output token comes, because only then have they been processed.
    End-to-end latency, normalized latency and tokens per request cover requests that ended with `stop` or
    `length`; queue time covers requests that got a first token. Requests that were already live when
    observation began are not counted correctly.
    """

    def __init__(self, model: ServedModel, names: MetricNames = "orca") -> None:
        self._model = model
        self._names: MetricNames = names
        self._lock = threading.Lock()  # held only briefly: the scheduler waits for it
        self._arrived_before = model.orca.timeline.n_arrived
        self._n_prompt_tokens = 0
        self._n_output_tokens = 0
        self._n_iterations = 0
        self._n_padding = 0
        self._n_ended = dict.fromkeys(FinishReason, 0)
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._first_token = self._histograms["time_to_first_token_seconds"]
        self._queue_time = self._histograms["request_queue_time_seconds"]
        self._gap = self._histograms["inter_token_latency_seconds"]
        self._latency = self._histograms["e2e_request_latency_seconds"]
        self._normalized = self._histograms["request_normalized_latency_seconds_per_token"]
        self._request_input = self._histograms["request_prompt_tokens"]
        self._request_output = self._histograms["request_generation_tokens"]
        self._rows = self._histograms["iteration_batch_size"]
        self._tokens = self._histograms["iteration_tokens"]
        self._bucket = self._histograms["iteration_bucket_tokens"]
        self._seconds = self._histograms["iteration_seconds"]

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
        """Count an iteration's tokens: the first token of each request in `first`, and one for each gap.

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

    def ended(self, record: RequestRecord, request: Request) -> None:
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
        """Yield all metrics. Counters and histograms are a consistent snapshot."""
        with self._lock:
            n_arrived = self._model.orca.timeline.n_arrived - self._arrived_before
            counts = (
                ("requests", "Requests accepted.", n_arrived),
                ("prompt_tokens", "Prompt tokens processed.", self._n_prompt_tokens),
                ("generation_tokens", "Tokens generated.", self._n_output_tokens),
                ("iterations", "Iterations completed.", self._n_iterations),
                ("iteration_padding_tokens", "Padding tokens computed.", self._n_padding),
            )
            ended = dict(self._n_ended)
            histograms = {name: histogram.read() for name, histogram in self._histograms.items()}
        for name, documentation, count in (*counts, *self._scheduler_counts(), *self._compile_counts()):
            yield self._metric(CounterMetricFamily, name, documentation, {(): count})
        yield self._ended(ended)
        for name, (documentation, bounds) in _HISTOGRAMS.items():
            full, labels, values = self._name(name)
            counts, total = histograms[name]
            limits = map(floatToGoString, (*bounds, float("inf")))
            histogram = HistogramMetricFamily(full, documentation, labels=labels)
            histogram.add_metric(values, list(zip(limits, accumulate(counts), strict=True)), total)
            yield histogram
        for name, documentation, value in self._gauges():
            yield self._metric(GaugeMetricFamily, name, documentation, {(): value})
        scheduler, n_without = self._model.orca.scheduler, 0
        if (slots := scheduler.adapters) is not None:
            n_without = sum(req.row < 0 and slots.waits(req) for req in scheduler.pool.live())
        reasons = {"adapter": n_without > 0} | ({scheduler.held[1]: True} if scheduler.held else {})
        yield self._metric(
            GaugeMetricFamily,
            "request_held",
            "1 for each reason why the last iteration left a request waiting.",
            {(reason,): reasons.get(reason, False) for reason in get_args(Why)},
            ["reason"],
        )
        yield self._cache_config()
        if self._model.orca.adapter_store is not None:
            yield self._adapters()
        if slots is not None:
            text = "Waiting requests whose LoRA adapter is on its way to the devices."
            yield self._metric(GaugeMetricFamily, "requests_without_adapter", text, {(): n_without})
        yield from worker_metrics(self._model)

    def _scheduler_counts(self) -> tuple[tuple[str, str, int], ...]:
        """Return the counts that the scheduler and the prefix cache keep; 0 without a cache."""
        scheduler = self._model.orca.scheduler
        prefixes = scheduler.kv.prefixes
        n_queries, n_hits, n_evictions = (
            (0, 0, 0) if prefixes is None else (prefixes.n_queries, prefixes.n_hits, prefixes.n_evictions)
        )
        kept = scheduler.kv.snapshots
        host = scheduler.kv.host
        n_stored, n_read, n_lost = (0, 0, 0) if host is None else (host.n_stored, host.n_read, host.n_evicted)
        states = scheduler.kv.host_states
        n_out, n_into, n_gone = (
            (0, 0, 0) if states is None else (states.n_stored, states.n_read, states.n_evicted)
        )
        files = None if scheduler.kv.disk is None else scheduler.kv.disk.files
        n_written, n_loaded, n_bad, n_removed = (
            (0, 0, 0, 0) if files is None else (files.n_written, files.n_read, files.n_bad, files.n_removed)
        )
        leases, arriving = scheduler.kv.leases, scheduler.kv.arriving
        n_granted, n_taken, n_over = (
            (0, 0, 0) if leases is None else (leases.n_granted, leases.n_taken, leases.n_expired)
        )
        n_asked, n_failed, n_blocks = (
            (0, 0, 0) if arriving is None else (arriving.n_asked, arriving.n_failed, arriving.n_blocks)
        )
        n_made, n_used, n_dropped = (0, 0, 0) if kept is None else (kept.n_made, kept.n_used, kept.n_evicted)
        counts = (
            ("num_preemptions", "Requests preempted for others.", scheduler.n_preemptions),
            ("recomputed_tokens", "Tokens computed again after preemptions.", scheduler.n_recomputed),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", n_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", n_hits),
            ("prefix_cache_evictions", "Blocks evicted from the prefix cache.", n_evictions),
            ("kv_host_blocks_stored", "Evicted blocks that went to the host's memory.", n_stored),
            ("kv_host_blocks_read", "Blocks that prompts read in from the host's memory.", n_read),
            ("kv_host_blocks_evicted", "Blocks dropped from the host's memory for others.", n_lost),
            ("kv_host_states_stored", "Snapshots of states that went to the host's memory.", n_out),
            ("kv_host_states_read", "States that prompts read in from the host's memory.", n_into),
            ("kv_host_states_evicted", "States dropped from the host's memory for others.", n_gone),
            ("kv_disk_blocks_written", "Blocks written to the disk tier.", n_written),
            ("kv_disk_blocks_read", "Blocks read from the disk tier.", n_loaded),
            ("kv_disk_blocks_bad", "Blocks that were damaged or missing.", n_bad),
            ("kv_disk_blocks_removed", "Blocks removed for others.", n_removed),
            ("kv_leases_granted", "Prompts kept for other servers.", n_granted),
            ("kv_leases_taken", "Prompts that other servers fetched.", n_taken),
            ("kv_leases_expired", "Prompts that nobody fetched in time.", n_over),
            ("kv_transfers", "Prompts asked of other servers.", n_asked),
            ("kv_transfers_failed", "Prompts that did not come whole, and were computed.", n_failed),
            ("kv_transfer_blocks", "Blocks that came from other servers.", n_blocks),
            ("state_snapshots_made", "Snapshots of recurrent layers' states.", n_made),
            ("state_snapshots_used", "Requests that began with a snapshot.", n_used),
            ("state_snapshots_evicted", "Snapshots dropped to make room for others.", n_dropped),
        )
        made = self._model.orca.speculation
        if made is None:
            return counts
        return (
            *counts,
            ("spec_decode_num_draft_tokens", "Draft tokens verified.", made.n_drafted),
            ("spec_decode_num_accepted_tokens", "Draft tokens that became output.", made.n_accepted),
        )

    def _compile_counts(self) -> Iterator[tuple[str, str, float]]:
        if self._model.compiles is not None:
            n = self._model.compiles()
            yield "compiles", "Programs that JAX compiled or read from disk in this process.", n.programs
            yield "compiles_from_disk", "Programs that JAX read from disk.", n.from_disk
            yield (
                "compile_seconds",
                "Time spent compiling or reading programs, summed over threads.",
                n.seconds,
            )

    def _ended(self, ended: Mapping[FinishReason, int]) -> Metric:
        name = "request_success"
        by_reason: Counter[tuple[str]] = Counter()
        for reason, count in ended.items():
            says_vllm = self._is_vllm(name)
            by_reason[(_VLLM_REASONS.get(reason, reason.value) if says_vllm else reason.value,)] += count
        text = "Requests that ended, by reason."
        return self._metric(CounterMetricFamily, name, text, by_reason, ["finished_reason"])

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        service = self._model.orca
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
        recurrent = self._model.config.has_state  # each reserved row has a state
        yield "states_total", "Recurrent layers' states; 0 without such layers.", recurrent * kv.n_rows
        yield "states_used", "States that requests hold.", recurrent * sum(map(bool, kv.slots_of))
        n_kept, n_snapshots = (0, 0) if kv.snapshots is None else (len(kv.snapshots), kv.snapshots.n)
        yield "state_snapshots_most", "Snapshots of states that fit.", n_snapshots
        yield "state_snapshots", "Snapshots of states in the prefix cache.", n_kept
        n_cached = 0 if kv.prefixes is None else len(kv.prefixes)
        serving = self._model.serving
        n_here = 0 if kv.host is None else len(kv.host)
        n_states = 0 if kv.host_states is None else len(kv.host_states)
        each, state = serving.host_block_bytes, serving.host_state_bytes
        most = serving.n_host_blocks * each + serving.n_host_states * state
        yield "kv_host_blocks", "Blocks in the host's memory that prompts can read in.", n_here
        yield "kv_host_states", "Recurrent layers' states there.", n_states
        yield "kv_host_bytes", "Bytes of both, all stages together.", n_here * each + n_states * state
        yield "kv_host_bytes_most", "Bytes that they may take.", most
        n_blocks, n_bytes = (0, 0) if kv.disk is None else (kv.disk.files.n_blocks, kv.disk.files.n_bytes)
        yield "kv_disk_blocks", "Blocks in the files of the disk tier.", n_blocks
        yield "kv_disk_bytes", "Bytes of these files.", n_bytes
        yield (
            "kv_lease_bytes",
            "Bytes of prompts kept for others.",
            0 if kv.leases is None else kv.leases.n_bytes,
        )
        n_under_way = 0 if kv.arriving is None else kv.arriving.n_under_way
        yield "kv_transfers_under_way", "Requests whose prompts are on their way.", n_under_way
        yield "prefix_cache_blocks", "Blocks that the prefix cache can find.", n_cached

    def _cache_config(self) -> Metric:
        """Make vLLM's gauge that is always 1 and has the size of the K/V cache in its labels."""
        kv = self._model.orca.scheduler.kv
        facts = {
            "block_size": kv.block_size,
            "num_gpu_blocks": kv.n_blocks,
            "enable_prefix_caching": kv.prefixes is not None,
        }
        text = "The size of the K/V cache in its labels."
        sample = {tuple(map(str, facts.values())): 1}
        return self._metric(GaugeMetricFamily, "cache_config_info", text, sample, facts)

    def _adapters(self) -> Metric:
        """Make vLLM's gauge that has LoRA adapters in its labels: those of running and of waiting requests.

        Its value is the time, so that a router knows the newest of several samples.
        """
        service, running, waiting = self._model.orca, set[str](), set[str]()
        for req in service.pool.live():
            if req.adapter is not None:
                (running if req.row >= 0 else waiting).add(req.adapter.name)
        facts = {
            "max_lora": service.scheduler.config.max_loras,
            "running_lora_adapters": ",".join(sorted(running)),
            "waiting_lora_adapters": ",".join(sorted(waiting)),
        }
        text = "The LoRA adapters of running and of waiting requests in its labels; the time is its value."
        sample = {tuple(map(str, facts.values())): time.time()}
        return self._metric(GaugeMetricFamily, "lora_requests_info", text, sample, facts)

    def _metric(
        self,
        family: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        documentation: str,
        samples: Mapping[tuple[str, ...], float],
        labels: Iterable[str] = (),
    ) -> Metric:
        """Make a metric with `samples`, by the values of `labels`, which follow those of the model."""
        full, model_labels, model_values = self._name(name)
        metric = family(full, documentation, labels=(*model_labels, *labels))
        for values, value in samples.items():
            metric.add_metric((*model_values, *values), value)
        return metric

    def _is_vllm(self, name: str) -> bool:
        """Say whether a metric goes by vLLM's name."""
        return self._names == "vllm" and name in _SAME_IN_VLLM

    def _name(self, name: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        """Return a metric's whole name, and the names and values of the labels that all its samples have."""
        if self._is_vllm(name):
            return f"vllm:{name}", ("model_name", "engine"), (self._model.name, _ENGINE)
        return f"orca_{name}", ("model_name",), (self._model.name,)
