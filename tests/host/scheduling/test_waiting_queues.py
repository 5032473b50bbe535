"""The orders of waiting requests, and the promise of each as an inequality."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.config import ORCA, SchedulingConfig, ServingConfig
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling import waiting_queue as queues
from orca_jax.scheduling.waiting_queue import (
    OUTPUT_COST,
    FairQueue,
    FirstComeQueue,
    PriorityQueue,
    WaitingQueue,
    waiting_queue,
)
from orca_jax.simulation.simulation import Simulation
from tests.lines_run import n_lines_run

AGING = 10.0
QUEUES: dict[str, Callable[[], Any]] = {
    "fcfs": FirstComeQueue,
    "priority": lambda: PriorityQueue(AGING),
    "fair": FairQueue,
}


def request(
    arrival: int, *, owner: str = "", priority: int = 0, n_prompt: int = 1, n_output: int = 5
) -> Request:
    sampling = SamplingParams(max_tokens=n_output)
    req = Request(
        str(arrival), (7,) * n_prompt, n_prompt + n_output, sampling, 0, owner=owner, priority=priority
    )
    req.arrival = arrival
    return req


def order(queue: WaitingQueue) -> list[int]:
    return [req.arrival for chunk in queue.walk() for req in chunk]


def filled(queue: Any, *requests: Request) -> Any:
    for req in requests:
        queue.add(req, float(req.arrival))
    return queue


# All orders.


def test_the_queue_of_each_order():
    assert isinstance(waiting_queue(ORCA), FirstComeQueue)
    assert isinstance(waiting_queue(SchedulingConfig()), FirstComeQueue)
    assert isinstance(waiting_queue(SchedulingConfig(scheduling_policy="priority")), PriorityQueue)
    assert isinstance(waiting_queue(SchedulingConfig(scheduling_policy="fair")), FairQueue)


@pytest.mark.parametrize("make", QUEUES.values(), ids=QUEUES)
def test_a_queue_has_what_was_added_and_not_removed(make: Callable[[], Any]):
    queue = make()
    assert order(queue) == [] and len(queue) == 0
    requests = [request(i, owner="ab"[i % 2], priority=i % 3) for i in range(50)]
    filled(queue, *requests)
    assert len(queue) == 50 and sorted(order(queue)) == list(range(50))
    for req in requests[::5]:
        queue.take(req)
    for req in requests[1::5]:
        assert queue.remove(req)
    for req in requests[::5] + requests[1::5]:
        assert not queue.remove(req)
    assert len(queue) == 30 and sorted(order(queue)) == [i for i in range(50) if i % 5 > 1]
    requests[5].n_preempted = 1
    queue.restore(requests[5])
    assert len(queue) == 31 and 5 in order(queue)
    for arrival in order(queue):
        queue.take(requests[arrival])
    assert order(queue) == [] and len(queue) == 0
    with pytest.raises((AssertionError, KeyError)):
        queue.take(requests[0])


@pytest.mark.parametrize("make", QUEUES.values(), ids=QUEUES)
@settings(deadline=None)
@given(data=st.data())
def test_requests_added_during_a_walk_neither_skip_nor_repeat_others(
    make: Callable[[], Any], data: st.DataObject
):
    """The walk has each request of its start once, in the queue's order, and later ones at most once."""
    rng = random.Random(data.draw(st.integers(0, 1 << 20)))
    new = lambda i: request(i, owner=rng.choice("abcd"), priority=rng.randint(-3, 3))  # noqa: E731
    queue = make()
    n = data.draw(st.integers(0, 40))
    started = [new(i) for i in range(n)]
    filled(queue, *started)
    before = order(queue)
    numbers = itertools.count(n)
    walked: list[int] = []
    for chunk in queue.walk():
        walked += [req.arrival for req in chunk]
        for _ in range(rng.choice((0, 0, 1, 3))):
            if len(queue) < 80:
                filled(queue, new(next(numbers)))
    assert len(set(walked)) == len(walked)
    assert [arrival for arrival in walked if arrival < n] == before
    assert sorted(order(queue)) == list(range(next(numbers)))


