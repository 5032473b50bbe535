"""Prometheus metrics of worker processes: losses, recoveries and the control plane.

An engine without worker processes has none of them. The label `stage` counts from 1, as in all messages.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from orca_jax.engine.stage_counters import RemoteCounters, StageCounters
from server.gateway.served_model import ServedModel

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
    workers = getattr(model.service.scheduler.engine, "workers", None)
    return workers if isinstance(workers, Workers) else None


def worker_metrics(model: ServedModel) -> Iterator[Metric]:
    """Yield the metrics of a model's worker processes, on any thread."""
    recovery = model.service.recovery
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
