"""The timeline: when each request and each iteration started and ended.

The scheduler writes the records; times are in seconds of the given clock. Memory is bounded, because only the
newest records are kept. Statistics over all records come from a TimelineObserver.
"""

from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Literal

from orca_jax.iteration.shape import bucket_for
from orca_jax.request.request import FinishReason, Request, RequestState, Row
from orca_jax.scheduling.request_pool import Delivery

_INCREMENT = RequestState.INCREMENT
_N_ENDS = 64  # recent ends that `recent_finish_interval` covers


Cause = Literal["preempted", "worker lost"]


@dataclass(slots=True)
class Interruption:
    """A running request lost its keys and values at time `at` and ran again at `resumed` (None: not yet)."""

    at: float
    cause: Cause
    resumed: float | None = None


@dataclass(slots=True)
class RequestRecord:
    """A request from arrival to end.

    `scheduled` is when its first iteration was issued, `token_times` when each token was delivered. Keys and
    values of the first `n_cached` prompt tokens came from the prefix cache.
    """

    request_id: str
    n_input: int
    arrived: float
    scheduled: float | None = None
    token_times: Sequence[float] = field(default_factory=list[float])
    finished: float | None = None
    finish_reason: FinishReason | None = None
    n_cached: int = 0
    arrival: int = 0  # the request's number in the pool
    interruptions: tuple[Interruption, ...] = ()

    @property
    def n_output(self) -> int:
        return len(self.token_times)

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first iteration; None before that."""
        return None if self.scheduled is None else self.scheduled - self.arrived

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token; None before that."""
        return self.token_times[0] - self.arrived if self.token_times else None

    @property
    def normalized_latency(self) -> float | None:
        """End-to-end latency over generated tokens (ORCA 6.2); None before the end, or without tokens."""
        if self.finished is None or not self.token_times:
            return None
        return (self.finished - self.arrived) / len(self.token_times)


@dataclass(slots=True)
class IterationRecord:
    """One iteration: its requests, each one's number of input tokens, and the bucket they are padded to.

    `returned` stays None if the engine failed before the batch returned.
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
        return len(self.request_ids)

    @property
    def n_tokens(self) -> int:
        """Input tokens, without padding."""
        return sum(self.input_lengths)

    @property
    def padding(self) -> int:
        """The number of padding tokens."""
        return self.bucket - self.n_tokens


class TimelineObserver:
    """Receives events; override the methods of interest.

    All but `arrived` are called on the scheduler's thread. Every call delays the scheduler, so it must be
    short. If a call raises, the service fails.
    """

    def arrived(self, request: Request, at: float) -> None:
        """A request enters the pool at `at` seconds. Called on the user's thread, under the pool's lock."""

    def issued(self, record: IterationRecord, rows: Sequence[Row]) -> None:
        """An iteration is about to be issued: slots are allocated; requests' states have not changed yet."""

    def returned(self, record: IterationRecord) -> None:
        """An iteration returned from the engine."""

    def delivered(self, gaps: "array[float]", first: Sequence[RequestRecord]) -> None:
        """The tokens of an iteration are about to be delivered.

        `first` are the requests that get their first token. `gaps` has an entry for each other token: the
        seconds since the previous token of the same request.
        """

    def ended(self, record: RequestRecord, request: Request) -> None:
        """A request ended, for any reason."""


