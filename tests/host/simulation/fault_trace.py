"""Fault traces: requests, faults and sizes, written by hand or drawn from a seed."""

import itertools
import math
import random
from dataclasses import dataclass, field, replace
from typing import Literal

from orca_jax.config import ORCA, Deadlines, QueueOrder, SchedulingConfig
from orca_jax.request.request import FinishReason
from orca_jax.scheduling.blocks import round_up
from tests.host.simulation.lines import Damage
from tests.host.simulation.workers import Poison, Timing

DEADLINES = Deadlines(
    iteration_seconds=2.0, worker_seconds=4.0, ready_seconds=12.0, retry_seconds=0.5, look_seconds=12.0
)
# crash: the process dies and restarts after `seconds`. kill: the same, by SIGKILL from outside. stop: SIGSTOP
# for `seconds`. hang: the device never finishes again. fail: the device raises an error. lie: the worker
# sends a well-formed but false frame.
FaultKind = Literal["crash", "kill", "stop", "hang", "fail", "lie"] | Damage
_PROCESS_FAULTS: tuple[FaultKind, ...] = ("crash", "crash", "stop", "stop", "hang", "fail", "lie")
# Chunked prefill, the prefix cache, blocks on demand, and the order of the queue.
_ORDERS: tuple[QueueOrder, ...] = ("fcfs", "priority", "fair", "longest-prefix")
_SWITCHES = tuple(
    switches
    for switches in itertools.product((False, True), (False, True), (False, True), _ORDERS)
    if switches[1] or switches[3] != "longest-prefix"
)
_LINE_FAULTS: tuple[FaultKind, ...] = ("drop", "duplicate", "delay", "corrupt")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request: its arrival time, and its numbers of input and output tokens.

    A SimulatedConstraint may restrict its output, and it may kill workers (`poison`). `priority` and `owner`
    are as in Request.
    """

    time: float
    n_input: int
    n_output: int
    constrained: bool = False
    poison: Poison | None = None
    priority: int = 0
    owner: str = ""
    wrong_drafts: float | None = None  # the fraction of wrong ones; None: no drafts


@dataclass(frozen=True, slots=True)
class PlannedEnd:
    """A user's cancellation or timeout of the request with this number."""

    time: float
    number: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at a stage, counted from 0.

    `which` selects the lie, the direction and number of damaged frames, or whether the master notices a crash
    at once.
    """

    time: float
    kind: FaultKind
    stage: int
    seconds: float = 1.0
    which: int = 0


@dataclass(frozen=True, slots=True)
class FaultTrace:
    """The complete input of a simulation. With `alike`, several prompts begin with the same tokens."""

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
    moves: bool = False  # a restarted worker has another address
    overlap: bool = True
    scheduling: SchedulingConfig = ORCA
    alike: bool = False


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
        if rng.random() < 0.5:  # a late frame, then a loss with a quick recovery
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
        moves=seed % 3 == 0,
        overlap=rng.random() < 0.8,
    )


def _random_fault(rng: random.Random, time: float, n_stages: int) -> Fault:
    kind = rng.choice(_PROCESS_FAULTS if rng.random() < 0.6 else _LINE_FAULTS)
    if kind in ("crash", "stop"):
        seconds = math.inf if rng.random() < 0.05 else rng.choice((0.05, 0.5, 1.9, 2.1, 6.0))
    else:
        seconds = rng.choice((0.001, rng.uniform(0, 0.5), rng.uniform(0, 3), rng.uniform(2, 4)))
    return Fault(time, kind, rng.randrange(n_stages), seconds, rng.randrange(1 << 10))


def switched(trace: FaultTrace, seed: int) -> FaultTrace:
    """The trace with a combination of the scheduler's options; 24 consecutive seeds cover all of them.

    Memory is often just enough for the longest request, and chunked prompts may exceed an iteration.
    """
    chunked, prefixes, on_demand, order = _SWITCHES[seed % len(_SWITCHES)]
    rng = random.Random(seed)
    requests = [
        replace(
            planned,
            n_input=planned.n_input + rng.choice((0, 0, 6)),
            priority=rng.choice((0, 0, 1, -2)),
            owner=rng.choice("AB"),
        )
        for planned in trace.requests
    ]
    longest = max(planned.n_input + planned.n_output for planned in requests)
    most_tokens = max(trace.max_batch_tokens, longest - 1)
    if chunked and rng.random() < 0.5:
        most_tokens = trace.max_bs + rng.choice((0, 1, 3))
    return replace(
        trace,
        requests=tuple(requests),
        n_slots=round_up(longest, trace.block_size) + rng.choice((0, 0, 3, longest, 4 * longest)),
        max_batch_tokens=most_tokens,
        scheduling=SchedulingConfig(
            chunked_prefill=chunked,
            prefill_tokens=rng.choice((None, 1, 3)),
            prefix_caching=prefixes,
            reservation="on-demand" if on_demand else "full",
            scheduling_policy=order,
            aging_seconds=rng.choice((0.1, 1.0)),
        ),
        alike=rng.random() < 0.7,
    )


def drafted(trace: FaultTrace, seed: int) -> FaultTrace:
    """The trace with drafts for most requests, and with longer outputs."""
    rng = random.Random(seed)
    requests = [
        replace(
            planned,
            n_output=planned.n_output * rng.choice((1, 2, 3)),
            wrong_drafts=rng.choice((None, 0.0, 0.2, 0.5, 1.0)),
        )
        for planned in trace.requests
    ]
    longest = max(planned.n_input + planned.n_output for planned in requests)
    least_tokens = 0 if trace.scheduling.chunked_prefill else longest - 1
    n_places = rng.choice((0, 2))
    return replace(
        trace,
        requests=tuple(requests),
        n_slots=max(trace.n_slots, round_up(longest, trace.block_size)),
        max_batch_tokens=max(trace.max_batch_tokens, least_tokens) + n_places,
        max_bs=trace.max_bs + n_places,
    )
