"""Prometheus metrics of worker processes: losses, recoveries and the control plane.

An engine without worker processes has none of these. The label `stage` counts from 1, as in all messages.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from server.gateway.served_model import ServedModel

_LABELS = ("model_name",)
_STAGE_LABELS = (*_LABELS, "stage")


class ControlCounts(Protocol):
    """Counts over the control connections of all stages, since the start."""

    @property
    def messages(self) -> int:
        """Control messages sent, one per iteration."""
        ...

    @property
    def message_bytes(self) -> int:
        """Bytes of all control messages."""
        ...

    @property
    def stale(self) -> int:
        """Frames received from an earlier epoch."""
        ...

    @property
    def duplicates(self) -> int:
        """Frames received twice."""
        ...

    @property
    def malformed(self) -> int:
        """Malformed frames received."""
        ...


class StageCounts(Protocol):
    """Counts that one stage reported, since the start."""

    @property
    def link_bytes(self) -> int:
        """Bytes of activations sent to the next stage."""
        ...

    @property
    def received(self) -> int:
        """Iterations received. Iterations done are not counted: the last stage returns tokens instead."""
        ...


@runtime_checkable
class Workers(Protocol):
    """The part of an engine's `workers` that these metrics need."""

    @property
    def counters(self) -> ControlCounts:
        """Of all control connections."""
        ...

    @property
    def stages(self) -> Sequence[StageCounts]:
        """Of each stage, in order."""
        ...


class WorkerMetrics:
    """The metrics of one engine's workers. `collect` may be called on any thread."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """All metrics; none for an engine without worker processes."""
        recovery = self._model.service.recovery
        if not recovery.recoverable:
            return
        yield self._counter("worker_losses", "Workers lost.", recovery.losses)
        yield self._counter("worker_recoveries", "Recoveries from lost workers.", recovery.recoveries)
        yield self._counter(
            "worker_blamed_requests", "Requests ended because they killed workers.", recovery.n_blamed
        )
        yield self._counter(
            "worker_down_seconds", "Time from losing workers to recovery, in total.", recovery.down_seconds
        )
        last = GaugeMetricFamily(
            "orca_worker_last_recovery_seconds",
            "Duration of the latest completed recovery, from loss to recovery.",
            labels=_LABELS,
        )
        if recovery.last_recovery_seconds is not None:
            last.add_metric([self._model.name], recovery.last_recovery_seconds)
        yield last
        workers = getattr(self._model.service.scheduler.engine, "workers", None)
        if isinstance(workers, Workers):
            yield from self._control(workers.counters)
            yield from self._stages(workers.stages, recovery.troubled_stage)

    def _control(self, counts: ControlCounts) -> Iterator[Metric]:
        yield self._counter("control_messages", "Control messages sent.", counts.messages)
        yield self._counter("control_message_bytes", "Bytes of control messages.", counts.message_bytes)
        yield self._counter("control_stale_frames", "Frames from an earlier epoch.", counts.stale)
        yield self._counter("control_duplicate_frames", "Frames received twice.", counts.duplicates)
        yield self._counter("control_rubbish_frames", "Malformed frames.", counts.malformed)

    def _stages(self, stages: Sequence[StageCounts], troubled: int | None) -> Iterator[Metric]:
        up = GaugeMetricFamily("orca_worker_up", "0 for a lost stage, else 1.", labels=_STAGE_LABELS)
        link_bytes = CounterMetricFamily(
            "orca_link_bytes", "Bytes of activations sent to the next stage.", labels=_STAGE_LABELS
        )
        iterations = CounterMetricFamily(
            "orca_stage_iterations", "Iterations received by the stage.", labels=_STAGE_LABELS
        )
        for index, stage in enumerate(stages):
            label = [self._model.name, str(index + 1)]
            up.add_metric(label, index != troubled)
            link_bytes.add_metric(label, stage.link_bytes)
            iterations.add_metric(label, stage.received)
        yield from (up, link_bytes, iterations)

    def _counter(self, name: str, documentation: str, count: float) -> Metric:
        counter = CounterMetricFamily(f"orca_{name}", documentation, labels=_LABELS)
        counter.add_metric([self._model.name], count)
        return counter
