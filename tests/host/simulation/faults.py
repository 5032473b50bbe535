"""Fault injection: serves requests while workers are lost, with faults from a seed, on a virtual clock.

Scheduler, pool, K/V manager, engine master, the master's side of the workers and their controllers are real;
processes, devices and lines are simulated. A trace always plays the same way, so a failing seed can be
replayed.
"""

import math
import random
from collections.abc import Iterator, Sequence
from functools import partial

from orca_jax.config import RestartBound, ServingConfig
from orca_jax.control.start_order import StartOrder
from orca_jax.engine.remote_workers import RemoteEngine, RemoteWorkers, Supervision
from orca_jax.errors import EngineError, LossCause, OrcaError, WorkerLost
from orca_jax.iteration.rows.drafted import Drafted
from orca_jax.iteration.shape import EngineShape
from orca_jax.planning.sizes import kv_manager
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.recovery import Recovery
from orca_jax.scheduling.request_pool import RequestPool
from orca_jax.scheduling.restart import fail_all
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline
from orca_jax.scheduling.waiting_queue import waiting_queue
from orca_jax.simulation.engine import VirtualClock
from orca_jax.simulation.simulation import Shown, shown
from orca_jax.speculation.drafter import Speculation
from orca_jax.workers.controller import Controller
from orca_jax.workers.loss_cause import cause_of_states
from tests.host.simulation.fault_trace import DEADLINES, Fault, FaultTrace, PlannedEnd, PlannedRequest
from tests.host.simulation.lines import SimulatedLines
from tests.host.simulation.tokens import SimulatedConstraint, undisturbed_tokens
from tests.host.simulation.workers import KILLED, SimulatedStage

VOCAB_SIZE = 97
STOP_TOKEN = 5
_SUPERVISOR_PATIENCE = 0.9 * DEADLINES.ready_seconds


class Oracle:
    """A drafter that knows the output, and is wrong with a probability."""

    def __init__(self, right: Sequence[int], *_: object, wrong: float, seed: int) -> None:
        self._right = right
        self._wrong = wrong
        self._random = random.Random(seed)

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        """Up to `n` tokens."""
        drafts = self._right[len(output_ids) :][: self._random.randint(0, n)]
        return [(token_id + (self._random.random() < self._wrong)) % VOCAB_SIZE for token_id in drafts]


class FaultSimulation:
    """Plays a trace: iterate over `steps` to its end, then inspect the fields."""

    def __init__(self, trace: FaultTrace) -> None:
        self.trace = trace
        self.clock = VirtualClock()
        self.deliveries: list[Shown] = []
        self.refused: list[tuple[Request, OrcaError]] = []
        self.asked_to_end: set[str] = set()
        self.suspects: list[int] = []
        self._joined: dict[int, Controller] = {}  # each stage's last process that became ready
        self.failure: EngineError | None = None
        config = ServingConfig(
            max_batch_size=trace.max_bs,
            n_slots=trace.n_slots,
            max_batch_tokens=trace.max_batch_tokens,
            block_size=trace.block_size,
            overlap=trace.overlap,
            scheduling=trace.scheduling,
        )
        n_rows = (trace.n_stages + trace.overlap) * trace.max_bs
        shape = EngineShape(
            block_size=config.block_size,
            max_blocks=config.n_blocks,
            max_rows=config.max_batch_size,
            max_tokens=config.max_batch_tokens,
            n_rows=n_rows,
            n_blocks=config.n_blocks,
            vocab_size=VOCAB_SIZE,
        )
        self.kv = kv_manager(shape, config.scheduling)
        self.lines = SimulatedLines(
            self.clock, seconds=trace.timing.line, longest_wait=DEADLINES.look_seconds
        )
        self.stages = [
            SimulatedStage(i, trace.n_stages, lines=self.lines, timing=trace.timing, moves=trace.moves)
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
                    next_address="",
                    worker_seconds=DEADLINES.worker_seconds,
                    ready_seconds=DEADLINES.ready_seconds,
                )
                for _ in range(trace.n_stages)
            ],
            clock=self.clock.now,
            deadlines=DEADLINES,
            supervision=Supervision(
                on_suspect=self._suspect, on_ready=self._note_ready, cause_of=self._cause_of
            ),
        )
        self.engine = RemoteEngine(
            self.workers,
            self.kv,
            vocab_size=VOCAB_SIZE,
            n_workers=trace.n_stages,
            look_seconds=DEADLINES.look_seconds,  # a wait returns after every event
        )
        self.timeline = Timeline(self.clock.now, max_records=None)
        self.pool = RequestPool(
            max_waiting=config.max_queue,
            on_arrival=self.timeline.arrived,
            queue=waiting_queue(config.scheduling),
            clock=self.clock.now,
            on_deliveries=lambda some: self.deliveries.extend(shown(some)),
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
                # After a failure new requests are refused, as after the end of the service's thread.
                worked = self.failure is None and self.recovery.step(lambda: False)
            except EngineError as failure:  # as the service does
                self.failure = failure
                self.pool.close()
                fail_all(self.scheduler)
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
            prompt_ids=self._prompt(number, planned.n_input),
            max_tokens=planned.n_input + planned.n_output,
            sampling=SamplingParams(max_tokens=planned.n_output),
            seed=number * 1_000_003,
            end_token_ids=frozenset({STOP_TOKEN}),
            constraint=SimulatedConstraint(VOCAB_SIZE) if planned.constrained else None,
            owner=planned.owner,
            priority=planned.priority,
        )
        if planned.wrong_drafts is not None:
            right = self.undisturbed(request)
            drafter = partial(Oracle, right, wrong=planned.wrong_drafts, seed=number)
            request.kind = Drafted(Speculation(drafter, 4, VOCAB_SIZE))
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

    def _prompt(self, number: int, n_input: int) -> tuple[int, ...]:
        if not self.trace.alike:
            return tuple((7 * number + 3 * i) % VOCAB_SIZE for i in range(n_input))
        # Prompts in groups of three begin with the same tokens; groups differ only in the first token.
        return (number // 3, *(3 * i % VOCAB_SIZE for i in range(1, n_input)))

    def _note_ready(self, stage: int) -> None:
        self._joined[stage] = self.stages[stage].controller
        self.stages[stage].forget_states()

    def _cause_of(self, stage: int, seen: LossCause) -> LossCause:
        """Find the cause as the supervisor does, which knows how processes end."""
        if not self.trace.supervised:
            return seen
        states = [state for stage in self.stages for state in stage.states]
        return cause_of_states(states, seen=seen, for_memory=False)

    def _suspect(self, stage: int) -> None:
        """Kill a suspect as the supervisor does, unless it is still starting."""
        self.suspects.append(stage)
        suspect = self.stages[stage]
        joined = self._joined.get(stage) is suspect.controller
        if self.trace.supervised and (joined or self.clock.now() - suspect.began >= _SUPERVISOR_PATIENCE):
            suspect.die(self.trace.timing.restart, noticed=True, status=KILLED, was_suspect=True)

    def _end(self, end: PlannedEnd) -> None:
        if self.pool.end(self.requests[end.number], end.reason):
            self.asked_to_end.add(str(end.number))

    def _inject(self, fault: Fault) -> None:
        stage = self.stages[fault.stage]
        match fault.kind:
            case "crash":
                stage.die(fault.seconds, noticed=fault.which % 2 == 0)
            case "kill":
                stage.die(fault.seconds, noticed=True, status=KILLED)
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
