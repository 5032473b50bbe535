"""A simulated engine with a cost model and a virtual clock: long runs take moments and can be replayed."""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from orca_jax.errors import EngineError
from orca_jax.iteration.rows.beams import Beams
from orca_jax.iteration.rows.drafted import Drafted
from orca_jax.planning.cost_model import IterationShape, IterationSums, keys_seen
from orca_jax.request.beam_search import BeamSearch
from orca_jax.request.pooled_vector import Vector
from orca_jax.request.request import Request, RequestState, Row, RowAnswer
from orca_jax.request.routed_experts import ExpertIds
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.scheduling.engine_protocol import Iteration, Returned


class VirtualClock:
    """A clock that moves only on request, with events that run in order of time."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._n_events = 0  # breaks ties: events at the same time run in the order they were set

    def now(self) -> float:
        """Seconds since the start."""
        return self._now

    def call_at(self, time: float, action: Callable[[], object]) -> None:
        """Run `action` at `time`."""
        assert time >= self._now, f"{time} is in the past: the time is {self._now}"
        heapq.heappush(self._events, (time, self._n_events, action))
        self._n_events += 1

    def next_event(self) -> float:
        """The time of the next event; infinity if there is none."""
        return self._events[0][0] if self._events else math.inf

    def run_next(self) -> None:
        """Advance to the next event and run it."""
        time, _, action = heapq.heappop(self._events)
        self._now = time
        action()

    def advance_to(self, time: float) -> None:
        """Advance to `time`; no event may come before it."""
        assert self._now <= time < self.next_event()
        self._now = time


def hashed_token(request: Request, index: int) -> int:
    """A token that depends only on the request's seed and the token's index."""
    return (request.seed * 31 + index * 7919) % 50021


def simulated_logprobs(token_id: int, n_top: int) -> TokenLogprobs:
    """Log-probabilities: 1/2 for the token, 1/4 for the next id, 1/8 for the one after, ..."""
    most_likely = tuple((token_id + i, -(i + 1) * math.log(2)) for i in range(n_top))
    return TokenLogprobs(token_id, -math.log(2), most_likely)


def simulated_candidates(beams: BeamSearch, seed: int) -> list[TokenLogprobs]:
    """Candidate tokens of each beam, which depend on the seed, the step and the beam's newest token."""
    candidates: list[TokenLogprobs] = []
    for last in beams.last_ids or [0]:
        number = (seed * 31 + beams.n_tokens * 7919 + last * 104_729) % 50_021
        step = 0.05 + number % 13 / 4
        top = [((number + 37 * i) % 251, -step * (i + 1)) for i in range(beams.n_candidates)]
        candidates.append(TokenLogprobs(top[0][0], top[0][1], tuple(top)))
    return candidates


def returned(
    rows: Sequence[Row],
    token_ids: list[int],
    starts: Sequence[int] = (),
    token: Callable[[Request, int], int] | None = None,
) -> Returned:
    """The results of an iteration with these tokens, and with the requested log-probabilities.

    A prompt's log-probabilities come all at once. `starts` has the index of each row's first token; with it
    the requested experts are returned too. `token` gives the tokens after drafts (0 without it).
    """
    answers = dict[int, RowAnswer]()
    for i, (req, _) in enumerate(rows):
        answer = simulated_answer(req, token_ids[i], token)
        if answer is not None:
            answers[i] = answer
    return Returned(
        token_ids,
        answers,
        {
            i: [simulated_logprobs(known, req.sampling.prompt_logprobs) for known in req.prompt_ids[1:]]
            for i, (req, _) in enumerate(rows)
            if req.sampling.prompt_logprobs is not None and req.prompt_logprobs is None
        },
        # Only with the last prompt chunk, when no partial chunk is in flight.
        {
            i: simulated_vector(req.prompt_ids)
            for i, (req, _) in enumerate(rows)
            if req.pooling is not None and not req.n_partial
        },
        {
            i: (start, simulated_experts(start, n_tokens))
            for i, ((req, n_tokens), start) in enumerate(zip(rows, starts, strict=False))
            if req.sampling.return_routed_experts
        },
    )


def simulated_answer(
    req: Request, token_id: int, token: Callable[[Request, int], int] | None = None
) -> RowAnswer | None:
    """The answer for a request that gets more than a plain row's token; otherwise None."""
    if isinstance(req.kind, Beams):
        if req.state is RequestState.FINISHED:
            return None
        return [token_id], simulated_candidates(req.kind.search, req.seed)
    if req.kind.scored_ids:
        # The tokens that the iteration computed, and the one after them.
        first, end = len(req.output_ids), req.n_computed - len(req.prompt_ids) + 1
        scored = req.kind.scored_ids[first:end]
        return scored, [simulated_logprobs(one, 0) for one in scored]
    n_top = req.sampling.logprobs
    sampled = [token_id]
    if isinstance(req.kind, Drafted):
        sampled += _after_drafts(req, req.kind.sent, token_id, token)
    elif n_top is None:
        return None
    return sampled, () if n_top is None else [simulated_logprobs(one, n_top) for one in sampled]


