"""An engine on a cost model and a virtual clock: whole servings play in moments, and can be replayed."""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Literal

from orca_jax.errors import EngineError
from orca_jax.families.model_config import ModelConfig
from orca_jax.iteration.row import Row
from orca_jax.planning.cost_model import Device, IterationShape, IterationSums, floor, keys_seen, operations
from orca_jax.request.request import Request, RequestState
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.scheduling.engine_protocol import Iteration, Returned


class VirtualClock:
    """Time that moves only when it is told to, and things that happen at their times, in their order."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._n_events = 0  # of two events at one time, the one that was set first comes first

    def now(self) -> float:
        """Seconds since the start."""
        return self._now

    def call_at(self, time: float, action: Callable[[], object]) -> None:
        """Let `action` happen when the clock comes to `time`."""
        assert time >= self._now, f"{time} is past: it is {self._now}"
        heapq.heappush(self._events, (time, self._n_events, action))
        self._n_events += 1

    def next_event(self) -> float:
        """The time of the next event; infinity when there is none."""
        return self._events[0][0] if self._events else math.inf

    def run_next(self) -> None:
        """Go on to the next event and let it happen."""
        time, _, action = heapq.heappop(self._events)
        self._now = time
        action()

    def advance_to(self, time: float) -> None:
        """Go on to `time`, with no event on the way."""
        assert self._now <= time < self.next_event()
        self._now = time


def cost_model_duration(
    model: ModelConfig, device: Device, *, weight_bytes: int, kv_bytes: int
) -> Callable[[IterationShape], float]:
    """The duration of an iteration at the device's floor, in seconds; sizes are bytes of one element."""

    def duration(shape: IterationShape) -> float:
        return floor(operations(model, shape, weight_bytes=weight_bytes, kv_bytes=kv_bytes), device)

    return duration


def hashed_token(request: Request, index: int) -> int:
    """A token from the request's seed and the token's index alone, as a real engine's tokens are."""
    return (request.seed * 31 + index * 7919) % 50021


def simulated_logprobs(token_id: int, n_top: int) -> TokenLogprobs:
    """The token has the probability 1/2, the id behind it 1/4, the next 1/8, ..."""
    likeliest = tuple((token_id + i, -(i + 1) * math.log(2)) for i in range(n_top))
    return TokenLogprobs(token_id, -math.log(2), likeliest)


def returned(rows: Sequence[Row], token_ids: list[int]) -> Returned:
    """These tokens, and simulated log-probabilities where asked for: those of a prompt all at once."""
    return Returned(
        token_ids,
        {
            i: simulated_logprobs(token_ids[i], req.sampling.logprobs)
            for i, (req, _) in enumerate(rows)
            if req.sampling.logprobs is not None
        },
        {
            i: [simulated_logprobs(known, req.sampling.prompt_logprobs) for known in req.prompt_ids[1:]]
            for i, (req, _) in enumerate(rows)
            if req.sampling.prompt_logprobs is not None and req.prompt_logprobs is None
        },
    )


def batch_sums(rows: Sequence[Row]) -> IterationSums:
    """Those of the iteration that is about to be issued, without a list of its lengths."""
    n_tokens = n_keys = n_seen = 0
    for req, n_input in rows:
        kv_length = req.n_computed + n_input
        n_keys += kv_length
        n_tokens += n_input
        n_seen += kv_length if n_input == 1 else keys_seen(n_input, kv_length)
    return IterationSums(len(rows), n_tokens, n_keys, n_seen)


class SimulatedEngine:
    """`n_workers` stages in a row: a batch enters a stage when it has left the one before, and the
    stage is free of the batch before it (ORCA 4.1, Figure 8a).

    `duration` gives the seconds of a whole iteration, of which each stage takes an equal part. Where stages
    are not equal, `places` gives the seconds in every place that a batch passes in its turn: the stages, and
    the links between them, which hold one batch at a time as well. `token` gives the token of a request and
    an index; with None every token is 0. It knows no constraints. `fail` makes it fail as an engine does.
    """

    def __init__(
        self,
        clock: VirtualClock,
        *,
        n_workers: int = 1,
        duration: Callable[[IterationShape], float] = lambda _: 1.0,
        places: Callable[[IterationSums], Sequence[float]] | None = None,
        token: Callable[[Request, int], int] | None = hashed_token,
    ) -> None:
        self.n_workers = n_workers
        self.keeps_tokens = True
        self.clock = clock
        self._duration = duration
        self._places = places
        self._token = token
        self._free_at: list[float] = []
        self._failing: Literal["issue", "wait"] | None = None

    def fail(self, at: Literal["issue", "wait"]) -> None:
        """Raise EngineError at the next call of `issue` or `wait`, once, losing what is in flight."""
        self._failing = at

    def issue(self, rows: Sequence[Row]) -> Iteration:
        """Send the batch through the stages; takes no time. Raises EngineError when told to."""
        self._fail_if_told("issue")
        seconds = self._seconds(rows)
        done_at = self.clock.now()
        if len(self._free_at) < len(seconds):
            self._free_at += [done_at] * (len(seconds) - len(self._free_at))
        for place, needed in enumerate(seconds):
            done_at = max(done_at, self._free_at[place]) + needed
            self._free_at[place] = done_at
        return Iteration(rows, done_at)

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        """Go on to the time when the batch is done; None if an event on the way is an interruption.

        Events at that very time still happen before. Raises EngineError when told to.
        """
        self._fail_if_told("wait")
        done_at: float = iteration.pending
        while not interrupted():
            if self.clock.next_event() > done_at:
                self.clock.advance_to(done_at)
                return returned(iteration.rows, self._next_tokens(iteration.rows))
            self.clock.run_next()
        return None

    def _seconds(self, rows: Sequence[Row]) -> Sequence[float]:
        """In each place, of the iteration that is being issued."""
        if self._places is not None:
            return self._places(batch_sums(rows))
        shape = IterationShape([n for _, n in rows], [req.n_computed + n for req, n in rows])
        return [self._duration(shape) / self.n_workers] * self.n_workers

    def _next_tokens(self, rows: Sequence[Row]) -> list[int]:
        """Any token will do for a request that has ended meanwhile: it is thrown away."""
        token = self._token
        if token is None:
            return [0] * len(rows)
        return [
            0 if req.state is RequestState.FINISHED else token(req, len(req.output_ids)) for req, _ in rows
        ]

    def _fail_if_told(self, at: Literal["issue", "wait"]) -> None:
        if self._failing == at:
            self._failing = None
            self._free_at.clear()
            raise EngineError(f"the simulated engine failed in {at}, as it was told to")
