"""What happened when: one record for each request and one for each iteration.

The scheduler writes it; times are seconds of the clock that is handed in. Only the youngest records are
kept, so that it may stay on for months.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from orca_jax.buckets import bucket_for
from orca_jax.request import FinishReason, Request, RequestState
from orca_jax.request_pool import Delivery


def _times() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class RequestRecord:
    """A request from its arrival to its end; a token's time is when it was handed out."""

    request_id: str
    n_input: int
    arrived: float
    token_times: "array[float]" = field(default_factory=_times)
    finished: float | None = None
    finish_reason: FinishReason | None = None

    @property
    def n_output(self) -> int:
        """Tokens generated so far."""
        return len(self.token_times)

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


class Timeline:
    """Records of the `max_records` youngest iterations and finished requests (None: all), oldest first.

    `bucket_sizes` are the engine's; without them a batch counts as not padded. `arrived` may be called on any
    thread, everything else on the scheduler's.
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
        self._clock = clock
        self._bucket_sizes = bucket_sizes
        self._live: dict[str, RequestRecord] = {}
        self._in_flight: deque[IterationRecord] = deque()
        self._n_issued = 0

    def arrived(self, request: Request) -> None:
        """A request entered the pool: hand this to `RequestPool` as `on_arrival`."""
        record = RequestRecord(request.request_id, len(request.prompt_ids), self._clock())
        self._live[request.request_id] = record

    def issued(self, batch: Sequence[Request], input_lengths: Sequence[int]) -> None:
        """An iteration is being issued; the requests' states still tell their phase."""
        n_tokens = sum(input_lengths)
        record = IterationRecord(
            number=self._n_issued,
            issued=self._clock(),
            request_ids=tuple([req.request_id for req in batch]),
            initiation=tuple([req.state is RequestState.INITIATION for req in batch]),
            input_lengths=tuple(input_lengths),
            bucket=bucket_for(n_tokens, self._bucket_sizes) if self._bucket_sizes else n_tokens,
        )
        self._n_issued += 1
        self.iterations.append(record)
        self._in_flight.append(record)

    def returned(self) -> None:
        """The oldest iteration in flight came back."""
        self._in_flight.popleft().returned = self._clock()

    def lost(self) -> None:
        """What is in flight will not come back."""
        self._in_flight.clear()

    def delivered(self, deliveries: Sequence[Delivery]) -> None:
        """Tokens and ends are being handed out."""
        now = self._clock()
        for delivery in deliveries:
            request_id = delivery.request.request_id
            record = self._live[request_id]
            if delivery.token_id is not None:
                record.token_times.append(now)
            if delivery.finish_reason is not None:
                record.finished = now
                record.finish_reason = delivery.finish_reason
                self.requests.append(self._live.pop(request_id))