@pytest.mark.parametrize("make", QUEUES.values(), ids=QUEUES)
def test_the_first_of_many_cost_no_more_than_of_few(make: Callable[[], Any]):
    """Except for a heap's depth, an iteration's work does not grow with the number of waiting requests."""

    def n_lines(n: int) -> int:
        queue = filled(make(), *(request(i, owner=str(i % (n // 2)), priority=i % 5) for i in range(n)))

        def iteration() -> None:
            firsts = list(itertools.islice((req for chunk in queue.walk() for req in chunk), 32))
            for req in firsts:
                queue.take(req)
            queue.served(firsts)
            for req in reversed(firsts):
                req.n_preempted = 1
                queue.restore(req)

        return max(n_lines_run(iteration) for _ in range(3))

    assert n_lines(10_000) < 2 * n_lines(200)


@pytest.mark.parametrize("make", QUEUES.values(), ids=QUEUES)
def test_a_long_queue_of_one_owner_is_read_in_linear_time(make: Callable[[], Any]):
    requests = [request(i) for i in range(4_000)]

    def n_lines(n: int) -> int:
        queue = filled(make(), *requests[:n])

        def read() -> None:
            assert len(order(queue)) == n

        return n_lines_run(read)

    assert n_lines(4_000) < 5 * n_lines(1_000)


# First come, first served.


@given(st.lists(st.integers(0, 30), unique=True, max_size=20), st.lists(st.integers(0, 30), unique=True))
def test_preempted_requests_return_to_their_place(waiting: list[int], preempted: list[int]):
    queue = filled(FirstComeQueue(), *map(request, sorted(set(waiting) - set(preempted))))
    for arrival in preempted:
        queue.restore(request(arrival))
    assert order(queue) == sorted({*waiting, *preempted})


# Priorities.

arrivals = st.lists(st.tuples(st.floats(0, 100), st.integers(-3, 3)), max_size=25)


@given(arrivals, st.sampled_from((0.5, 10.0, 60.0)))
def test_a_request_is_overtaken_only_within_its_aging(times: list[tuple[float, int]], aging: float):
    """A request is overtaken only by higher priorities that arrive within `aging` times the difference."""
    queue = PriorityQueue(aging)
    times = sorted(times, key=lambda pair: pair[0])
    requests = [request(i, priority=priority) for i, (_, priority) in enumerate(times)]
    for req, (now, _) in zip(requests, times, strict=True):
        queue.add(req, now)
    place = {arrival: i for i, arrival in enumerate(order(queue))}
    for early, late in itertools.combinations(requests, 2):
        is_overtaken = place[late.arrival] < place[early.arrival]
        waited = times[late.arrival][0] - times[early.arrival][0]
        limit = aging * (early.priority - late.priority)
        if abs(waited - limit) > 1e-6:  # but for rounding
            assert is_overtaken == (waited < limit)


@given(arrivals, st.randoms(use_true_random=False))
def test_the_order_of_two_requests_never_changes(times: list[tuple[float, int]], rng: random.Random):
    queue = PriorityQueue(AGING)
    live: list[Request] = []
    orders: set[tuple[int, int]] = set()
    for i, (now, priority) in enumerate(sorted(times)):
        live.append(request(i, priority=priority))
        queue.add(live[-1], now)
        if rng.random() < 0.5:
            req = rng.choice(live)
            queue.take(req)
            if rng.random() < 0.5:
                queue.restore(req)  # preempted
            else:
                live.remove(req)
        orders |= set(itertools.combinations(order(queue), 2))
    assert not orders & {(b, a) for a, b in orders}


def test_lower_priorities_first_and_equal_ones_by_arrival():
    queue = filled(PriorityQueue(AGING), *(request(i, priority=p) for i, p in enumerate((1, 0, 0, -2, 1))))
    assert order(queue) == [3, 1, 2, 0, 4]
    filled(queue, request(9, priority=0), request(12, priority=-1))
    assert order(queue) == [3, 1, 2, 12, 9, 0, 4], "9 seconds are less than a level, 12 are more"


def two_of_different_priority(aging_seconds: float) -> tuple[Simulation, list[Request]]:
    """Two requests that do not fit together; the second comes later with a higher priority."""
    scheduling = SchedulingConfig(
        scheduling_policy="priority", aging_seconds=aging_seconds, prefix_caching=False
    )
    serving = ServingConfig(
        max_batch_size=4, n_slots=24, max_batch_tokens=4, block_size=4, scheduling=scheduling
    )
    play = Simulation(serving)
    requests = [request(i, priority=1 - i, n_prompt=10, n_output=14) for i in range(2)]
    for req, moment in zip(requests, (0.0, 5.5), strict=True):
        play.add_at(moment, req)
    for n_turns, _ in enumerate(play.steps()):
        assert n_turns < 200, "they preempt each other for ever"
    return play, requests


def test_a_newer_request_of_higher_priority_preempts():
    play, (low, high) = two_of_different_priority(aging_seconds=60.0)
    assert (low.n_preempted, high.n_preempted) == (1, 0)
    assert [record.request_id for record in play.timeline.requests] == ["1", "0"]


def test_an_older_request_is_not_preempted_for_one_that_is_after_it_in_the_order():
    """The wait outweighs the lower priority: a preempted request would be admitted first again."""
    play, _ = two_of_different_priority(aging_seconds=5.0)
    assert play.scheduler.n_preemptions == 0
    assert [record.request_id for record in play.timeline.requests] == ["0", "1"]


# Fair shares.


def test_the_lowest_counter_goes_next():
    queue = filled(FairQueue(), *(request(i, owner="a", n_prompt=10) for i in range(4)))
    filled(queue, *(request(4 + i, owner="b", n_prompt=4) for i in range(6)))
    assert order(queue) == [0, 4, 5, 6, 1, 7, 8, 2, 9, 3], "as if each were admitted before the next"
    for arrival in (0, 4, 5, 6):
        queue.take(next(req for chunk in queue.walk() for req in chunk if req.arrival == arrival))
    assert (queue.counter("a"), queue.counter("b")) == (10, 12)
    assert order(queue) == [1, 7, 8, 2, 9, 3]
    queue.served([request(0, owner="a")] * 5)
    assert (queue.counter("a"), queue.counter("b")) == (10 + 5 * OUTPUT_COST, 12)
    assert order(queue) == [7, 8, 1, 9, 2, 3]


def test_weights_divide_the_cost():
    queue = FairQueue({"a": 4.0})
    filled(queue, *(request(i, owner="ab"[i // 6], n_prompt=8) for i in range(12)))
    assert "".join("ab"[arrival // 6] for arrival in order(queue)) == "abaaaababbbb"
    queue.served([request(0, owner="a"), request(6, owner="b")] * 6)
    assert (queue.counter("a"), queue.counter("b")) == (6 * OUTPUT_COST / 4, 6 * OUTPUT_COST)


def test_an_idle_owner_saves_nothing_up():
    queue = filled(FairQueue(), request(0, owner="idle"))
    queue.take(request_in(queue, 0))
    filled(queue, *(request(1 + i, owner="busy", n_prompt=100) for i in range(20)))
    for arrival in range(1, 11):
        queue.take(request_in(queue, arrival))
    filled(queue, *(request(30 + i, owner="idle", n_prompt=100) for i in range(10)))
    assert queue.counter("idle") == queue.counter("busy")
    owners = ["idle" if arrival >= 30 else "busy" for arrival in order(queue)]
    assert max(len(list(group)) for _, group in itertools.groupby(owners)) <= 2, "they alternate"


def test_also_not_by_a_request_that_ran_meanwhile_and_was_preempted():
    queue = filled(FairQueue(), request(0, owner="idle"))
    running = request_in(queue, 0)
    queue.take(running)
    filled(queue, *(request(1 + i, owner="busy", n_prompt=100) for i in range(20)))
    for arrival in range(1, 11):
        queue.take(request_in(queue, arrival))
    running.n_preempted = 1
    queue.restore(running)
    assert queue.counter("idle") == queue.counter("busy")


def test_an_owner_who_returns_keeps_what_it_owes():
    queue = filled(FairQueue(), request(0, owner="a", n_prompt=500), request(1, owner="b"))
    queue.take(request_in(queue, 0))
    filled(queue, request(2, owner="a"))
    assert (queue.counter("a"), queue.counter("b")) == (500, 0)
    assert order(queue) == [1, 2]


def test_a_preempted_request_is_first_of_its_owner_and_is_not_charged_twice():
    queue = filled(FairQueue(), *(request(i, owner="a", n_prompt=10) for i in range(5)))
    taken = [request_in(queue, arrival) for arrival in (0, 1, 2)]
    for req in taken:
        queue.take(req)
    for i in (2, 0):
        taken[i].n_preempted = 1
        queue.restore(taken[i])
    assert order(queue) == [0, 2, 3, 4]
    assert queue.counter("a") == 30
    filled(queue, *(request(10 + i, owner="b", n_prompt=10) for i in range(2)))
    assert order(queue) == [0, 2, 3, 10, 4, 11], "in the walk as when they are taken"
    queue.take(taken[0])
    assert queue.counter("a") == 30


def request_in(queue: FairQueue, arrival: int) -> Request:
    return next(req for chunk in queue.walk() for req in chunk if req.arrival == arrival)


def test_the_memory_of_counters_is_bounded(monkeypatch: pytest.MonkeyPatch):
    """Owners may be addresses, and one stranger may have many of them."""
    monkeypatch.setattr(queues, "_MAX_COUNTERS", 16)
    queue = FairQueue()
    debtor = request(0, owner="debtor", n_prompt=1000)
    filled(queue, debtor, request(1, owner="waits"))
    queue.take(debtor)
    n_counters = 0
    for i in range(2, 1000):
        req = request(i, owner=str(i), n_prompt=i % 7 + 1)
        filled(queue, req)
        queue.take(req)
        n_counters = max(n_counters, len(queue._counters))
    assert n_counters <= 2 * (2 + 16) + 1
    assert (queue.counter("waits"), queue.counter("debtor")) == (0, 1000), "who owes most is remembered"
    filled(queue, *(request(1000 + i, owner=f"w{i}") for i in range(100)))
    assert len(queue._counters) <= 2 * (100 + 16) + 1 and len(order(queue)) == 101


def bound_between(
    queue: FairQueue, serving: ServingConfig, requests: Sequence[Request], weight: float
) -> float:
    """The most by which the counter of one waiting owner may exceed the counter of another.

    The owner ahead had the lower counter when its last request was admitted. Since then its counter grew by
    the cost of that prompt and of the outputs of its requests that were admitted then.
    """
    n_outputs = sorted((req.max_tokens - len(req.prompt_ids) for req in requests), reverse=True)
    n_output = sum(n_outputs[: serving.max_batch_size])
    if not serving.scheduling.on_demand:  # they hold slots for all of it
        n_output = min(n_output, serving.n_slots)
    return (max(len(req.prompt_ids) for req in requests) + OUTPUT_COST * n_output) / weight


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_counters_of_owners_who_wait_differ_within_the_bound(data: st.DataObject):
    """The bound holds while both have waiting requests, whatever they send (VTC, Lemma 4.3)."""
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    weights = {"A": rng.choice((1.0, 1.0, 3.0)), "B": 1.0, "C": rng.choice((1.0, 0.5))}
    sizes = {owner: (rng.choice((1, 4, 12)), rng.choice((1, 6, 15))) for owner in weights}
    requests = []
    for i in range(60):
        owner = rng.choice("AAABC")
        n_prompt, n_output = sizes[owner]
        requests.append(
            request(i, owner=owner, n_prompt=rng.randint(1, n_prompt), n_output=rng.randint(1, n_output))
        )
    serving = ServingConfig(
        max_batch_size=rng.randint(1, 6),
        n_slots=rng.choice((28, 40, 200)),
        max_batch_tokens=30,
        block_size=rng.choice((1, 4)),
        scheduling=SchedulingConfig(
            scheduling_policy="fair",
            chunked_prefill=rng.random() < 0.5,
            prefix_caching=False,
            reservation=rng.choice(("full", "on-demand")),
        ),
    )
    play = Simulation(serving)
    queue = FairQueue(weights)
    play.pool._queue = queue
    for i, req in enumerate(requests):
        play.add_at(0.0 if i < 30 else rng.uniform(0, 60), req)
    n_compared = 0
    for _ in play.steps():
        waiting = sorted({req.owner for req in play.pool.in_arrival_order() if req.row < 0})
        for ahead, behind in itertools.permutations(waiting, 2):
            n_compared += 1
            difference = queue.counter(ahead) - queue.counter(behind)
            bound = bound_between(queue, serving, requests, weights[ahead])
            assert difference <= bound + 1e-9, (ahead, behind)  # counters are sums of quotients
    assert n_compared


def test_who_floods_gets_no_more_than_who_asks_for_little():
    """Two owners who always wait get half of the tokens each, or shares by their weights."""
    for weights, share in (({}, 0.5), ({"flood": 3.0}, 0.75)):
        serving = ServingConfig(
            max_batch_size=4, n_slots=400, block_size=4, scheduling=SchedulingConfig(scheduling_policy="fair")
        )
        play = Simulation(serving)
        play.pool._queue = FairQueue(weights)
        requests = [request(i, owner="flood", n_prompt=20, n_output=20) for i in range(80)]
        requests += [request(200 + i, owner="polite", n_prompt=3, n_output=4) for i in range(300)]
        for req in requests:
            play.add_at(0.0, req)
        for _ in play.steps():
            if {req.owner for req in play.pool.in_arrival_order() if req.row < 0} != {"flood", "polite"}:
                break
        costs: Counter[str] = Counter()
        for req in requests:
            costs[req.owner] += len(req.prompt_ids) * (req.n_iterations > 0)
            costs[req.owner] += int(OUTPUT_COST) * len(req.output_ids)
        assert costs.total() > 3000
        assert costs["flood"] / costs.total() == pytest.approx(share, abs=0.06)
