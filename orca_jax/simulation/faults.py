"""Fault injection: serves requests while workers are lost, with faults from a seed, on a virtual clock.

Scheduler, pool, K/V manager, engine master, the master's side of the workers and their controllers are real;
processes, devices and lines are simulated. A trace always plays the same way, so a failing seed can be
replayed.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from orca_jax.config import Deadlines, RestartBound, ServingConfig
from orca_jax.control.start_order import StartOrder
from orca_jax.engine.remote_engine import RemoteEngine
from orca_jax.engine.remote_workers import RemoteWorkers
from orca_jax.errors import EngineError, OrcaError, WorkerLost
from orca_jax.iteration.shape import EngineShape
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.kv_manager import KVManager, round_up
from orca_jax.scheduling.recovery import Recovery
from orca_jax.scheduling.request_pool import Delivery, RequestPool
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline
from orca_jax.simulation.engine import VirtualClock
from orca_jax.simulation.lines import Damage, SimulatedLines
from orca_jax.simulation.tokens import SimulatedConstraint, undisturbed_tokens
from orca_jax.simulation.workers import Poison, SimulatedStage, Timing
from orca_jax.workers.controller import Controller

VOCAB_SIZE = 97
STOP_TOKEN = 5
DEADLINES = Deadlines(
    iteration_seconds=2.0, worker_seconds=4.0, ready_seconds=12.0, retry_seconds=0.5, look_seconds=12.0
)
_SUPERVISOR_PATIENCE = 0.9 * DEADLINES.ready_seconds
# crash: the process dies and restarts after `seconds`. stop: SIGSTOP for `seconds`. hang: the device never
# finishes again. fail: the device raises an error. lie: the worker sends a well-formed but false frame.
FaultKind = Literal["crash", "stop", "hang", "fail", "lie"] | Damage
_PROCESS_FAULTS: tuple[FaultKind, ...] = ("crash", "crash", "stop", "stop", "hang", "fail", "lie")
_LINE_FAULTS: tuple[FaultKind, ...] = ("drop", "duplicate", "delay", "corrupt")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request: its arrival time, its numbers of input and output tokens, and what is special about it.

    A SimulatedConstraint may restrict its output, and it may kill workers (`poison`).
    """

    time: float
    n_input: int
    n_output: int
    constrained: bool = False
    poison: Poison | None = None


