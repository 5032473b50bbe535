"""What happened when: one record for each request and one for each iteration.

The scheduler writes it; times are seconds of the clock that is handed in. Only the youngest records are
kept, so that it may stay on for months. Who wants figures over all that ever happened observes it.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Protocol

from orca_jax.iteration.buckets import bucket_for
from orca_jax.iteration.row import Row
from orca_jax.request.request import FinishReason, Request, RequestState
from orca_jax.scheduling.request_pool import Delivery

_INCREMENT = RequestState.INCREMENT
_FINISHES = 64  # ends that tell how fast requests finish


def _times() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class RequestRecord:
    """A request from its arrival to its end; a token's time is when it was handed out.

    `scheduled` is when its first iteration was issued.
    """

    request_id: str
    n_input: int
    arrived: float
    scheduled: float | None = None
    token_times: "array[float]" = field(default_factory=_times)
    finished: float | None = None
    finish_reason: FinishReason | None = None

    @property
    def n_output(self) -> int:
        """Tokens generated so far."""
        return len(self.token_times)

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first iteration; None while it waits, or if it never ran."""
        return None if self.scheduled is None else self.scheduled - self.arrived

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token; None while there is none."""
        return self.token_times[0] - self.arrived if self.token_times else None

    @property
    def normalized_latency(self) -> float | None:
        """End-to-end latency over generated tokens (ORCA 6.2); None before the end, or without a token."""
        if self.finished is None or not self.token_times:
            return None
        return (self.finished - self.arrived) / len(self.token_times)


@dataclass(slots=True)
class IterationRecord:
    """One iteration: its requests with the tokens that go in for each, and the bucket they were padded to.

    `returned` stays None when the engine failed before the batch came back.
    """

    number: int
    issued: float
    request_ids: tuple[str, ...]
    initiation: tuple[bool, ...]
    input_lengths: tuple[int, ...]
    bucket: int
    returned: float | None = None

    @property
    def n_rows(self) -> int:
        """Requests in the batch."""
        return len(self.request_ids)

    @property
    def n_tokens(self) -> int:
        """Tokens that go in, without padding."""
        return sum(self.input_lengths)

    @property
    def padding(self) -> int:
        """Tokens computed for nothing."""
        return self.bucket - self.n_tokens


class TimelineObserver(Protocol):
    """Hears of what happens as it happens: `arrived` on the adder's thread, the rest on the scheduler's.

    All that waits for the scheduler waits for these calls as well, so they are to be short; and they must not
    raise, or the service fails.
    """

    def arrived(self, record: RequestRecord) -> None:
        """A request entered the pool; calls come one at a time, before the scheduler can see the request."""
        ...

    def returned(self, record: IterationRecord) -> None:
        """An iteration came back from the engine."""
        ...

    def delivered(self, gaps: "array[float]", first: Sequence[RequestRecord]) -> None:
        """An iteration's tokens are being handed out, one for each of these.

        `gaps` are the seconds since the token before of the same request; `first` are the requests whose
        first token this is.
        """
        ...

    def ended(self, record: RequestRecord) -> None:
        """A request ended, for whatever reason."""
        ...


class Timeline:
    """Records of the `max_records` youngest iterations and finished requests (None: all), oldest first.

    `bucket_sizes` are the engine's; without them a batch counts as not padded. `arrived` and
    `recent_finish_interval` may be called on any thread, everything else on the scheduler's. `observer`, if
    it is set, hears of all that happens from then on.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_records: int | None = 4096,
        bucket_sizes: Sequence[int] = (),
    ) -> None:
        self.iterations: deque[IterationRecord] = deque(maxlen=max_records)
        self.requests: deque[RequestRecord] = deque(maxlen=max_records)
        self.observer: TimelineObserver | None = None
        self._clock = clock
        self._bucket_sizes = bucket_sizes
        # By arrival number, not by id: that is free again before the end is delivered.
        self._live: dict[int, RequestRecord] = {}
        self._n_issued = 0
        self._ends: deque[float] = deque(maxlen=_FINISHES)
        self._finish_interval: float | None = None  # of these, worked out here so that others need no lock

    def arrived(self, request: Request) -> None:
        """A request entered the pool: hand this to `RequestPool` as `on_arrival`."""
        record = RequestRecord(request.request_id, len(request.prompt_ids), self._clock())
        self._live[request.arrival] = record
        if self.observer is not None:
            self.observer.arrived(record)

    def issued(self, rows: Sequence[Row]) -> IterationRecord:
        """An iteration is being issued; the requests still tell their phase. `returned` takes the record."""
        now = self._clock()
        input_lengths = tuple([n for _, n in rows])
        n_tokens = sum(input_lengths)
        # As Request.in_initiation has it, without a call for each.
        initiation = tuple(
            [req.state is not _INCREMENT and req.n_in_flight == req.n_pieces for req, _ in rows]
        )
        record = IterationRecord(
            number=self._n_issued,
            issued=now,
            request_ids=tuple([req.request_id for req, _ in rows]),
            initiation=initiation,
            input_lengths=input_lengths,
            bucket=bucket_for(n_tokens, self._bucket_sizes) if self._bucket_sizes else n_tokens,
        )
        self._n_issued += 1
        self.iterations.append(record)
        for req, _ in compress(rows, initiation):
            request_record = self._live[req.arrival]
            if request_record.scheduled is None:  # else it is another piece, or runs again after a fault
                request_record.scheduled = now
        return record

    def returned(self, record: IterationRecord) -> None:
        """That iteration came back."""
        record.returned = self._clock()
        if self.observer is not None:
            self.observer.returned(record)

    def delivered(self, deliveries: Sequence[Delivery]) -> None:
        """Tokens and ends are being handed out."""
        now = self._clock()
        observed = self.observer is not None
        gaps = _times()
        first: list[RequestRecord] = []
        ended: list[RequestRecord] = []
        for request, token_id, finish_reason in deliveries:
            record = self._live[request.arrival]
            if token_id is not None:
                times = record.token_times
                if observed:
                    if times:
                        gaps.append(now - times[-1])
                    else:
                        first.append(record)
                times.append(now)
            if finish_reason is not None:
                record.finished = now
                record.finish_reason = finish_reason
                ended.append(self._live.pop(request.arrival))
        self._finished(ended, now)
        if self.observer is not None:
            if gaps or first:
                self.observer.delivered(gaps, first)
            for record in ended:
                self.observer.ended(record)

    def recent_finish_interval(self) -> float | None:
        """Mean seconds between the ends of requests, over the last 64; None before there were two.

        Time in which nothing was live does not count: who asks wants to know how fast a queue moves.
        """
        return self._finish_interval

    def _finished(self, ended: Sequence[RequestRecord], now: float) -> None:
        for record in ended:
            self.requests.append(record)
            self._ends.append(now)
        if ended and len(self._ends) > 1:
            self._finish_interval = (now - self._ends[0]) / (len(self._ends) - 1)
        if ended and not self._live:
            self._ends.clear()