def _after_drafts(
    req: Request, drafts: Sequence[int], token_id: int, token: Callable[[Request, int], int] | None
) -> list[int]:
    """The token after each draft. After a wrong one it is the next draft, which must not be kept."""
    sampled = list[int]()
    for i, draft in enumerate(drafts):
        if draft != token_id:
            return [*sampled, *drafts[i + 1 :], 0]
        token_id = token(req, len(req.output_ids) + i + 1) if token else 0
        sampled.append(token_id)
    return sampled


def simulated_experts(start: int, n_tokens: int) -> ExpertIds:
    """One expert in one layer for each of `n_tokens` tokens from index `start` on."""
    return (np.arange(start, start + n_tokens) % 251).astype(np.uint8).reshape(-1, 1, 1)


SIMULATED_SIZE = 8  # the size of a simulated embedding


def simulated_vector(prompt_ids: Sequence[int]) -> Vector:
    """Pooled hidden states that depend on every token of the prompt and its position."""
    numbers = [sum((i + 1) * token_id for i, token_id in enumerate(prompt_ids)), *prompt_ids[:SIMULATED_SIZE]]
    return np.cos(np.resize(np.array(numbers, np.float64), SIMULATED_SIZE)).astype(np.float32)


def batch_sums(rows: Sequence[Row]) -> IterationSums:
    """The sums over the rows of an iteration to issue, computed without a list of its lengths."""
    n_tokens = n_keys = n_seen = 0
    for req, n_input in rows:
        kv_length = req.n_computed + n_input
        n_keys += kv_length
        n_tokens += n_input
        n_seen += kv_length if n_input == 1 else keys_seen(n_input, kv_length)
    return IterationSums(len(rows), n_tokens, n_keys, n_seen)


class SimulatedEngine:
    """A pipeline of `n_workers` stages (ORCA 4.1, Figure 8a).

    A batch enters a stage when it has left the previous stage and the previous batch has left this stage.
    `duration` returns the seconds of a whole iteration, split equally over the stages. For unequal stages,
    `places` returns the seconds in each place that a batch passes, in order: the stages and the links between
    them, each of which holds one batch at a time. `token` returns a request's token by index; with None every
    token is 0. Constraints are ignored. `fail` makes the engine fail.
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
        """Make the next call of `issue` or `wait` raise EngineError once and lose the batches in flight."""
        self._failing = at

    def issue(self, rows: Sequence[Row]) -> Iteration:
        """Send the batch through the stages; takes no time. Raises EngineError after `fail`."""
        self._fail_if_requested("issue")
        seconds = self._seconds(rows)
        done_at = self.clock.now()
        if len(self._free_at) < len(seconds):
            self._free_at += [done_at] * (len(seconds) - len(self._free_at))
        for place, needed in enumerate(seconds):
            done_at = max(done_at, self._free_at[place]) + needed
            self._free_at[place] = done_at
        for req, n_tokens in rows:
            if isinstance(req.kind, Drafted):
                req.kind.rows(req, n_tokens, (req.row,))  # as it enters a message, it notes its drafts
        return Iteration(rows, (done_at, [req.n_computed for req, _ in rows]))

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        """Advance to the time when the batch is done; return None if interrupted before.

        Events at exactly that time run first. Raises EngineError after `fail`.
        """
        self._fail_if_requested("wait")
        done_at, starts = iteration.pending
        while not interrupted():
            if self.clock.next_event() > done_at:
                self.clock.advance_to(done_at)
                return returned(iteration.rows, self._next_tokens(iteration.rows), starts, self._token)
            self.clock.run_next()
        return None

    def _seconds(self, rows: Sequence[Row]) -> Sequence[float]:
        """The iteration's seconds in each place."""
        if self._places is not None:
            return self._places(batch_sums(rows))
        shape = IterationShape([n for _, n in rows], [req.n_computed + n for req, n in rows])
        return [self._duration(shape) / self.n_workers] * self.n_workers

    def _next_tokens(self, rows: Sequence[Row]) -> list[int]:
        """The batch's next tokens; 0 for a request that has ended meanwhile, which is dropped."""
        token = self._token
        if token is None:
            return [0] * len(rows)
        return [
            0 if req.state is RequestState.FINISHED else token(req, len(req.output_ids)) for req, _ in rows
        ]

    def _fail_if_requested(self, at: Literal["issue", "wait"]) -> None:
        if self._failing == at:
            self._failing = None
            self._free_at.clear()
            raise EngineError(f"the simulated engine failed in {at}, as requested")
