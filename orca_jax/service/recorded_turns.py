"""The pool of a service that is recorded, and what watches its timeline.

While a service is recorded, its scheduler learns of arrivals, and of ends that users ask for, only when a
turn of its loop begins. So a turn depends on nothing but what came before it, and can be repeated.
"""

from collections.abc import Callable, Sequence
from typing import Any

from orca_jax.request.request import FinishReason, Request, Row
from orca_jax.scheduling.request_pool import InArrivalOrder, RequestPool
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import IterationRecord, RequestRecord
from orca_jax.service.iteration_lines import IterationLines
from orca_jax.service.recorder import Recorder


class RecordedPool(RequestPool):
    """Shows arrivals and asked ends to the scheduler at `take_ending`, with which each of its turns begins.

    `disturbance` says what else has changed the scheduler since the start, such as a lost worker; "" if
    nothing has.
    """

    def __init__(self, recorder: Recorder, *, disturbance: Callable[[], str], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._recorder = recorder
        self._disturbance = disturbance
        self._is_disturbed = False
        self._unseen: list[tuple[Request, float]] = []
        self._asked: dict[Request, FinishReason] = {}

    def add(self, request: Request) -> None:
        request.owner = self._recorder.hidden(request.owner)  # shares go by owner, so it runs as recorded
        super().add(request)

    def take_ending(self) -> list[tuple[Request, FinishReason]]:
        with self._lock:
            if not self._is_disturbed and (why := self._disturbance()):
                self._is_disturbed = True
                self._recorder.cannot_repeat(why)
            self._recorder.turn += 1
            self._show_arrivals()
            for request, reason in self._asked.items():
                super()._ask_to_end(request, reason)
                self._recorder.asked_to_end(request, reason)
            self._asked.clear()
            return super().take_ending()

    def in_arrival_order(self) -> InArrivalOrder:
        if self._closed:  # all of them are to be ended, and those not seen yet too
            with self._lock:
                self._show_arrivals()
        return super().in_arrival_order()

    def remove(self, request: Request) -> None:
        with self._lock:
            self._asked.pop(request, None)
            super().remove(request)

    def _enter(self, request: Request, now: float) -> None:
        self._unseen.append((request, now))

    def _ask_to_end(self, request: Request, reason: FinishReason) -> bool:
        if request.ending is None and request not in self._asked:
            self._asked[request] = reason
            self._notify()
        return True

    def _show_arrivals(self) -> None:
        for request, at in self._unseen:
            super()._enter(request, at)
            self._recorder.arrived(request, at)
        self._unseen.clear()


class TimelineRecorder:
    """A TimelineWatcher that records iterations and ends. The pool above records arrivals."""

    def __init__(self, recorder: Recorder, scheduler: Scheduler) -> None:
        self._recorder = recorder
        self._lines = IterationLines(scheduler)

    def arrived(self, request: Request, at: float) -> None:
        pass

    def issued(self, record: IterationRecord, rows: Sequence[Row]) -> None:
        self._lines.begin(record, rows)["turn"] = self._recorder.turn

    def returned(self, record: IterationRecord) -> None:
        line = self._lines.end(record)
        assert line is not None, "the recording began with the first iteration"
        self._recorder.returned(line)

    def ended(self, record: RequestRecord, request: Request) -> None:
        assert record.finished is not None and record.finish_reason is not None
        self._recorder.finished(request, record.finish_reason, record.finished)
