"""Invariants of every turn of the scheduler, over random traces on the simulated engine.

A trace consists of few numbers, so that a failing seed or hypothesis' example replays it.
"""

import math
import random
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.config import ServingConfig
from orca_jax.errors import EngineError
from orca_jax.request.request import FinishReason, Request, RequestState, Row, begin_iteration
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling import kv_manager, scheduler, select, serving_policy, timeline
from orca_jax.scheduling.blocks import round_up
from orca_jax.scheduling.engine_protocol import Iteration, Returned
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.request_pool import Delivery, InArrivalOrder, RequestPool
from orca_jax.scheduling.restart import fail_all
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline
from orca_jax.simulation.engine import SimulatedEngine, VirtualClock
from orca_jax.simulation.simulation import Shown, Simulation

N_TRACES = 10_000
STOP_TOKEN = 1


@dataclass(frozen=True)
class Arrival:
    time: float
    n_input: int
    n_output: int
    stop_at: int | None = None  # the index of the output token that is the stop token


@dataclass(frozen=True)
class Trace:
    """Requests are named by their place in `arrivals`; the test itself adds those with an infinite time.

    `ends` are requested at a time, `ends_at_moments` at the n-th moment of the run. A moment is before a
    turn, in the engine's issue or wait, when a token is pushed, or when deliveries go out. Each may name any
    request, live or not, any number of times. `faults` are moments after which the engine's next call fails.
    """

    max_bs: int
    n_slots: int
    block_size: int
    max_batch_tokens: int
    n_workers: int
    arrivals: tuple[Arrival, ...]
    ends: tuple[tuple[float, int], ...] = ()
    ends_at_moments: tuple[tuple[int, int], ...] = ()
    faults: tuple[int, ...] = ()
    deterministic: bool = False
    overlap: bool = False

    @property
    def most_in_flight(self) -> int:
        return self.n_workers + self.overlap


def random_trace(rng: random.Random, n_workers: int) -> Trace:
    block_size = rng.randint(1, 16)
    n_requests = rng.choice((1, 2, 3, 5, 8, 12, 20, 30))
    longest = rng.choice((3, 6, 20))
    arrivals: list[Arrival] = []
    time = 0.0
    for _ in range(n_requests):
        time += rng.choice((0.0, 0.0, 0.3, 1.0, 4.0))
        n_output = rng.randint(1, rng.choice((1, 4, longest)))
        stop_at = rng.randrange(n_output) if rng.random() < 0.3 else None
        arrivals.append(Arrival(time, rng.randint(1, longest), n_output, stop_at))
    largest = max(a.n_input + a.n_output for a in arrivals)
    # Tight: room for the largest request and a little more, whole blocks or not.
    n_slots = round_up(largest, block_size) + rng.choice((0, 0, 1, largest, 3 * largest))
    max_bs = rng.randint(1, 5)
    return Trace(
        max_bs=max_bs,
        n_slots=n_slots,
        block_size=block_size,
        max_batch_tokens=max(max_bs, largest) + rng.choice((0, 0, 5, 100)),
        n_workers=n_workers,
        arrivals=tuple(arrivals),
        ends=tuple(
            (rng.uniform(0, time + 10), rng.randrange(n_requests)) for _ in range(rng.choice((0, 0, 1, 4)))
        ),
        ends_at_moments=tuple(
            (rng.randrange(10 * n_requests), rng.randrange(n_requests)) for _ in range(rng.choice((0, 2, 8)))
        ),
        faults=(rng.randrange(50),) if rng.random() < 0.05 else (),
        deterministic=rng.random() < 0.3,
        overlap=rng.random() < 0.6,
    )


