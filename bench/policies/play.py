"""Plays a trace with a scheduler, on a virtual or a real clock, and measures what its clients would see.

A request's times count from its planned arrival. Everything runs on one thread: with a real clock, a request
that arrives during an iteration is added after it, when the scheduler could first take it.
"""

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from bench.policies.figures import Figures, quantile
from bench.policies.traces import Conversation, Trace
from orca_jax.config import SchedulingConfig
from orca_jax.request.request import Request, Row
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.engine_protocol import Engine, Iteration, Returned
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.request_pool import Delivery, RequestPool
from orca_jax.scheduling.timeline import Timeline
from orca_jax.scheduling.waiting_queue import waiting_queue
from orca_jax.simulation.engine import VirtualClock
from orca_jax.simulation.simulation import Steps, steps

KEPT = 16  # the timeline's records: enough for iterations in flight
_EVERY = 8  # iterations between two looks at the slots in use


class RealClock(VirtualClock):
    """Counts the seconds since it was created; `run_next` sleeps until the event's time."""

    def __init__(self) -> None:
        super().__init__()
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def call_at(self, time: float, action: Callable[[], object]) -> None:
        super().call_at(max(time, self._now), action)  # it may have passed during an iteration

    def run_next(self) -> None:
        time.sleep(max(0.0, self.next_event() - self.now()))
        super().run_next()


class WatchedEngine:
    """An engine that samples how many of the slots held by its batches have tokens."""

    def __init__(self, engine: Engine, kv: KVManager) -> None:
        self.n_workers, self.keeps_tokens = engine.n_workers, engine.keeps_tokens
        self.n_iterations = 0
        self.n_held = 0
        self.n_used = 0
        self._engine = engine
        self._kv = kv

    def issue(self, rows: Sequence[Row]) -> Iteration:
        if self.n_iterations % _EVERY == 0:
            slots_of = self._kv.slots_of
            self.n_held += sum([slots_of[req.row] for req, _ in rows])
            self.n_used += sum([req.n_computed + n for req, n in rows])
        self.n_iterations += 1
        return self._engine.issue(rows)

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        return self._engine.wait(iteration, interrupted)


class _Stop:
    """A request's sink: its output is complete after `n` tokens, as if the last were a stop token."""

    def __init__(self, n: int) -> None:
        self._n_left = n

    def push(self, token_id: int) -> bool:
        self._n_left -= 1
        return self._n_left == 0


@dataclass(slots=True)
class _Live:
    """A turn in the pool, its planned arrival, and the time of its last token."""

    conversation: Conversation
    turn: int
    arrival: float
    last: float = 0.0


@dataclass(slots=True)
class _Seen:
    """Latencies in seconds of the conversations that `counts` marks; `n_tokens` and the rest cover all."""

    first: "array[float]" = field(default_factory=lambda: array("d"))
    gaps: "array[float]" = field(default_factory=lambda: array("d"))
    normalized: "array[float]" = field(default_factory=lambda: array("d"))
    latency: "array[float]" = field(default_factory=lambda: array("d"))
    n_tokens: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    ends: "array[float]" = field(default_factory=lambda: array("d"))


MakeScheduler = Callable[[RequestPool, Engine, Timeline], Steps]


def play(
    trace: Trace,
    make_scheduler: MakeScheduler,
    *,
    clock: VirtualClock,
    engine: Engine,
    kv: KVManager,
    scheduling: SchedulingConfig,
    declares_limits: bool = True,
    vocabulary: int | None = None,
) -> Figures:
    """Play the trace until its last conversation ends.

    Without `declares_limits`, requests declare their real output lengths. Prompts' tokens are taken modulo
    `vocabulary`.
    """
    seen = _Seen()
    live: dict[Request, _Live] = {}
    timeline = Timeline(clock.now, max_records=KEPT)

    def add(conversation: Conversation, turn: int, history: tuple[int, ...], arrival: float) -> None:
        asked = conversation.turns[turn]
        new = asked.new_ids if vocabulary is None else tuple(i % vocabulary for i in asked.new_ids)
        prompt = history + new
        limit = asked.limit if declares_limits else asked.n_output
        number = timeline.n_arrived
        request = Request(
            str(number),
            prompt,
            len(prompt) + limit,
            SamplingParams(max_tokens=limit, temperature=0, ignore_eos=True),
            seed=number,
            sink=_Stop(asked.n_output),
            owner=conversation.owner,
        )
        live[request] = _Live(conversation, turn, arrival)
        seen.n_prompt += len(prompt)
        pool.add(request)

    def delivered(deliveries: Sequence[Delivery]) -> None:
        now = clock.now()
        for request, n_new, reason in deliveries:
            one = live[request]
            counts = one.conversation.counts
            for _ in range(n_new):
                seen.n_tokens += 1
                if counts:
                    if one.last:
                        seen.gaps.append(now - one.last)
                    else:
                        seen.first.append(now - one.arrival)
                one.last = now
            if reason is not None:
                del live[request]
                ended(request, one, now)

    def ended(request: Request, one: _Live, now: float) -> None:
        conversation, n_output = one.conversation, len(request.output_ids)
        assert n_output == conversation.turns[one.turn].n_output, f"{n_output} tokens of {request.request_id}"
        seen.n_cached += request.n_cached
        seen.ends.append(now)
        if conversation.counts:
            seen.latency.append(now - one.arrival)
            seen.normalized.append((now - one.arrival) / n_output)
        for turn in conversation.following(one.turn):
            at = now + conversation.turns[turn].think
            history = request.prompt_ids + tuple(request.output_ids)
            clock.call_at(at, partial(add, conversation, turn, history, at))

    pool = RequestPool(
        max_waiting=1 << 30,
        on_arrival=timeline.arrived,
        on_deliveries=delivered,
        queue=waiting_queue(scheduling),
        clock=clock.now,
    )
    watched = WatchedEngine(engine, kv)
    scheduler = make_scheduler(pool, watched, timeline)
    for conversation in trace:
        clock.call_at(conversation.arrival, partial(add, conversation, 0, (), conversation.arrival))
    for _ in steps(clock, scheduler):
        pass
    assert not live, f"{len(live)} requests did not end"
    return _figures(trace, seen, watched, scheduler)


def _figures(trace: Trace, seen: _Seen, engine: WatchedEngine, scheduler: Steps) -> Figures:
    return Figures(
        n_requests=len(seen.ends),
        tokens_s=seen.n_tokens / (seen.ends[-1] - trace[0].arrival),
        latency_mean=sum(seen.latency) / max(1, len(seen.latency)),
        latency_p99=quantile(seen.latency, 0.99),
        normalized_p50=quantile(seen.normalized, 0.5),
        normalized_p90=quantile(seen.normalized, 0.9),
        normalized_p99=quantile(seen.normalized, 0.99),
        first_p50=quantile(seen.first, 0.5),
        first_p99=quantile(seen.first, 0.99),
        between_p50=quantile(seen.gaps, 0.5),
        between_p99=quantile(seen.gaps, 0.99),
        between_most=quantile(seen.gaps, 1.0),
        slots_in_use=engine.n_used / engine.n_held,
        n_recomputed=getattr(scheduler, "n_recomputed", 0),
        cached_share=seen.n_cached / seen.n_prompt,
        n_preemptions=getattr(scheduler, "n_preemptions", 0),
        n_iterations=engine.n_iterations,
    )
