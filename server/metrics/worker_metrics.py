"""Figures of workers in processes of their own for Prometheus: losses and recoveries, and the control plane.

An engine that has no such workers has none of these. The label `stage` counts from 1, as all messages do.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from server.gateway.served_model import ServedModel

_LABELS = ("model_name",)
_STAGE_LABELS = (*_LABELS, "stage")


class ControlCounts(Protocol):
    """What went over the control lines of all stages, all counts from the start."""

    @property
    def messages(self) -> int:
        """Control messages sent, one for each iteration."""
        ...

    @property
    def message_bytes(self) -> int:
        """Bytes of them all."""
        ...

    @property
    def stale(self) -> int:
        """Frames that came of an epoch before."""
        ...

    @property
    def duplicates(self) -> int:
        """Frames that came twice."""
        ...

    @property
    def rubbish(self) -> int:
        """Frames that made no sense."""
        ...


class StageCounts(Protocol):
    """What one stage told of itself, all counts from the start."""

    @property
    def link_bytes(self) -> int:
        """Bytes of activations that it sent to the next stage."""
        ...

    @property
    def received(self) -> int:
        """Iterations that it took; what it is done with the last stage does not say, it returns tokens."""
        ...


@runtime_checkable
class Workers(Protocol):
    """What is needed of an engine's `workers`."""

    @property
    def counters(self) -> ControlCounts:
        """Of all lines."""
        ...

    @property
    def stages(self) -> Sequence[StageCounts]:
        """Of each stage, the first one first."""
        ...


class WorkerMetrics:
    """The figures of one engine's workers; `collect` may be called on any thread."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """Every figure; none for an engine that cannot lose workers."""
        recovery = self._model.service.recovery
        if not recovery.recoverable:
            return
        yield self._counter("worker_losses", "Workers lost.", recovery.losses)
        yield self._counter("worker_recoveries", "Times the workers came up again.", recovery.recoveries)
        yield self._counter(
            "worker_blamed_requests", "Requests ended because workers died of them.", recovery.n_blamed
        )
        yield self._counter(
            "worker_down_seconds", "Time from a loss until the workers were up again.", recovery.down_seconds
        )
        last = GaugeMetricFamily(
            "orca_worker_last_recovery_seconds",
            "Time from the last loss that is over until the workers were up again.",
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
        yield self._counter("control_stale_frames", "Frames of an epoch before.", counts.stale)
        yield self._counter("control_duplicate_frames", "Frames that came twice.", counts.duplicates)
        yield self._counter("control_rubbish_frames", "Frames that made no sense.", counts.rubbish)

    def _stages(self, stages: Sequence[StageCounts], troubled: int | None) -> Iterator[Metric]:
        up = GaugeMetricFamily("orca_worker_up", "0 for the stage that is lost.", labels=_STAGE_LABELS)
        link_bytes = CounterMetricFamily(
            "orca_link_bytes", "Bytes of activations sent to the next stage.", labels=_STAGE_LABELS
        )
        iterations = CounterMetricFamily(
            "orca_stage_iterations", "Iterations that the stage took.", labels=_STAGE_LABELS
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