arrival_strategy = st.builds(
    Arrival,
    time=st.integers(0, 12).map(float),
    n_input=st.integers(1, 9),
    n_output=st.integers(1, 6),
    stop_at=st.none() | st.integers(0, 5),
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    arrivals = draw(st.lists(arrival_strategy, min_size=1, max_size=8))
    largest = max(a.n_input + a.n_output for a in arrivals)
    block_size = draw(st.integers(1, 16))
    max_bs = draw(st.integers(1, 4))
    some_request = st.integers(0, len(arrivals) - 1)
    return Trace(
        max_bs=max_bs,
        n_slots=round_up(largest, block_size) + draw(st.integers(0, 30)),
        block_size=block_size,
        max_batch_tokens=max(max_bs, largest) + draw(st.integers(0, 10)),
        n_workers=draw(st.integers(1, 4)),
        arrivals=tuple(sorted(arrivals, key=lambda a: a.time)),
        ends=tuple(draw(st.lists(st.tuples(st.integers(0, 15).map(float), some_request), max_size=3))),
        ends_at_moments=tuple(draw(st.lists(st.tuples(st.integers(0, 60), some_request), max_size=3))),
        faults=tuple(draw(st.lists(st.integers(0, 40), max_size=1))),
        deterministic=draw(st.booleans()),
        overlap=draw(st.booleans()),
    )


def token_of(request: Request, index: int) -> int:
    return 100 + 10 * request.seed + index


class Sink:
    """Receives tokens; each is a moment."""

    def __init__(self, moment: Callable[[], None]) -> None:
        self.push_happened = moment

    def push(self, token_id: int) -> bool:
        self.push_happened()
        return False


class CheckedEngine:
    """Checks every batch that the scheduler issues to the engine."""

    def __init__(self, player: "Player") -> None:
        self.player = player
        self.engine = player.simulation.engine
        self.n_workers = self.engine.n_workers
        self.keeps_tokens = self.engine.keeps_tokens
        # Of each batch in flight what its iteration may write to.
        self.in_flight: deque[list[tuple[Request, set[int]]]] = deque()

    def issue(self, rows: Sequence[Row]) -> Iteration:
        trace = self.player.trace
        batch = [req for req, _ in rows]
        assert batch, "an empty batch"
        assert len(batch) <= trace.max_bs
        assert len({req.request_id for req in batch}) == len(batch)
        assert sum(n for _, n in rows) <= trace.max_batch_tokens
        assert all(n == req.n_to_compute > 0 for req, n in rows), "Algorithm 1 takes all that is left"
        assert [req.arrival for req in batch] == sorted(req.arrival for req in batch)
        begins = [req.state is RequestState.INITIATION for req in batch]
        assert not trace.deterministic or len(set(begins)) == 1
        for req, first in zip(batch, begins, strict=True):
            assert first == (not req.output_ids and not req.n_in_flight)
            assert req.row >= 0
            if req.state is RequestState.RUNNING:
                assert trace.overlap
                assert any(ran is req for ran, _ in self.in_flight[0]), "its token comes next"
                assert req.n_in_flight == 1 and req.n_tokens + 1 < req.max_tokens
        assert len(self.in_flight) < trace.most_in_flight
        writes = [(req, set(self.player.kv.blocks_of(req.row).tolist())) for req in batch]
        for req, blocks in writes:
            for other, others_blocks in (one for ran in self.in_flight for one in ran):
                assert other is req or not blocks & others_blocks, "an iteration may still write there"
        self.player.moment()
        iteration = self._call(lambda: self.engine.issue(rows))
        self.in_flight.append(writes)
        return iteration

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        self.player.moment()
        returned = self._call(lambda: self.engine.wait(iteration, interrupted))
        self.player.moment()
        if returned is not None:
            self.in_flight.popleft()
        elif len(self.in_flight) == self.player.trace.most_in_flight:
            raise AssertionError("interrupted with no worker free")
        return returned

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except EngineError:
            self.in_flight.clear()
            raise


class Player:
    """Plays a trace, and checks the invariants in every turn."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        config = ServingConfig(
            max_batch_size=trace.max_bs,
            n_slots=trace.n_slots,
            block_size=trace.block_size,
            max_batch_tokens=trace.max_batch_tokens,
            deterministic=trace.deterministic,
            overlap=trace.overlap,
        )
        self.simulation = Simulation(config, n_workers=trace.n_workers, token=self.token)
        self.scheduler = self.simulation.scheduler
        self.pool = self.simulation.pool
        self.kv = self.simulation.kv
        self.scheduler.engine = CheckedEngine(self)
        self.n_moments = 0
        self.asked_to_end: set[str] = set()
        self.n_faults = 0
        self.ends_at: dict[int, list[int]] = {}
        for moment, i in trace.ends_at_moments:
            self.ends_at.setdefault(moment, []).append(i)
        self.requests: list[Request] = []
        for i, arrival in enumerate(trace.arrivals):
            request = Request(
                request_id=str(i),
                prompt_ids=(7,) * arrival.n_input,
                max_tokens=arrival.n_input + arrival.n_output,
                sampling=SamplingParams(max_tokens=arrival.n_output),
                seed=i,
                end_token_ids=frozenset({STOP_TOKEN}),
                sink=Sink(self.moment),
            )
            self.requests.append(request)
            if arrival.time < math.inf:
                self.simulation.add_at(arrival.time, request)
        for time, i in trace.ends:
            self.simulation.clock.call_at(time, lambda i=i: self.end(i))

    def token(self, request: Request, index: int) -> int:
        stops = self.trace.arrivals[request.seed].stop_at == index
        return STOP_TOKEN if stops else token_of(request, index)

    def end(self, i: int) -> None:
        if self.pool.end_named(str(i), FinishReason.CANCELLED):
            self.asked_to_end.add(str(i))

    def moment(self) -> None:
        self.n_moments += 1
        for i in self.ends_at.get(self.n_moments, ()):
            self.end(i)
        if self.n_moments in self.trace.faults:
            self.simulation.engine.fail("issue" if self.n_moments % 2 else "wait")

    def play(self) -> None:
        trace = self.trace
        n_events = len(trace.arrivals) + len(trace.ends) + len(trace.ends_at_moments)
        limit = 10 + 3 * (n_events + sum(a.n_output for a in trace.arrivals))
        n_turns = 0
        turns = self.simulation.steps()
        while True:
            self.moment()
            try:
                next(turns)
            except StopIteration:
                break
            except EngineError:
                self.n_faults += 1
                fail_all(self.scheduler)
                assert self.pool_is_at_rest()
                turns = self.simulation.steps()
            self.check_turn()
            n_turns += 1
            assert n_turns <= limit, "no end in sight: a deadlock"
        self.check_rest()

    def check_turn(self) -> None:
        live = list(self.pool.in_arrival_order())
        assert [req.arrival for req in live] == sorted(req.arrival for req in live)
        # Iteration-level first-come-first-served, by returned iterations, and by issued ones of those that
        # may have more of them.
        going_on = [req for req in live if req.n_tokens_issued < req.max_tokens and req.ending is None]
        for counts in ([req.n_iterations for req in going_on], [len(req.output_ids) for req in live]):
            assert counts == sorted(counts, reverse=True), f"overtaken: {counts}"
        # Reservations are those of the admitted requests and of those that leave, and fit.
        assert isinstance(self.scheduler.engine, CheckedEngine)
        in_flight = self.scheduler.engine.in_flight
        leaving = {req for ran in in_flight for req, _ in ran if req.state is RequestState.FINISHED}
        assert set(self.scheduler.leaving) == leaving and len(self.scheduler.leaving) == len(leaving)
        admitted = [*(req for req in live if req.row >= 0), *leaving]
        reserved = sum(round_up(req.max_tokens, self.trace.block_size) for req in admitted)
        assert self.scheduler.n_rsrv == reserved <= self.trace.n_slots
        # Each block and row has one owner, or is free.
        blocks: list[int] = []
        for req in admitted:
            own = self.kv.blocks_of(req.row).tolist()
            assert len(own) * self.trace.block_size == round_up(req.max_tokens, self.trace.block_size)
            blocks += own
        assert len(set(blocks)) == len(blocks), "a block was handed out twice"
        assert len(blocks) + self.kv.n_free_blocks == self.kv.n_blocks, "a block was lost"
        assert len({req.row for req in admitted}) == len(admitted), "a row was handed out twice"
        assert len(admitted) + self.kv.n_free_rows == self.kv.n_rows, "a row was lost"
        # Batches in flight are those of the engine, and leave a worker free for the next turn.
        assert self.scheduler.n_scheduled == len(in_flight) < self.trace.most_in_flight
        for req in live:
            assert (req.row >= 0) == (req.state is not RequestState.INITIATION)
            assert req.finish_reason is None

    def pool_is_at_rest(self) -> bool:
        kv = self.kv
        return (len(self.pool), self.scheduler.n_rsrv, self.scheduler.n_scheduled) == (0, 0, 0) and (
            kv.n_free_blocks,
            kv.n_free_rows,
        ) == (kv.n_blocks, kv.n_rows)

    def check_rest(self) -> None:
        assert self.pool_is_at_rest()
        assert not self.simulation.refused
        by_request: dict[str, list[Shown]] = {req.request_id: [] for req in self.requests}
        for delivery in self.simulation.deliveries:
            by_request[delivery[0].request_id].append(delivery)
        for request, arrival in zip(self.requests, self.trace.arrivals, strict=True):
            deliveries = by_request[request.request_id]
            tokens = [token_id for _, token_id, _ in deliveries if token_id is not None]
            assert request.state is RequestState.FINISHED
            assert tokens == request.output_ids
            assert tokens == [self.token(request, i) for i in range(len(tokens))]
            reasons = [reason for _, _, reason in deliveries]
            assert reasons[-1] is request.finish_reason is not None
            assert reasons[:-1] == [None] * (len(reasons) - 1), "ended more than once"
            stops = arrival.stop_at is not None and arrival.stop_at < arrival.n_output
            n_full = arrival.stop_at + 1 if stops and arrival.stop_at is not None else arrival.n_output
            match request.finish_reason:
                case FinishReason.CANCELLED:
                    assert request.request_id in self.asked_to_end
                    assert len(tokens) < n_full
                case FinishReason.ERROR:
                    assert self.n_faults == 1
                    assert len(tokens) < n_full
                case reason:
                    assert reason is (FinishReason.STOP if stops else FinishReason.LENGTH)
                    assert len(tokens) == n_full
        assert Counter(r.request_id for r in self.simulation.timeline.requests) == Counter(list(by_request))


@pytest.mark.parametrize("n_workers", [1, 2, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 4))])
def test_random_traces_keep_every_invariant(n_workers: int):
    n_each = N_TRACES // 4
    reasons: Counter[FinishReason | None] = Counter()
    for seed in range(n_workers * n_each, (n_workers + 1) * n_each):
        player = Player(random_trace(random.Random(seed), n_workers))
        try:
            player.play()
        except BaseException as error:
            error.add_note(f"random_trace(random.Random({seed}), {n_workers}) == {player.trace}")
            raise
        reasons.update(req.finish_reason for req in player.requests)
    # The traces have seen what they are for.
    assert min(reasons[reason] for reason in FinishReason if reason is not FinishReason.TIMEOUT) > 100


@settings(max_examples=150, deadline=None)
@given(traces())
def test_small_traces_keep_every_invariant(trace: Trace):
    Player(trace).play()


SMALL = Trace(
    max_bs=2,
    n_slots=18,
    block_size=4,
    max_batch_tokens=9,
    n_workers=2,
    arrivals=(Arrival(0, 2, 4), Arrival(0, 3, 3, 1), Arrival(0.5, 2, 2), Arrival(2.5, 1, 3)),
)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("n_workers", [1, 2, 3])
@pytest.mark.parametrize("i", [0, 1, 2, 3])
def test_a_request_may_be_cancelled_at_every_moment_and_twice(i: int, n_workers: int, overlap: bool):
    small = replace(SMALL, n_workers=n_workers, overlap=overlap)
    whole = Player(small)
    whole.play()
    cancelled = 0
    for moment in range(whole.n_moments + 2):
        ends = ((moment, i), (moment, i), (moment + 3, i))
        player = Player(replace(small, ends_at_moments=ends))
        player.play()
        cancelled += player.requests[i].finish_reason is FinishReason.CANCELLED
    assert cancelled > 3


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("moment", range(1, 40))
def test_the_engine_may_fail_at_every_moment(moment: int, overlap: bool):
    Player(replace(SMALL, faults=(moment,), overlap=overlap)).play()


class AtLine:
    """Calls `action` before the n-th line that the scheduler's code runs, as another thread might.

    Lines that run under the pool's lock do not count, because no other thread can run then.
    """

    def __init__(self, n: int, action: Callable[[], None], *, is_locked: Callable[[], bool]) -> None:
        self.left = n
        self.action = action
        self.is_locked = is_locked
        self.files = {one.__file__ for one in (scheduler, select, serving_policy, kv_manager, timeline)}
        self.codes: set[CodeType] = {InArrivalOrder.__iter__.__code__, begin_iteration.__code__}

    def __enter__(self) -> "AtLine":
        self.before = sys.gettrace()
        sys.settrace(self.call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def call(self, frame: FrameType, event: str, arg: object) -> Any:
        return self.line if frame.f_code.co_filename in self.files or frame.f_code in self.codes else None

    def line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and not self.is_locked():
            self.left -= 1
            if self.left == 0:
                self.action()
        return self.line


SMALLEST = Trace(
    max_bs=2,
    n_slots=9,
    block_size=2,
    max_batch_tokens=9,
    n_workers=2,
    arrivals=(Arrival(0, 1, 2), Arrival(0, 2, 2), Arrival(0, 1, 1), Arrival(math.inf, 1, 1)),
)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("i", [0, 1, 2])
def test_ends_and_arrivals_at_every_line_of_the_scheduler(i: int, overlap: bool):
    n = 0
    while True:
        n += 1
        player = Player(replace(SMALLEST, overlap=overlap))

        def come_and_go(player: Player = player) -> None:
            player.pool.add(player.requests[3])
            player.end(i)
            player.end(i)

        lock: Any = player.pool._lock  # pyright: ignore[reportPrivateUsage]
        with AtLine(n, come_and_go, is_locked=lock._is_owned) as at_line:
            for _ in player.simulation.steps():
                player.check_turn()
        if at_line.left > 0:
            break
        for _ in player.simulation.steps():  # it may have come while the last turn found nothing to do
            player.check_turn()
        player.check_rest()
        assert player.requests[3].finish_reason is FinishReason.LENGTH
    assert n > 300


class Counted(InArrivalOrder):
    """Counts the requests that are read."""

    n_read = 0

    def __iter__(self) -> Iterator[Request]:
        for req in super().__iter__():
            Counted.n_read += 1
            yield req

    def waiting(self) -> Iterator[Request]:
        for req in super().waiting():
            Counted.n_read += 1
            yield req


def count_chunks(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the chunks that are read from the queue."""
    sizes: list[int] = []
    walk = simulation.pool._walk  # pyright: ignore[reportPrivateUsage]

    def counted() -> Iterator[list[Request]]:
        for chunk in walk():
            sizes.append(len(chunk))
            yield chunk

    monkeypatch.setattr(simulation.pool, "_walk", counted)
    return sizes


def test_the_cost_of_a_turn_does_not_depend_on_how_many_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("orca_jax.scheduling.request_pool.InArrivalOrder", Counted)
    sampling = SamplingParams(max_tokens=3)
    reads: list[int] = []
    for n_waiting in (100, 100_000):
        config = ServingConfig(max_batch_size=8, n_slots=60, block_size=1, max_batch_tokens=64)
        simulation = Simulation(config)
        copies = count_chunks(simulation, monkeypatch)
        for i in range(n_waiting):
            simulation.pool.add(
                Request(request_id=str(i), prompt_ids=(7,) * 4, max_tokens=7, sampling=sampling, seed=0)
            )
        Counted.n_read = 0
        for _ in range(12):
            assert simulation.scheduler.step()
        reads.append(Counted.n_read + sum(copies))
        assert Counted.n_read <= 12 * (8 + 1)
    assert reads[0] == reads[1]


def test_a_hundred_thousand_in_the_queue_are_read_in_linear_time(monkeypatch: pytest.MonkeyPatch):
    """`fail_all` reads the whole view, whose chunks grow so that the time is not quadratic."""
    simulation = Simulation(ServingConfig(n_slots=64))
    sampling = SamplingParams(max_tokens=1)
    for i in range(100_000):
        simulation.pool.add(
            Request(request_id=str(i), prompt_ids=(7,), max_tokens=2, sampling=sampling, seed=0)
        )
    chunks = count_chunks(simulation, monkeypatch)
    assert [req.arrival for req in simulation.pool.in_arrival_order()] == list(range(100_000))
    assert len(chunks) < 20  # each skips what came before it, so they must be few
    fail_all(simulation.scheduler)
    assert len(simulation.deliveries) == 100_000


def test_threads_may_add_and_end_while_the_scheduler_runs():
    n_threads, n_each = 4, 150
    clock = VirtualClock()
    timeline = Timeline(clock.now, max_records=None)
    deliveries: list[Delivery] = []
    pool = RequestPool(max_waiting=10_000, on_arrival=timeline.arrived, on_deliveries=deliveries.extend)
    kv = KVManager(n_blocks=24, block_size=2, n_rows=9, max_blocks_per_row=24)
    config = ServingConfig(max_batch_size=3, n_slots=49, block_size=2, max_batch_tokens=16)
    running = Scheduler(pool, SimulatedEngine(clock, n_workers=3), kv, config=config, timeline=timeline)
    errors: list[BaseException] = []
    n_asked = [0] * n_threads
    start = threading.Barrier(n_threads + 1)

    def users(which: int) -> None:
        try:
            rng = random.Random(which)
            start.wait(30)
            for i in range(n_each):
                n_output = rng.randint(1, 6)
                pool.add(
                    Request(
                        request_id=f"{which}.{i}",
                        prompt_ids=(7,) * rng.randint(1, 6),
                        max_tokens=12,
                        sampling=SamplingParams(max_tokens=n_output),
                        seed=0,
                    )
                )
                if rng.random() < 0.5:
                    victim = f"{rng.randrange(n_threads)}.{rng.randint(max(0, i - 5), i)}"
                    n_asked[which] += pool.end_named(victim, FinishReason.CANCELLED)
        except BaseException as error:
            errors.append(error)

    def schedule() -> None:
        try:
            start.wait(30)
            while not (pool_is_closed.is_set() and len(pool) == 0):
                if not running.step():
                    pool.wait_for_work(timeout=10)
        except BaseException as error:
            errors.append(error)

    pool_is_closed = threading.Event()
    adders = [threading.Thread(target=users, args=(which,), daemon=True) for which in range(n_threads)]
    scheduling = threading.Thread(target=schedule, daemon=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in (*adders, scheduling):
            thread.start()
        for thread in adders:
            thread.join(60)
        pool_is_closed.set()
        pool.close()
        scheduling.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in (*adders, scheduling))
    ends = Counter(req.request_id for req, _, reason in deliveries if reason is not None)
    assert ends == Counter(f"{which}.{i}" for which in range(n_threads) for i in range(n_each))
    assert sum(n_asked) > 0
    assert (len(pool), running.n_rsrv, running.n_scheduled) == (0, 0, 0)
    assert (kv.n_free_blocks, kv.n_free_rows) == (24, 9)
    arrivals = sorted({req.request_id: req.arrival for req, _, _ in deliveries}.values())
    assert arrivals == list(range(n_threads * n_each))
