"""Simulated serving whose workers are lost: thousands of seeds with different faults, on a virtual clock.

To replay a failing seed: `Player(random_fault_trace(seed)).play()`, maybe with `switched(trace, seed)`, which
turns on extensions of Algorithm 1.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

import pytest

from orca_jax.errors import LossCause
from orca_jax.iteration.rows.drafted import Drafted
from orca_jax.request.request import FinishReason, Request, RequestState
from orca_jax.scheduling.blocks import round_up
from orca_jax.scheduling.quarantine import Suspicion
from tests.host.simulation.fault_trace import (
    DEADLINES,
    Fault,
    FaultKind,
    FaultTrace,
    PlannedEnd,
    PlannedRequest,
    drafted,
    random_fault_trace,
    switched,
)
from tests.host.simulation.faults import FaultSimulation
from tests.host.simulation.workers import HIDDEN_BYTES, Poison, Timing
from tests.random_pieces import RandomPieces

N_SEEDS = 5_000  # with switches; half as many without
# A trace ends by its turns on the virtual clock (`Player.play`). Real time only ends a hang, and thousands of
# traces may meet a pause of the machine.
MANY_TRACES = pytest.mark.timeout(900)


class Player(FaultSimulation):
    """Plays a trace, and checks the invariants in every turn; with `cut` prompts run in random chunks."""

    epochs_seen = 0
    losses_seen = 0

    def __init__(self, trace: FaultTrace, *, cut: random.Random | None = None) -> None:
        super().__init__(trace)
        self.is_orca = trace.scheduling.policy == "orca"
        self.pieces = None if cut is None else RandomPieces(self.scheduler.policy, cut)
        self.scheduler.policy = self.pieces or self.scheduler.policy
        self.losses: list[tuple[frozenset[Request], LossCause, dict[str, int]]] = []
        record_loss = self.scheduler.quarantine.record_loss

        def note(present: Collection[Request], cause: LossCause) -> Suspicion:
            n_tokens = {req.request_id: len(req.output_ids) for req in self.requests}
            suspicion = record_loss(present, cause)
            self.losses.append((suspicion.present, cause, n_tokens))
            return suspicion

        self.scheduler.quarantine.record_loss = note

    def is_to_blame(self, request: Request) -> bool:
        """Whether it was in flight at two or more faults, the last alone, or at too many at one token."""
        its = [
            (present == {request}, cause, n_tokens[request.request_id])
            for present, cause, n_tokens in self.losses
            if request in present
        ]
        if not its:
            return False
        alone, last, stuck_at = its[-1]
        if last is LossCause.FAULT:
            return alone and sum(cause is LossCause.FAULT for _, cause, _ in its) > 1
        while its and its[0][2] != stuck_at:
            its.pop(0)
        n_alone = sum(was_alone for was_alone, _, _ in its)
        return alone and n_alone >= {LossCause.UNKNOWN: 3, LossCause.OUTSIDE: 4}[last]

    def play(self) -> None:
        n_tokens = sum(planned.n_output for planned in self.trace.requests)
        if not self.is_orca:
            n_tokens += sum(planned.n_input for planned in self.trace.requests)
        limit = 100 + 50 * (n_tokens + len(self.trace.faults) + len(self.trace.ends))
        for n_turns, _ in enumerate(self.steps()):
            self.check_turn()
            assert n_turns < limit, "no end in sight"
        self.check_rest()

    def check_turn(self) -> None:
        live = list(self.pool.in_arrival_order())
        # A suspect may run alone while earlier requests, which made room for it, wait.
        if self.is_orca or (
            self.trace.scheduling.scheduling_policy == "fcfs" and all(not req.n_losses for req in live)
        ):
            assert [req.arrival for req in live] == sorted(req.arrival for req in live)
        # Iteration-level first-come-first-served; iterations that were lost do not count.
        going_on = [req for req in live if req.n_tokens_issued < req.max_tokens and req.ending is None]
        # One that runs alone for longer goes ahead of the others: it was present at several losses, or its
        # prompt comes in pieces.
        if self.is_orca and all(req.n_losses < (1 if self.pieces else 2) for req in live):
            n_outputs = [] if self.pieces else [len(req.output_ids) for req in live]
            for counts in ([req.n_iterations for req in going_on], n_outputs):
                assert counts == sorted(counts, reverse=True), f"overtaken: {counts}"
        admitted = [req for req in live if req.row >= 0] + self.scheduler.leaving
        for req in live:
            assert (
                not self.is_orca or self.pieces or req.n_iterations == len(req.output_ids) + req.n_in_flight
            )
            assert 0 <= req.n_partial <= req.n_in_flight
            n_drafts = len(req.kind.sent) if req.n_in_flight else 0
            assert 0 <= req.n_computed <= req.n_tokens_issued + n_drafts
            assert (req.n_in_flight > 0) == (req.state is RequestState.RUNNING)
            assert req.state is RequestState.INITIATION or req.row >= 0
            assert req.finish_reason is None
        size, scheduling = self.trace.block_size, self.trace.scheduling
        n_holders = Counter(block for req in admitted for block in self.kv.blocks_of(req.row).tolist())
        assert self.scheduler.n_rsrv == len(n_holders) * size <= self.trace.n_slots
        assert len(n_holders) + self.kv.n_free_blocks == self.kv.n_blocks, "a block was lost"
        if not scheduling.prefix_caching:
            assert max(n_holders.values(), default=1) == 1
        for req in admitted:
            blocks = self.kv.blocks_of(req.row).tolist()
            assert all(n_holders[block] == 1 for block in blocks[req.n_computed // size :]), "two writers"
            if not scheduling.on_demand:
                assert len(blocks) == round_up(req.max_tokens, size) // size
            elif not req.n_in_flight:  # one more token was in flight at a loss
                most = req.n_tokens + 1
                if isinstance(req.kind, Drafted):
                    most += req.kind.speculation.n_tokens
                assert len(blocks) <= round_up(most, size) // size, "more than it needs"
        assert len({req.row for req in admitted}) == len(admitted) == self.kv.n_rows - self.kv.n_free_rows
        assert self.workers.epoch >= self.epochs_seen
        self.epochs_seen = self.workers.epoch
        if self.recovery.losses > self.losses_seen:
            self.losses_seen = self.recovery.losses
            assert all(req.ending is None for req in admitted), "asked to end, and runs again"
        if self.recovery.trouble is not None:
            assert self.scheduler.n_scheduled == 0
            assert all(req.state is RequestState.INITIATION for req in live)

    def check_rest(self) -> None:
        assert (len(self.pool), self.scheduler.n_rsrv) == (0, 0)
        assert (self.kv.n_free_blocks, self.kv.n_free_rows) == (self.kv.n_blocks, self.kv.n_rows)
        moves = sum(stage.n_processes - 1 for stage in self.stages) if self.trace.moves else 0
        assert self.workers.epoch <= self.recovery.losses + 1 + moves, "each loss or move begins one epoch"
        if self.failure is None:
            assert not self.refused
            assert self.recovery.n_blamed or self.recovery.losses <= self.trace.restarts
        elif not self.recovery.n_blamed:
            assert self.recovery.losses == self.trace.restarts + 1, str(self.failure)
        # Every wait ends: no token takes longer than an iteration's deadline, no loss than a recovery's.
        last = max(
            [planned.time for planned in self.trace.requests]
            + [fault.time for fault in self.trace.faults]
            + [0.0]
        )
        n_tokens = sum(planned.n_output for planned in self.trace.requests)
        if self.pieces:  # and as many iterations as its input has tokens, again after each loss
            n_tokens += (1 + self.recovery.losses) * sum(planned.n_input for planned in self.trace.requests)
        if not self.is_orca:  # the same, and again after each preemption
            n_restarts = 1 + self.recovery.losses + self.scheduler.n_preemptions
            n_tokens += n_restarts * max(
                planned.n_input + planned.n_output for planned in self.trace.requests
            )
        iterations = (n_tokens + self.recovery.losses * self.trace.n_stages) * DEADLINES.iteration_seconds
        iterations += self.trace.timing.turn * (n_tokens + 20) * (1 + self.recovery.losses)
        assert self.clock.now() <= last + iterations + (self.recovery.losses + 1) * DEADLINES.ready_seconds
        deliveries: dict[str, list[tuple[int | None, FinishReason | None]]] = {}
        for request, token_id, reason in self.deliveries:
            deliveries.setdefault(request.request_id, []).append((token_id, reason))
        refused = {request.request_id for request, _ in self.refused}
        for request in self.requests:
            if request.request_id not in refused:
                self.check_request(request, deliveries[request.request_id])

    def check_request(
        self, request: Request, deliveries: list[tuple[int | None, FinishReason | None]]
    ) -> None:
        assert request.n_cached < len(request.prompt_ids)
        tokens = [token_id for token_id, _ in deliveries if token_id is not None]
        right = self.undisturbed(request)
        assert tokens == request.output_ids == right[: len(tokens)], f"{tokens} instead of {right}"
        reasons = [reason for _, reason in deliveries]
        assert reasons == [None] * (len(reasons) - 1) + [request.finish_reason], "ended other than once"
        match request.finish_reason:
            case FinishReason.CANCELLED | FinishReason.TIMEOUT:
                assert request.request_id in self.asked_to_end
                assert len(tokens) < len(right)
            case FinishReason.ERROR:
                assert (request.failure is not None) == self.is_to_blame(request)
                assert request.failure is not None or self.failure is not None
                assert len(tokens) < len(right)
            case reason:
                assert tokens == right
                assert not self.is_to_blame(request)
                full = len(right) == request.max_tokens - len(request.prompt_ids)
                assert reason is FinishReason.LENGTH or reason is FinishReason.STOP
                assert reason is FinishReason.STOP or full


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


def random_kill_trace(seed: int) -> FaultTrace:
    """A trace from a seed whose faults come from outside: workers are killed and stopped, again and again.

    Outputs are longer than elsewhere. In every fourth trace one request is poisonous as well.
    """
    rng = random.Random(seed)
    trace = random_poison_trace(rng.getrandbits(32))
    poisoned = [i for i, planned in enumerate(trace.requests) if planned.poison is not None]
    kept = poisoned[0] if seed % 4 == 0 else None
    requests = [
        planned if i == kept else replace(planned, n_output=8 * planned.n_output, poison=None)
        for i, planned in enumerate(trace.requests)
    ]
    longest = max(planned.n_input + planned.n_output for planned in requests)
    faults: list[Fault] = []
    at = 0.0
    for _ in range(rng.randint(1, 8)):
        at += rng.choice((0.05, rng.uniform(0, 2), rng.uniform(0, 6)))
        kind: FaultKind = rng.choice(("kill", "kill", "stop"))
        seconds = rng.choice((2.1, 6.0) if kind == "stop" else (0.05, 0.5, 1.9))
        faults.append(Fault(at, kind, rng.randrange(trace.n_stages), seconds))
    return replace(
        trace,
        requests=tuple(requests),
        faults=tuple(faults),
        n_slots=max(trace.n_slots, round_up(longest, trace.block_size)),
        max_batch_tokens=max(trace.max_batch_tokens, longest - 1),
        restarts=100,
    )


def _random_poison(rng: random.Random, request: PlannedRequest, n_stages: int, *, sure: bool) -> Poison:
    stage, noticed = rng.randrange(n_stages), rng.random() < 0.7
    if sure:
        return Poison(stage, token_index=rng.randrange(request.n_output), noticed=noticed)
    return Poison(stage, probability=rng.choice((0.1, 0.5, 0.9)), noticed=noticed)


def play_all(make: Callable[[int], FaultTrace], n_seeds: int) -> tuple[Counter[str], Counter[int]]:
    """The events that the seeds covered, and the number of seeds with 0, 1, 2, 3 and more losses."""
    seen: Counter[str] = Counter()
    losses: Counter[int] = Counter()
    for seed in range(n_seeds):
        player = Player(make(seed))
        try:
            player.play()
        except BaseException as error:
            error.add_note(f"seed {seed}: {player.trace}")
            raise
        seen.update(str(req.finish_reason) for req in player.requests)
        losses[min(player.recovery.losses, 4)] += 1
        counters = player.workers.counters
        seen.update(stale=counters.stale, duplicates=counters.duplicates, malformed=counters.malformed)
        seen.update(refused=len(player.refused), failed=player.failure is not None)
        seen.update(blamed=player.recovery.n_blamed, preempted=player.scheduler.n_preemptions)
        seen.update(cached=sum(req.n_cached for req in player.requests))
        made = [req.kind.speculation for req in player.requests if isinstance(req.kind, Drafted)]
        seen.update(drafts=sum(one.n_drafted for one in made), kept=sum(one.n_accepted for one in made))
    return seen, losses


FAULTS = ("stale", "duplicates", "malformed", "refused", "failed", "blamed")


@pytest.mark.long
@MANY_TRACES
def test_random_faults_keep_every_invariant():
    seen, losses = play_all(random_fault_trace, N_SEEDS // 2)
    # The seeds have seen what they are for.
    assert min(seen[str(reason)] for reason in FinishReason) > 50
    assert min(losses[n] for n in range(5)) > 50
    assert min(seen[name] for name in FAULTS) > 20


@pytest.mark.long
@MANY_TRACES
def test_random_faults_keep_every_invariant_with_every_combination_of_switches():
    seen, losses = play_all(lambda seed: switched(random_fault_trace(seed), seed), N_SEEDS)
    assert min(seen[str(reason)] for reason in FinishReason) > 50
    assert min(losses[n] for n in range(5)) > 50
    assert min(seen[name] for name in (*FAULTS, "preempted", "cached")) > 20


def test_some_random_faults_keep_every_invariant_with_every_combination_of_switches():
    seen, _ = play_all(lambda seed: switched(random_fault_trace(seed), seed), 240)
    assert seen["preempted"] > 4 and seen["cached"] > 20


@pytest.mark.parametrize("n_seeds", [60, pytest.param(10_000, marks=[pytest.mark.long, MANY_TRACES])])
def test_drafts_change_no_token_whatever_is_lost(n_seeds: int) -> None:
    seen, losses = play_all(lambda seed: drafted(switched(random_fault_trace(seed), seed), seed), n_seeds)
    assert seen["kept"] > n_seeds and seen["drafts"] > 1.3 * seen["kept"], seen
    assert n_seeds < 1_000 or min(losses[n] for n in range(5)) > 50


def test_prompts_in_pieces_survive_the_same_faults():
    n_pieces = n_losses = 0
    for seed in range(400):
        player = Player(random_fault_trace(seed), cut=random.Random(seed))
        try:
            player.play()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        assert player.pieces is not None
        n_pieces += player.pieces.n_pieces
        n_losses += player.recovery.losses
    assert n_pieces > 400 and n_losses > 100


@pytest.mark.long
@MANY_TRACES
@pytest.mark.parametrize("with_switches", [False, True])
def test_one_request_s_poison_ends_that_request_alone(with_switches: bool):
    """Healthy requests all end right, and the engine goes on."""
    n_seeds = N_SEEDS // 4
    ends: Counter[tuple[bool, FinishReason | None]] = Counter()
    n_losses: Counter[int] = Counter()
    for seed in range(n_seeds):
        trace = random_poison_trace(seed)
        player = Player(switched(trace, seed) if with_switches else trace)
        try:
            player.play()
            assert player.failure is None and not player.refused
            for request, planned in zip(player.requests, player.trace.requests, strict=True):
                ends[planned.poison is not None, request.finish_reason] += 1
                if planned.poison is None:
                    assert request.finish_reason is not FinishReason.ERROR, "ended for another's poison"
                elif request.finish_reason is FinishReason.ERROR:
                    assert request.failure is not None
                    assert "while it ran alone, so it is not retried (stage " in request.failure
        except BaseException as error:
            error.add_note(f"seed {seed}: {player.trace}")
            raise
        n_losses[min(player.recovery.losses, 5)] += 1
    # The seeds have seen what they are for.
    assert ends[True, FinishReason.ERROR] > n_seeds // 2
    assert min(n_losses[n] for n in range(5)) > 20


def play_kills(n_seeds: int) -> tuple[Counter[str], Counter[int]]:
    """Play traces with kills from outside, which may end no healthy request; what the seeds have seen."""
    seen: Counter[str] = Counter()
    n_losses: Counter[int] = Counter()
    for seed in range(n_seeds):
        player = Player(switched(random_kill_trace(seed), seed))
        try:
            player.play()
            assert player.failure is None and not player.refused
            for request, planned in zip(player.requests, player.trace.requests, strict=True):
                if request.finish_reason is FinishReason.ERROR:
                    assert planned.poison is not None, "blamed for kills from outside"
        except BaseException as error:
            error.add_note(f"seed {seed}: {player.trace}")
            raise
        seen.update(blamed=player.recovery.n_blamed, kills=len(player.trace.faults))
        seen.update(cause.name for _, cause, _ in player.losses)
        seen.update(alone=sum(len(present) == 1 for present, _, _ in player.losses))
        n_losses[min(player.recovery.losses, 5)] += 1
    return seen, n_losses


def test_some_kills_from_outside_end_no_healthy_request():
    seen, _ = play_kills(200)
    assert seen["blamed"] > 10 and seen["alone"] > 100


@pytest.mark.long
@MANY_TRACES
def test_kills_from_outside_end_no_healthy_request():
    """Poisonous requests among them are still found."""
    n_seeds = N_SEEDS // 2
    seen, n_losses = play_kills(n_seeds)
    assert seen["blamed"] > n_seeds // 16
    assert seen[LossCause.OUTSIDE.name] > 0.8 * n_seeds and seen["alone"] > n_seeds // 2
    assert min(n_losses[n] for n in range(6)) > n_seeds // 50


# Some traces by hand.

CALM = FaultTrace(
    n_stages=3,
    max_bs=2,
    block_size=2,
    n_slots=40,
    max_batch_tokens=12,
    requests=(
        PlannedRequest(0.0, 3, 6),
        PlannedRequest(0.0, 5, 4),
        PlannedRequest(0.2, 1, 7),
        PlannedRequest(0.6, 2, 3),
    ),
)


def played(trace: FaultTrace) -> Player:
    player = Player(trace)
    player.play()
    return player


def test_nothing_is_lost_where_nothing_goes_wrong():
    player = played(CALM)
    assert player.recovery.losses == 0
    assert player.workers.epoch == 1
    assert player.suspects == []
    counters = player.workers.counters
    assert (counters.stale, counters.duplicates, counters.malformed) == (0, 0, 0)
    n_rows = sum(iteration.n_rows for iteration in player.timeline.iterations)
    assert counters.message_bytes <= 4096 * counters.messages + 1024 * n_rows


def test_each_stage_reports_what_it_ran_and_sent():
    player = played(CALM)
    iterations = player.timeline.iterations
    n, n_tokens = len(iterations), HIDDEN_BYTES * sum(iteration.n_rows for iteration in iterations)
    stages = player.workers.stages
    assert [(stage.received, stage.done, stage.link_bytes) for stage in stages] == [
        (n, n, n_tokens),
        (n, n, n_tokens),
        (n, 0, 0),
    ]
    for number, stage in enumerate(stages):
        assert [(times.epoch, times.iteration, times.stage) for times in stage.times] == [
            (1, i, number) for i in range(n)
        ]
    # One clock here, so that a stage can be seen to take a message before the one before it is done.
    for second, first in zip(stages[1].times, stages[0].times, strict=True):
        assert first.received < second.received < first.done < second.done


def test_programs_may_take_longer_than_a_worker_s_patience():
    timing = Timing(programs=DEADLINES.worker_seconds + 1)
    player = played(replace(CALM, timing=timing, faults=(Fault(6.0, "crash", 1, 0.5, 0),)))
    assert player.recovery.losses == 1
    assert {req.finish_reason for req in player.requests} <= {FinishReason.LENGTH, FinishReason.STOP}


def test_a_stopped_worker_is_suspected_and_restarted():
    fault = Fault(0.55, "stop", 1, float("inf"))
    player = played(replace(CALM, faults=(fault,), supervised=True))
    assert (set(player.suspects), player.recovery.losses, player.failure) == ({1}, 1, None)
    alone = played(replace(CALM, faults=(fault,), restarts=3))
    assert alone.failure is not None and set(alone.suspects) == {1}


def test_a_stopped_worker_is_found_even_where_another_was_taken_to_be_lost():
    """For example, the first stage has reported that it is done, but its hidden states never came."""
    faults = (Fault(0.5, "crash", 1, 0.2), Fault(0.5, "stop", 0, float("inf")))
    player = played(replace(CALM, faults=faults, supervised=True))
    assert (player.recovery.losses, player.failure) == (1, None)
    assert set(player.suspects) == {0, 1}
    assert player.recovery.last_recovery_seconds is not None
    assert player.recovery.last_recovery_seconds < DEADLINES.worker_seconds + 2 < DEADLINES.ready_seconds


def test_a_worker_that_reports_its_failure_is_not_a_suspect():
    player = played(replace(CALM, faults=(Fault(0.55, "fail", 1),)))
    assert (player.suspects, player.recovery.losses) == ([], 1)


def test_the_same_trace_plays_the_same_way():
    for seed in range(40):
        one, two = (played(random_fault_trace(seed)) for _ in range(2))
        assert one.clock.now() == two.clock.now()
        assert [d[1:] for d in one.deliveries] == [d[1:] for d in two.deliveries]
        assert one.timeline.iterations == two.timeline.iterations


@pytest.mark.parametrize("kind", ["crash", "stop", "hang", "fail", "lie", "drop", "delay", "corrupt"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_fault_at_any_moment_loses_nothing(kind: FaultKind, stage: int):
    n_losses = 0
    for tenth in range(0, 25, 2):
        for which in (0, 1):
            fault = Fault(tenth / 10 + 0.03, kind, stage, 3.0, which)
            player = played(replace(CALM, faults=(fault,)))
            assert {req.finish_reason for req in player.requests} <= {FinishReason.LENGTH, FinishReason.STOP}
            n_losses += player.recovery.losses
    assert n_losses >= 5


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("n_stages", [1, 2])
def test_a_frame_of_an_old_epoch_can_arrive_at_any_time(n_stages: int, which: int):
    """A message to the first stage, or tokens of the last, arrive again when iterations count from 0."""
    n_late = 0
    requests = tuple(PlannedRequest(0.0, 2 + i, 9) for i in range(2 * n_stages))
    for twentieth in range(1, 40):
        faults = (
            Fault(0.25, "duplicate", which * (n_stages - 1), 0.2 + twentieth / 20, which),
            Fault(0.45, "lie", 0, 0.0, 3),
        )
        player = played(
            replace(CALM, n_stages=n_stages, n_slots=80, requests=requests, faults=faults, restarts=1)
        )
        assert player.recovery.losses == 1
        n_late += player.workers.counters.stale + player.stages[0].controller.counters.stale
    assert n_late > 10


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_loss_that_is_noticed_at_once_is_recovered_from_at_once(stage: int):
    """Recovery takes as long as the restart, the new caches and the second check of readiness."""
    timing = Timing(restart=1.0, caches=0.05)
    player = Player(replace(CALM, faults=(Fault(0.55, "crash", stage, 1.0, 0),), timing=timing))
    down, up = [], []
    for _ in player.steps():
        player.check_turn()
        if player.recovery.trouble is not None:
            assert player.recovery.trouble == f"stage {stage + 1}: its line broke: the connection was closed"
            down.append(player.clock.now())
        elif down:
            up.append(player.clock.now())
    player.check_rest()
    assert up[0] - down[0] <= timing.restart + DEADLINES.retry_seconds + timing.caches + 4 * timing.line


def test_a_stopped_worker_is_found_by_its_deadline_and_named():
    player = Player(replace(CALM, faults=(Fault(0.55, "stop", 1, 30.0),)))
    for _ in player.steps():
        if player.recovery.trouble is not None:
            break
    assert player.recovery.trouble is not None
    assert player.recovery.trouble.startswith("stage 2: did not finish iteration ")
    assert player.clock.now() <= 0.55 + DEADLINES.iteration_seconds + 1.0


def test_a_device_that_hangs_ends_its_process_and_is_named():
    player = Player(replace(CALM, faults=(Fault(0.55, "hang", 1),)))
    troubles = list[str]()
    for _ in player.steps():
        if player.recovery.trouble is not None and player.recovery.trouble not in troubles:
            troubles.append(player.recovery.trouble)
    player.check_rest()
    assert troubles[0].startswith("stage 2: did not finish iteration ")
    assert player.recovery.losses == 1, "the other stages wait for it, and are not lost"


def test_neighbours_that_hang_with_it_end_as_well_and_come_back():
    timing = Timing(pulls_hang=True)
    player = played(replace(CALM, faults=(Fault(0.55, "hang", 0),), timing=timing))
    assert player.recovery.losses == 1
    assert {req.finish_reason for req in player.requests} <= {FinishReason.LENGTH, FinishReason.STOP}


def test_a_worker_that_never_comes_back_is_named_and_everything_ends():
    fault = Fault(0.55, "crash", 1, float("inf"))
    player = played(replace(CALM, faults=(fault,), restarts=3))
    assert player.failure is not None
    assert str(player.failure) == (
        "workers were lost 4 times within 600 seconds, and 3 restarts are allowed; "
        "the last: stage 2: was not ready within 12 seconds"
    )
    assert player.clock.now() <= 0.55 + DEADLINES.iteration_seconds + 3 * DEADLINES.ready_seconds + 1


@pytest.mark.parametrize("known", [(0, 50, 0), (7, 7, 7), (1 << 62, 1, 99)])
def test_workers_that_have_seen_a_later_epoch_serve_a_master_with_a_slow_clock(known: tuple[int, ...]):
    player = Player(replace(CALM, faults=(Fault(0.55, "crash", 1, 0.5, 0),)))
    for stage, epoch in zip(player.stages, known, strict=True):
        stage.controller.epoch = epoch
    for _ in player.steps():
        player.check_turn()
    assert (player.recovery.losses, player.failure) == (1, None)
    assert player.workers.epoch == max(known) + 2
    assert {req.finish_reason for req in player.requests} <= {FinishReason.LENGTH, FinishReason.STOP}


def test_requests_may_end_while_the_engine_is_down():
    fault = Fault(0.55, "crash", 1, 6.0, 0)
    ends = (PlannedEnd(1.5, 0, FinishReason.CANCELLED), PlannedEnd(2.5, 1, FinishReason.TIMEOUT))
    player = played(replace(CALM, faults=(fault,), ends=ends))
    ended = {record.request_id: record.finished for record in player.timeline.requests}
    assert (ended["0"], ended["1"]) == (1.5, 2.5), "at once"