class Timeline:
    """Records of the `max_records` newest iterations and finished requests (None: all), oldest first.

    `bucket_sizes` are the engine's; without them, batches count as unpadded. `arrived`, `live` and
    `recent_finish_interval` may be called from any thread, everything else only from the scheduler's.
    """

    def __init__(
        self, clock: Callable[[], float], *, max_records: int | None = 4096, bucket_sizes: Sequence[int] = ()
    ) -> None:
        self.iterations: deque[IterationRecord] = deque(maxlen=max_records)
        self.requests: deque[RequestRecord] = deque(maxlen=max_records)
        self.observers: tuple[TimelineObserver, ...] = ()
        self.n_arrived = 0  # requests so far
        self.now = clock
        self.bucket_sizes = bucket_sizes
        # By arrival number, because an id can be reused before the end of its request is delivered.
        self._live: dict[int, RequestRecord] = {}
        self._n_issued = 0
        self._ends: deque[float] = deque(maxlen=_N_ENDS)
        self._finish_interval: float | None = None  # stored, so that other threads read it without a lock

    def arrived(self, request: Request) -> None:
        """A request entered the pool. Pass this method to `RequestPool` as `on_arrival`."""
        self.n_arrived += 1
        now = self.now()
        record = RequestRecord(
            request.request_id, request.n_input, now, token_times=request.token_times, arrival=request.arrival
        )
        self._live[request.arrival] = record
        for observer in self.observers:
            observer.arrived(request, now)

    def use_buckets(self, sizes: Sequence[int]) -> None:
        """Pad batches to these ascending sizes from now on."""
        self.bucket_sizes = sizes

    def issued(self, rows: Sequence[Row]) -> IterationRecord:
        """Record an iteration, before the scheduler updates its requests' state for it."""
        now = self.now()
        input_lengths = tuple([n for _, n in rows])
        n_tokens = sum(input_lengths)
        # Request.in_initiation, inlined for speed.
        initiation = tuple(
            [req.state is not _INCREMENT and req.n_in_flight == req.n_partial for req, _ in rows]
        )
        record = IterationRecord(
            number=self._n_issued,
            issued=now,
            request_ids=tuple([req.request_id for req, _ in rows]),
            initiation=initiation,
            input_lengths=input_lengths,
            bucket=bucket_for(n_tokens, self.bucket_sizes) if self.bucket_sizes else n_tokens,
        )
        self._n_issued += 1
        self.iterations.append(record)
        for req, _ in compress(rows, initiation):
            request_record = self._live[req.arrival]
            if request_record.scheduled is None:  # not a later prompt chunk, and no resumption
                request_record.scheduled = now
                request_record.n_cached = req.n_cached
            elif request_record.interruptions and request_record.interruptions[-1].resumed is None:
                request_record.interruptions[-1].resumed = now
        for observer in self.observers:
            observer.issued(record, rows)
        return record

    def returned(self, record: IterationRecord) -> None:
        """Record that the iteration has returned."""
        record.returned = self.now()
        for observer in self.observers:
            observer.returned(record)

    def interrupted(self, requests: Collection[Request], cause: Cause) -> None:
        """Record that these requests must compute their tokens again."""
        for req in requests:
            record = self._live[req.arrival]
            record.interruptions = (*record.interruptions, Interruption(self.now(), cause))

    def delivered(self, deliveries: Sequence[Delivery]) -> None:
        """Record tokens and ends that are about to be delivered."""
        now = self.now()
        observed = bool(self.observers)
        gaps = array("d")
        first: list[RequestRecord] = []
        ended: list[tuple[RequestRecord, Request]] = []
        for request, n_new, finish_reason in deliveries:
            if n_new:
                times = request.token_times
                if observed:
                    if times:
                        gaps.append(now - times[-1])
                    else:
                        first.append(self._live[request.arrival])
                times.append(now)  # the same object for all, so that a token takes 8 bytes
                if n_new > 1:  # they came together
                    times += [now] * (n_new - 1)
                    if observed:
                        gaps.extend([0.0] * (n_new - 1))
            if finish_reason is not None:
                record = self._live.pop(request.arrival)
                record.finished = now
                record.finish_reason = finish_reason
                # Unlike a list it holds no objects, which each full garbage collection would visit.
                record.token_times = array("d", record.token_times)
                self.requests.append(record)
                self._ends.append(now)
                ended.append((record, request))
        if ended and len(self._ends) > 1:
            self._finish_interval = (now - self._ends[0]) / (len(self._ends) - 1)
        if ended and not self._live:
            self._ends.clear()
        for observer in self.observers:
            if gaps or first:
                observer.delivered(gaps, first)
            for record, request in ended:
                observer.ended(record, request)

    def live(self) -> dict[int, RequestRecord]:
        """A copy of the live requests' records by arrival number. May be called from any thread."""
        return self._live.copy()

    def recent_finish_interval(self) -> float | None:
        """Mean seconds between the ends of the last 64 requests; None before two have ended.

        It measures how fast the queue moves, so the time while no request is live does not count.
        """
        return self._finish_interval
