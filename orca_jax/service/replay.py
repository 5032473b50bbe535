"""Repeats a recording: the same requests, seen by the scheduler in the same turns, on any engine.

An output ends where it ended in the recording, so the batches are the same even where the tokens are not,
unless outputs were drafted: which drafts are kept depends on the tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from orca_jax.config import ServingConfig
from orca_jax.iteration.rows.beams import Beams
from orca_jax.iteration.rows.drafted import Drafted, takes_drafts
from orca_jax.iteration.rows.scored import ScoredOutput
from orca_jax.request.beam_search import begin_search
from orca_jax.request.request import (
    PLAIN,
    FinishReason,
    OutputConstraint,
    Request,
    Row,
    RowKind,
    SharedDrafter,
)
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.engine_protocol import Engine, Iteration, Returned, never
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.request_pool import Delivery, RequestPool
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import IterationRecord, Timeline
from orca_jax.scheduling.waiting_queue import FairQueue, waiting_queue
from orca_jax.service.recording import RecordedRequest, Recording
from orca_jax.speculation.drafter import Speculation, configured_speculation

_NO_LIMIT = 1 << 30  # of the queue, which took these requests before


@dataclass(slots=True)
class ReplayReport:
    """The result of a replay. `difference` describes the first batch that was not as recorded; "" if none.

    `n_outputs` outputs were compared. `other_outputs` has the request id of each one that differs, with the
    index of the first different token or log-probability. `why_last` says why the replay ended before the
    service was closed; "" if it did not.
    """

    n_requests: int = 0
    n_iterations: int = 0
    n_tokens: int = 0
    n_outputs: int = 0
    difference: str = ""
    other_outputs: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    why_last: str = ""

    @property
    def same(self) -> bool:
        """Whether batches and outputs were those of the recording."""
        return not self.difference and not self.other_outputs


def _endless(speculation: Speculation | None, sampling: SamplingParams, scored_ids: Sequence[int]) -> RowKind:
    """The row kind of a request without end-of-sequence tokens."""
    if sampling.use_beam_search:
        return Beams(begin_search(sampling, frozenset()))
    if scored_ids:
        return ScoredOutput(scored_ids)
    return PLAIN if speculation is None or not takes_drafts(sampling) else Drafted(speculation)


class Replay:
    """A replay, which runs once. `engine` and `kv` are new and have the recorded sizes and `config`.

    `constraint` makes an output's constraint, and `kind` a request's row kind. Outputs are not compared
    unless `compares_outputs`: a simulated engine has other tokens.
    """

    def __init__(
        self,
        recording: Recording,
        engine: Engine,
        kv: KVManager,
        *,
        config: ServingConfig,
        constraint: Callable[[SamplingParams], OutputConstraint | None] = lambda _: None,
        kind: Callable[[SamplingParams, Sequence[int]], RowKind] | None = None,
        compares_outputs: bool = True,
    ) -> None:
        self.report = ReplayReport(why_last=recording.why_last)
        self._recording = recording
        self._constraint = constraint
        self._kind = kind or partial(_endless, recorded_speculation(recording, config))
        self._compares_outputs = compares_outputs
        self._now = 0.0
        self.timeline = _ComparedTimeline(recording, self.report, lambda: self._now)
        queue = waiting_queue(config.scheduling)
        if isinstance(queue, FairQueue):
            queue.weights.update(recording.weights)
        self._pool = RequestPool(
            max_waiting=_NO_LIMIT,
            on_arrival=self.timeline.arrived,
            on_deliveries=self._compare_outputs,
            queue=queue,
            clock=lambda: self._now,
        )
        self._engine = _RepeatingEngine(recording, engine)
        self._scheduler = Scheduler(self._pool, self._engine, kv, config=config, timeline=self.timeline)
        self._requests: list[Request] = []

    def run(self) -> ReplayReport:
        """Repeat all turns, or those up to the first difference. Raises what the engine raises."""
        last = self._recording.last_turn
        turn = 0
        try:
            while turn <= last:
                self._engine.turn = self.timeline.turn = turn
                self._show(turn)
                turn = turn + 1 if self._scheduler.step() else self._next_event(turn)
            self.timeline.check_end(last)
        except _Difference as difference:
            self.report.difference = str(difference)
        return self.report

    def _show(self, turn: int) -> None:
        """Add the arrivals and asked-for ends that the scheduler saw at the beginning of this turn."""
        recorded = self._recording.requests
        while len(self._requests) < len(recorded) and recorded[len(self._requests)].turn <= turn:
            arrival = recorded[len(self._requests)]
            self._now = arrival.time  # from which the queue counts the request's waiting time
            request = self._request(arrival)
            self._requests.append(request)
            self._pool.add(request)
            self.report.n_requests += 1
        for number, reason in self._recording.asked.get(turn, ()):
            self._pool.end(self._requests[number], reason)

    def _next_event(self, turn: int) -> int:
        """The next turn with an arrival or an asked-for end, after a turn that had nothing to do."""
        n = len(self._requests)
        coming = [self._recording.requests[n].turn] if n < len(self._recording.requests) else []
        coming += [asked for asked in self._recording.asked if asked > turn]
        return min(coming, default=self._recording.last_turn + 1)

    def _request(self, recorded: RecordedRequest) -> Request:
        end = self._recording.ends.get(recorded.arrival)
        if end is not None and end.turn > self._recording.last_turn:
            end = None
        return Request(
            request_id=f"{recorded.arrival} {recorded.request_id}",  # the recorded ids may repeat
            prompt_ids=recorded.prompt_ids,
            encoder_ids=recorded.encoder_ids,
            pooling=recorded.pooling,
            max_tokens=recorded.max_tokens,
            sampling=recorded.sampling,
            seed=recorded.seed,
            kind=self._kind(recorded.sampling, recorded.scored_ids),
            constraint=self._constraint(recorded.sampling),
            sink=None if end is None else _RecordedLength(len(end.output_ids), end.reason),
            owner=recorded.owner,
            priority=recorded.priority,
            cache_salt=recorded.cache_salt,
        )

    def _compare_outputs(self, deliveries: Sequence[Delivery]) -> None:
        for request, n_new, reason in deliveries:
            self.report.n_tokens += n_new
            end = self._recording.ends.get(request.arrival)
            if reason is None or end is None or not self._compares_outputs:
                continue
            self.report.n_outputs += 1
            own: list[Any] = list(request.final_ids)
            recorded: list[Any] = list(end.output_ids)
            if end.logprobs is not None:
                own = list(zip(own, [token.logprob for token in request.logprobs], strict=False))
                recorded = list(zip(recorded, end.logprobs, strict=False))
            if own != recorded:
                pairs = enumerate(zip(own, recorded, strict=False))
                first = next((i for i, (a, b) in pairs if a != b), min(len(own), len(recorded)))
                name = self._recording.requests[request.arrival].request_id
                self.report.other_outputs.append((name, first))


class _Difference(Exception):
    """A batch differs from the recorded one."""


class _RecordedLength:
    """An OutputSink that ends an output where it ended in the recording."""

    def __init__(self, n_tokens: int, reason: FinishReason) -> None:
        self._left = n_tokens
        self._reason = reason

    def push(self, token_id: int) -> bool:
        self._left -= 1
        if self._left == 0 and self._reason is FinishReason.ERROR:
            raise ValueError("the output failed here when it was recorded")
        return self._left == 0 and self._reason is FinishReason.STOP


class _ComparedTimeline(Timeline):
    """Compares each iteration with the recorded one."""

    def __init__(self, recording: Recording, report: ReplayReport, clock: Callable[[], float]) -> None:
        super().__init__(clock, max_records=None)
        self.turn = 0
        self._recorded = recording.iterations
        self._report = report

    def issued(self, rows: Sequence[Row]) -> IterationRecord:
        record = super().issued(rows)
        self._report.n_iterations += 1
        was = self._recorded.get(record.number)
        own = tuple([(req.arrival, n) for req, n in rows])
        if was is not None and (was.turn, was.rows) != (self.turn, own):
            raise _Difference(
                f"iteration {record.number} was issued in turn {was.turn} with the rows {_shown(was.rows)}, "
                f"and now in turn {self.turn} with {_shown(own)}"
            )
        return record

    def check_end(self, last: int) -> None:
        """Check that no recorded iteration is missing."""
        missing = [n for n, was in self._recorded.items() if n >= len(self.iterations) and was.turn <= last]
        if missing:
            was = self._recorded[missing[0]]
            raise _Difference(
                f"iteration {missing[0]} with the rows {_shown(was.rows)} was not issued in turn {was.turn}"
            )


class _RepeatingEngine:
    """An engine whose waits return in the recorded turns."""

    def __init__(self, recording: Recording, engine: Engine) -> None:
        self.turn = 0
        self.n_workers = engine.n_workers
        self.keeps_tokens = bool(recording.header["keeps_tokens"])  # as the recorded engine did
        self._engine = engine
        self._returns = {was.returned_in for was in recording.iterations.values()}

    def issue(self, rows: Sequence[Row]) -> Iteration:
        return self._engine.issue(rows)

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        if self.turn in self._returns:
            return self._engine.wait(iteration, never)
        if interrupted is never:
            raise _Difference(f"turn {self.turn} waited for an iteration, and did not before")
        return None


def _shown(rows: Sequence[tuple[int, int]]) -> str:
    text = ", ".join(f"{n} of request {arrival}" for arrival, n in rows[:8])
    return f"[{text}, ...]" if len(rows) > 8 else f"[{text}]"


def recorded_serving(recording: Recording) -> ServingConfig:
    """The sizes of the recorded engine, without the limits of its queue."""
    serving = ServingConfig.from_dict(recording.header["serving"])
    return replace(serving, max_queue=_NO_LIMIT)


def recorded_speculation(
    recording: Recording, config: ServingConfig, drafter: SharedDrafter | None = None
) -> Speculation | None:
    """The drafts of the recorded engine, made again: a drafter guesses the same for the same output.

    `drafter` is the draft model, if that drafted. Raises ConfigError if a user's drafter is not there.
    """
    vocab_size = recording.header["vocab_size"]
    return configured_speculation(config.scheduling, vocab_size=vocab_size, draft_model=drafter)
