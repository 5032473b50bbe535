"""When each stage was busy, from the reports of worker processes."""

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from server.web.watch import Line

_SAME_CLOCK = 1.0  # seconds: a report that seems to take longer comes from the clock of another machine


class Reported(Protocol):
    """One report: the stage counts from 0, the times are in seconds of the stage's clock, or NaN."""

    @property
    def epoch(self) -> int: ...
    @property
    def iteration(self) -> int: ...
    @property
    def stage(self) -> int: ...
    @property
    def received(self) -> float: ...
    @property
    def done(self) -> float: ...


class _Stage(Protocol):
    @property
    def times(self) -> Sequence[Reported]: ...


@runtime_checkable
class _Workers(Protocol):
    @property
    def stages(self) -> Sequence[_Stage]: ...


class StageTimes:
    """New reports as lines, with times on the engine's clock; for one thread.

    The clock of a worker on another machine is aligned by the report that took the shortest time to get here,
    so its bars may be late by that time.
    """

    def __init__(self, engine: object) -> None:
        workers = getattr(engine, "workers", None)
        self._stages = workers.stages if isinstance(workers, _Workers) else ()
        self._last: list[Reported | None] = [_newest(stage.times) for stage in self._stages]
        self._offsets = [math.inf] * len(self._stages)
        self._first_epoch = 0

    def lines(self, now: float) -> list[Line]:
        """At most one line: all reports since the last call, at `now` on the engine's clock."""
        reports: list[tuple[int | None, int, float, float | None]] = []
        for i, stage in enumerate(self._stages):
            for report in self._new(i, list(stage.times)):
                if math.isnan(report.received):
                    continue
                offset = self._offset(i, now - report.received)
                done = None if math.isnan(report.done) else report.done + offset
                # The engine numbers iterations in each epoch; the timeline does not begin again.
                self._first_epoch = self._first_epoch or report.epoch
                number = report.iteration if report.epoch == self._first_epoch else None
                reports.append((number, report.stage, report.received + offset, done))
        return [{"stages": reports}] if reports else []

    def _new(self, i: int, times: Sequence[Reported]) -> Sequence[Reported]:
        last, self._last[i] = self._last[i], times[-1] if times else None
        for n in range(len(times) - 1, -1, -1):
            if times[n] is last:
                return times[n + 1 :]
        return times

    def _offset(self, i: int, delay: float) -> float:
        self._offsets[i] = min(self._offsets[i], delay)
        return 0.0 if abs(self._offsets[i]) < _SAME_CLOCK else self._offsets[i]


def _newest(times: Sequence[Reported]) -> Reported | None:
    return times[-1] if times else None