@dataclass(frozen=True, slots=True)
class PlannedEnd:
    """When a user ends a request, given by its number."""

    time: float
    number: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at a stage, counted from 0.

    `which` chooses the lie, or the direction and number of damaged frames, or whether the master notices a
    crash at once.
    """

    time: float
    kind: FaultKind
    stage: int
    seconds: float = 1.0
    which: int = 0


@dataclass(frozen=True, slots=True)
class FaultTrace:
    """The complete input of a simulation."""

    n_stages: int
    max_bs: int
    block_size: int
    n_slots: int
    max_batch_tokens: int
    requests: tuple[PlannedRequest, ...]
    ends: tuple[PlannedEnd, ...] = ()
    faults: tuple[Fault, ...] = ()
    restarts: int = 100
    timing: Timing = field(default_factory=Timing)
    supervised: bool = False  # suspected workers are killed and restarted
    forward_ahead: bool = True
    overlap: bool = True


def random_fault_trace(seed: int) -> FaultTrace:
    """A trace from a seed: a few requests, and faults while they run and during recoveries."""
    rng = random.Random(seed)
    n_stages = rng.choice((1, 2, 2, 3, 4))
    requests: list[PlannedRequest] = []
    time = 0.0
    n_requests = rng.randint(1, 5)
    most_output = 5 if n_requests > 2 else 10
    for _ in range(n_requests):
        time += rng.choice((0.0, 0.0, 0.1, 0.5))
        n_input, n_output = rng.randint(1, 6), rng.randint(1, most_output)
        requests.append(PlannedRequest(time, n_input, n_output, rng.random() < 0.3))
    longest = max(r.n_input + r.n_output for r in requests)
    block_size = rng.randint(1, 4)
    max_bs = rng.randint(1, 4)
    timing = Timing(
        iteration=rng.choice((0.02, 0.1, 0.2)),
        caches=rng.choice((0.01, 0.3)),
        restart=rng.choice((0.2, 1.0, 3.0)),
        turn=rng.choice((0.0, 0.001, 0.05, 0.3)),
        pulls_hang=rng.random() < 0.3,
    )
    # About the duration without faults; later faults hit a recovery.
    span = time + timing.iteration * n_stages * 5
    faults: list[Fault] = []
    at = 0.0
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.uniform(0, span) if rng.random() < 0.6 else at + rng.choice((0.01, 0.1, 1.0, 2.5))
        faults.append(_random_fault(rng, at, n_stages))
        if rng.random() < 0.5:  # a late frame, and a loss with a quick recovery
            late: FaultKind = rng.choice(("delay", "duplicate"))
            seconds, which = rng.uniform(0.02, 1.5), rng.choice((0, 0, 1))  # to or from a stage
            faults.append(Fault(at, late, rng.randrange(n_stages), seconds, which))
            kind = rng.choice(("fail", "lie", "corrupt"))
            at += rng.choice((0.01, 0.1, 0.3))
            faults.append(Fault(at, kind, rng.randrange(n_stages), 0.0, rng.randrange(16)))
    ends: list[PlannedEnd] = []
    for _ in range(rng.choice((0, 0, 1, 2))):
        reason = rng.choice((FinishReason.CANCELLED, FinishReason.TIMEOUT))
        ends.append(PlannedEnd(rng.uniform(0, span + 2), rng.randrange(len(requests)), reason))
    n_slots = round_up(longest, block_size) + rng.choice((0, longest, 4 * longest))
    max_batch_tokens = max(max_bs, longest - 1) + rng.choice((0, 3, 30))
    restarts = rng.choice((0, 1, 2, 20, 20, 20, 20, 20, 20, 20))
    # Compiling may take longer than worker_seconds, and less than ready_seconds.
    timing = replace(timing, programs=rng.choice((0.0, 0.0, DEADLINES.worker_seconds + 0.5)))
    return FaultTrace(
        n_stages=n_stages,
        max_bs=max_bs,
        block_size=block_size,
        n_slots=n_slots,
        max_batch_tokens=max_batch_tokens,
        requests=tuple(requests),
        ends=tuple(ends),
        faults=tuple(sorted(faults, key=lambda fault: fault.time)),
        restarts=restarts,
        timing=timing,
        supervised=rng.random() < 0.5,
        forward_ahead=rng.random() < 0.9,
        overlap=rng.random() < 0.8,
    )


def _random_fault(rng: random.Random, time: float, n_stages: int) -> Fault:
    kind = rng.choice(_PROCESS_FAULTS if rng.random() < 0.6 else _LINE_FAULTS)
    if kind in ("crash", "stop"):
        seconds = math.inf if rng.random() < 0.05 else rng.choice((0.05, 0.5, 1.9, 2.1, 6.0))
    else:
        seconds = rng.choice((0.001, rng.uniform(0, 0.5), rng.uniform(0, 3), rng.uniform(2, 4)))
    return Fault(time, kind, rng.randrange(n_stages), seconds, rng.randrange(1 << 10))


def random_poison_trace(seed: int) -> FaultTrace:
    """A trace from a seed whose only faults come from one or two poisonous requests.

    It also has at least one healthy request. If each poisonous request strikes at a fixed token, the restart
    bound is their number: all losses by one request count as one.
    """
    rng = random.Random(seed)
    trace = random_fault_trace(rng.getrandbits(32))
    requests = list(trace.requests)
    if len(requests) == 1:
        requests.append(PlannedRequest(requests[0].time, rng.randint(1, 6), rng.randint(1, 10)))
    n_poisons = rng.randint(1, min(2, len(requests) - 1))
    sure = rng.random() < 0.7
    for i in rng.sample(range(len(requests)), n_poisons):
        requests[i] = replace(requests[i], poison=_random_poison(rng, requests[i], trace.n_stages, sure=sure))
    longest = max(r.n_input + r.n_output for r in requests)
    return replace(
        trace,
        requests=tuple(requests),
        faults=(),
        n_slots=max(trace.n_slots, round_up(longest, trace.block_size)),
        max_batch_tokens=max(trace.max_batch_tokens, longest - 1),
        restarts=n_poisons if sure else 100,
        supervised=True,
    )


def _random_poison(rng: random.Random, request: PlannedRequest, n_stages: int, *, sure: bool) -> Poison:
    stage, noticed = rng.randrange(n_stages), rng.random() < 0.7
    if sure:
        return Poison(stage, token_index=rng.randrange(request.n_output), noticed=noticed)
    return Poison(stage, probability=rng.choice((0.1, 0.5, 0.9)), noticed=noticed)


class FaultSimulation:
    """Plays a trace: iterate over `steps` to its end, then inspect the fields."""

    def __init__(self, trace: FaultTrace) -> None:
        self.trace = trace
        self.clock = VirtualClock()
        self.deliveries: list[Delivery] = []
        self.refused: list[tuple[Request, OrcaError]] = []
        self.asked_to_end: set[str] = set()
        self.suspects: list[int] = []
        self._joined: dict[int, Controller] = {}  # each stage's process that was last ready
        self.failure: EngineError | None = None
        config = ServingConfig(
            max_batch_size=trace.max_bs,
            n_slots=trace.n_slots,
            max_batch_tokens=trace.max_batch_tokens,
            block_size=trace.block_size,
            overlap=trace.overlap,
        )
        n_rows = (trace.n_stages + trace.overlap) * trace.max_bs
        max_blocks = config.n_blocks
        self.kv = KVManager(
            n_blocks=config.n_blocks,
            block_size=config.block_size,
            n_rows=n_rows,
            max_blocks_per_row=max_blocks,
        )
        shape = EngineShape(
            block_size=config.block_size,
            max_blocks=max_blocks,
            max_rows=config.max_batch_size,
            max_tokens=config.max_batch_tokens,
            n_rows=n_rows,
            n_blocks=config.n_blocks,
            vocab_size=VOCAB_SIZE,
        )
        self.lines = SimulatedLines(
            self.clock, seconds=trace.timing.line, longest_wait=DEADLINES.look_seconds
        )
        self.stages = [
            SimulatedStage(
                i,
                trace.n_stages,
                lines=self.lines,
                timing=trace.timing,
                forward_ahead=trace.forward_ahead,
            )
            for i in range(trace.n_stages)
        ]
        self.lines.stages = self.stages
        for stage, following in zip(self.stages, self.stages[1:], strict=False):
            stage.next = following
        self.workers = RemoteWorkers(
            self.lines,
            [
                StartOrder(
                    shape=shape,
                    next_address=str(i + 1) if i + 1 < trace.n_stages else "",
                    worker_seconds=DEADLINES.worker_seconds,
                    ready_seconds=DEADLINES.ready_seconds,
                )
                for i in range(trace.n_stages)
            ],
            clock=self.clock.now,
            deadlines=DEADLINES,
            on_suspect=self._suspect,
            on_ready=self._note_ready,
        )
        self.engine = RemoteEngine(
            self.workers,
            self.kv,
            vocab_size=VOCAB_SIZE,
            n_workers=trace.n_stages,
            sleep=lambda _: self.workers.wait(),  # returns after every event
        )
        self.timeline = Timeline(self.clock.now, max_records=None)
        self.pool = RequestPool(
            max_waiting=config.max_queue,
            on_arrival=self.timeline.arrived,
            on_deliveries=self.deliveries.extend,
        )
        self.scheduler = Scheduler(self.pool, self.engine, self.kv, config=config, timeline=self.timeline)
        self.recovery = Recovery(
            self.scheduler, bound=RestartBound(restarts=trace.restarts), clock=self.clock.now
        )
        self.requests = [self._plan(i, planned) for i, planned in enumerate(trace.requests)]
        for end in trace.ends:
            self.clock.call_at(end.time, lambda end=end: self._end(end))
        for fault in trace.faults:
            self.clock.call_at(fault.time, lambda fault=fault: self._inject(fault))

    def undisturbed(self, request: Request) -> list[int]:
        """The tokens that a request must get, up to its length or its stop token."""
        n_output = request.max_tokens - len(request.prompt_ids)
        tokens = undisturbed_tokens(
            request.prompt_ids,
            request.seed,
            n_output,
            n_stages=self.trace.n_stages,
            vocab_size=VOCAB_SIZE,
            constrained=request.constraint is not None,
        )
        return tokens[: tokens.index(STOP_TOKEN) + 1] if STOP_TOKEN in tokens else tokens

    def steps(self) -> Iterator[None]:
        """Play until every request has arrived and ended; yields after each turn that did some work."""
        try:
            self.engine.recover(lambda: False)
        except WorkerLost:
            pass  # the first iteration recovers
        n_to_come = len(self.requests)
        while n_to_come or len(self.pool) or self.scheduler.leaving:
            try:
                # As after the end of the service's thread, new requests are refused after a failure.
                worked = self.failure is None and self.recovery.step(lambda: False)
            except EngineError as failure:  # as the service does
                self.failure = failure
                self.pool.close()
                self.scheduler.fail_all()
                worked = True
            if worked:
                yield
                self._let_pass(self.trace.timing.turn)
            elif not len(self.pool) and self.clock.next_event() < math.inf:
                self.clock.run_next()
            n_to_come = sum(req.arrival < 0 for req in self.requests) - len(self.refused)

    def _let_pass(self, seconds: float) -> None:
        """Let time pass in which the engine master computes and handles no arrivals."""
        end = self.clock.now() + seconds
        while self.clock.next_event() <= end:
            self.clock.run_next()
        self.clock.advance_to(end)

    def _plan(self, number: int, planned: PlannedRequest) -> Request:
        request = Request(
            request_id=str(number),
            prompt_ids=tuple((7 * number + 3 * i) % VOCAB_SIZE for i in range(planned.n_input)),
            max_tokens=planned.n_input + planned.n_output,
            sampling=SamplingParams(max_tokens=planned.n_output),
            seed=number * 1_000_003,
            end_token_ids=frozenset({STOP_TOKEN}),
            constraint=SimulatedConstraint(VOCAB_SIZE) if planned.constrained else None,
        )

        if planned.poison is not None:
            for stage in self.stages:
                stage.poisons[request.seed] = planned.poison

        def add() -> None:
            try:
                self.pool.add(request)
            except OrcaError as error:
                self.refused.append((request, error))

        self.clock.call_at(planned.time, add)
        return request

    def _note_ready(self, stage: int) -> None:
        self._joined[stage] = self.stages[stage].controller

    def _suspect(self, stage: int) -> None:
        """Act as the supervisor, which does not kill a process that is still starting."""
        self.suspects.append(stage)
        suspect = self.stages[stage]
        joined = self._joined.get(stage) is suspect.controller
        if self.trace.supervised and (joined or self.clock.now() - suspect.began >= _SUPERVISOR_PATIENCE):
            suspect.die(self.trace.timing.restart, noticed=True)

    def _end(self, end: PlannedEnd) -> None:
        if self.pool.end(self.requests[end.number], end.reason):
            self.asked_to_end.add(str(end.number))

    def _inject(self, fault: Fault) -> None:
        stage = self.stages[fault.stage]
        match fault.kind:
            case "crash":
                stage.die(fault.seconds, noticed=fault.which % 2 == 0)
            case "stop":
                stage.stop(fault.seconds)
            case "hang":
                stage.device.hangs = True
            case "fail":
                stage.device.fails_next = True
            case "lie":
                stage.lie(fault.which)
            case damage:
                for _ in range(1 + fault.which // 2 % 4):
                    self.lines.damage_next(fault.stage, fault.which % 2 == 0, damage, fault.seconds)
