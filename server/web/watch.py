"""What the scheduler does, as lines of JSON in a bounded buffer, for as long as somebody watches."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from orca_jax.request.request import Request, Row
from orca_jax.scheduling.timeline import IterationRecord, RequestRecord
from orca_jax.service.iteration_lines import IterationLines
from orca_jax.service.orca import Orca

Line = dict[str, Any]
_MOST_NUMBERS = 1 << 16  # in lines that nobody has taken yet
_LINE = 8  # what a line counts beside the numbers in its lists


class Watch:
    """A TimelineWatcher. `take` returns the lines since the last call; beyond a limit they are counted only.

    Lines have no texts but the requests' ids, and these only with `shows_ids`. `take` is for one thread.
    """

    def __init__(self, service: Orca, *, shows_ids: bool) -> None:
        self._service = service
        self._shows_ids = shows_ids
        self._iterations = IterationLines(service.scheduler)
        self._lines: deque[tuple[int, Line]] = deque()
        # Several threads change `_n_put`. It may lose a count, which only moves the limit.
        self._n_put = self._n_taken = self._n_skipped = self._n_told = 0

    def start(self) -> None:
        """Watch from now on."""
        timeline = self._service.timeline
        timeline.watchers = (*timeline.watchers, self)

    def stop(self) -> None:
        """Stop watching."""
        timeline = self._service.timeline
        timeline.watchers = tuple([watcher for watcher in timeline.watchers if watcher is not self])

    def take(self) -> list[Line]:
        """The lines since the last call, oldest first."""
        lines: list[Line] = []
        for _ in range(len(self._lines)):
            n_numbers, line = self._lines.popleft()
            self._n_taken += n_numbers
            lines.append(line)
        n_skipped = self._n_skipped
        if n_skipped > self._n_told:
            lines.append({"skipped": n_skipped - self._n_told})
            self._n_told = n_skipped
        return lines

    def live_requests(self, most: int) -> list[Line]:
        """The live requests as arrivals, the newest `most`, with how far they are. For any thread."""
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

    # On the threads of the timeline.

    def arrived(self, request: Request, at: float) -> None:
        self._put(self._arrival(request, at))

    def issued(self, record: IterationRecord, rows: Sequence[Row]) -> None:
        self._iterations.begin(record, rows)

    def returned(self, record: IterationRecord) -> None:
        line = self._iterations.end(record)
        if line is None:
            return
        n_numbers = 2 * len(line["rows"])
        n_numbers += sum(len(line[name]) for name in ("prefill", "starts", "partial", "preempted"))
        if not self._put(line, n_numbers):
            self._n_skipped += 1

    def ended(self, record: RequestRecord, request: Request) -> None:
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
