"""Writes what the scheduler and the stages do as lines of JSON."""

import math
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

from orca_jax.engine.stage_counters import IterationTimes
from orca_jax.request.request import Request, Row
from orca_jax.scheduling.timeline import IterationRecord, RequestRecord, TimelineObserver
from orca_jax.service.iteration_lines import IterationLines
from orca_jax.service.orca import Orca
from server.gateway.served_model import ServedModel
from server.metrics.engine_metrics import workers_of

Line = dict[str, Any]
_MOST_NUMBERS = 1 << 16  # in the lines of the buffer
_LINE = 8  # numbers that a line counts as, in addition to those in its lists
_SAME_CLOCK = 1.0  # seconds: a report that seems to take longer comes from another machine's clock


class Watch(TimelineObserver):
    """A buffer of lines. Once it is full, iterations are only counted.

    Lines have no text but the requests' ids, and these only with `shows_ids`. `take` is for one thread.
    """

    def __init__(self, service: Orca, *, shows_ids: bool) -> None:
        self._service = service
        self._shows_ids = shows_ids
        self._iterations = IterationLines(service.scheduler)
        # By iteration its decodes of several tokens, perhaps drafts: row, request and length of the output.
        self._drafted: dict[int, list[tuple[int, Request, int]]] = {}
        self._returned: list[
            tuple[Line, list[tuple[int, Request, int]]]
        ] = []  # whose tokens are not known yet
        self._lines: deque[tuple[int, Line]] = deque()
        # Several threads change `_n_put`. It may lose a count, which only moves the limit.
        self._n_put = self._n_taken = self._n_skipped = self._n_reported = 0

    def start(self) -> None:
        """Watch from now on."""
        timeline = self._service.timeline
        timeline.observers = (*timeline.observers, self)

    def stop(self) -> None:
        """Stop watching."""
        timeline = self._service.timeline
        timeline.observers = tuple([other for other in timeline.observers if other is not self])

    def take(self) -> list[Line]:
        """Remove and return the lines of the buffer, oldest first."""
        lines: list[Line] = []
        for _ in range(len(self._lines)):
            n_numbers, line = self._lines.popleft()
            self._n_taken += n_numbers
            lines.append(line)
        n_skipped = self._n_skipped
        if n_skipped > self._n_reported:
            lines.append({"skipped": n_skipped - self._n_reported})
            self._n_reported = n_skipped
        return lines

    def live_requests(self, most: int) -> list[Line]:
        """Describe the newest `most` live requests: their arrival and their progress. For any thread."""
        records = self._service.timeline.live()
        live = sorted(self._service.pool.live(), key=lambda request: request.arrival)[-most:]
        return [
            {
                **self._arrival(request, record.arrived),
                "n_computed": request.n_computed,
                "n_output": len(record.token_times),
                "admitted": request.row >= 0,
                "scheduled": record.scheduled,
                "first_token": record.token_times[0] if record.token_times else None,
            }
            for request in live
            if (record := records.get(request.arrival)) is not None
        ]

    # The timeline calls these on its threads.

    def arrived(self, request: Request, at: float) -> None:
        self._put(self._arrival(request, at))

    def issued(self, record: IterationRecord, rows: Sequence[Row]) -> None:
        self._put_returned()
        self._iterations.begin(record, rows)
        drafted = [
            (i, req, len(req.output_ids))
            for i, (req, n_tokens) in enumerate(rows)
            if n_tokens > 1 and not record.initiation[i]
        ]
        if drafted:
            self._drafted[record.number] = drafted

    def returned(self, record: IterationRecord) -> None:
        line = self._iterations.end(record)
        if line is None:
            return
        drafted = self._drafted.pop(record.number, None)
        for lost in [number for number in self._drafted if number < record.number]:
            del self._drafted[lost]
        if drafted is None:
            self._put_iteration(line)
        else:
            self._returned.append((line, drafted))

    def delivered(self, gaps: "array[float]", first: Sequence[RequestRecord]) -> None:
        self._put_returned()

    def _put_returned(self) -> None:
        """Put the lines of iterations whose tokens their requests have taken since they returned."""
        for line, drafted in self._returned:
            line["kept"] = [(i, len(req.output_ids) - n_before) for i, req, n_before in drafted]
            self._put_iteration(line)
        self._returned.clear()

    def _put_iteration(self, line: Line) -> None:
        n_numbers = 2 * (len(line["rows"]) + len(line.get("kept", ())))
        n_numbers += sum(len(line[name]) for name in ("prefill", "starts", "partial", "preempted"))
        if not self._put(line, n_numbers):
            self._n_skipped += 1

    def ended(self, record: RequestRecord, request: Request) -> None:
        self._put_returned()
        line: Line = {"finished": record.arrival, "time": record.finished, "reason": record.finish_reason}
        self._put({**line, "n_output": record.n_output, "n_cached": record.n_cached})

    def _arrival(self, request: Request, at: float) -> Line:
        return {
            "arrived": request.arrival,
            "time": at,
            "id": request.request_id if self._shows_ids else "",
            "n_input": request.n_input,
            "max_tokens": request.max_tokens,
            "priority": request.priority,
        }

    def _put(self, line: Line, n_numbers: int = 0) -> bool:
        n_numbers += _LINE
        if self._n_put + n_numbers - self._n_taken > _MOST_NUMBERS:
            return False
        self._n_put += n_numbers
        self._lines.append((n_numbers, line))
        return True


class StageTimes:
    """Turns new reports into lines with times on the engine's clock. For one thread.

    The clock of a worker on another machine is aligned by the report that got here fastest, so its bars may
    be late by the time that this report took.
    """

    def __init__(self, model: ServedModel) -> None:
        workers = workers_of(model)
        self._stages = () if workers is None else workers.stages
        self._last = [stage.times[-1] if stage.times else None for stage in self._stages]
        self._offsets = [math.inf] * len(self._stages)
        self._first_epoch = 0

    def lines(self, now: float) -> list[Line]:
        """Return a line with all reports since the last call, or none; `now` is the engine's clock."""
        reports: list[tuple[int | None, int, float, float | None]] = []
        for i, stage in enumerate(self._stages):
            for report in self._new(i, list(stage.times)):
                if math.isnan(report.received):
                    continue
                offset = self._offset(i, now - report.received)
                done = None if math.isnan(report.done) else report.done + offset
                # Each epoch numbers its iterations from 0, and the timeline counts on.
                self._first_epoch = self._first_epoch or report.epoch
                number = report.iteration if report.epoch == self._first_epoch else None
                reports.append((number, report.stage, report.received + offset, done))
        return [{"stages": reports}] if reports else []

    def _new(self, i: int, times: Sequence[IterationTimes]) -> Sequence[IterationTimes]:
        last, self._last[i] = self._last[i], times[-1] if times else None
        for n in range(len(times) - 1, -1, -1):
            if times[n] is last:
                return times[n + 1 :]
        return times

    def _offset(self, i: int, delay: float) -> float:
        self._offsets[i] = min(self._offsets[i], delay)
        return 0.0 if abs(self._offsets[i]) < _SAME_CLOCK else self._offsets[i]
