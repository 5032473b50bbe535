"""A lane's owners take turns by the time that their work takes, and none can fill the lane."""

import asyncio
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.errors import QueueFull
from server.errors import Overloaded
from server.gateway import lanes
from server.gateway.lanes import Lane, act_for
from tests.host.engines import SOON

T = TypeVar("T")


class Held:
    """A lane of one thread, held until `gate` opens, and a clock that only its work advances."""

    def __init__(self, **bounds: Any) -> None:
        self.gate = threading.Event()
        self.now = 0
        self.order = list[tuple[str, int]]()  # who has run, and the cost
        self.lane = Lane("test", threads=1, meter=lambda: self.now, **bounds)

    def ask(self, owner: str, cost: int = 1, n_bytes: int = 0) -> asyncio.Task[str]:
        """Queue work with this cost."""

        def work() -> str:
            assert self.gate.wait(SOON)
            self.order.append((owner, cost))
            self.now += cost
            return threading.current_thread().name

        return task_of(owner, lambda: self.lane.run(n_bytes, work))


def task_of(owner: str, main: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
    context = copy_context()
    context.run(act_for, owner)
    return asyncio.get_running_loop().create_task(main(), context=context)


async def settled(*tasks: asyncio.Task[Any]) -> list[Any]:
    async with asyncio.timeout(SOON):
        return await asyncio.gather(*tasks, return_exceptions=True)


def test_one_owner_may_hold_half_of_a_lane_and_the_next_half_of_the_rest() -> None:
    async def main() -> None:
        held = Held(most_waiting=6, most_bytes=200)
        first = [held.ask("a", n_bytes=n) for n in (100, 0, 0)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="3 long requests wait, the limit"):
            await held.ask("a")
        with pytest.raises(Overloaded, match="3 long requests of other clients wait, the limit"):
            await held.ask("b", n_bytes=101)
        second = held.ask("b", n_bytes=50)
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="4 long requests wait, 1 of them yours"):
            await held.ask("b", n_bytes=1)
        third = held.ask("b")
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="5 long requests wait, 2 of them yours"):
            await held.ask("b")
        fourth = held.ask("c", n_bytes=50)
        held.gate.set()
        names = await settled(*first, second, third, fourth)
        assert all(name.startswith("test_") for name in names)
        assert await held.ask("b", n_bytes=300)  # it is alone, so it may be larger than the lane

    asyncio.run(main())


@pytest.mark.parametrize(("n_places", "n_owners"), [(32, 6), (64, 7), (512, 10)])
def test_an_owner_without_work_is_refused_only_when_many_others_fill_the_lane(
    n_places: int, n_owners: int
) -> None:
    """Each of the others takes all that it may, and all but the last leave room for a newcomer."""

    async def main() -> None:
        held = Held(most_waiting=n_places)
        tasks = [held.ask("flood 0")]
        await asyncio.sleep(0)  # the thread has it: no other can be running when it leaves
        for i in range(n_owners):
            newcomer = held.ask(f"newcomer {i}")
            await asyncio.sleep(0)
            newcomer.cancel()  # it was taken, and leaves
            await asyncio.sleep(0)
            while True:
                tasks.append(held.ask(f"flood {i}"))
                await asyncio.sleep(0)
                if tasks[-1].done():
                    assert type(tasks.pop().exception()) is QueueFull, "for its own part"
                    break
        with pytest.raises(Overloaded, match=f"{n_places} long requests of other clients"):
            await held.ask("newcomer")
        held.gate.set()
        await settled(*tasks)
        assert await held.ask("newcomer")

    asyncio.run(main())


def test_a_client_that_leaves_frees_its_place_at_once() -> None:
    async def main() -> None:
        held = Held(most_waiting=6)
        runs, leaves, stays = (held.ask("a", cost) for cost in (1, 2, 3))
        await asyncio.sleep(0)
        leaves.cancel()
        await settled(leaves)
        other = held.ask("a", 4)
        held.gate.set()
        await settled(runs, stays, other)
        assert [cost for _, cost in held.order] == [1, 3, 4]
        assert held.lane.n_done == 4
        assert await held.ask("a")

    asyncio.run(main())


def test_a_thousand_cancelled_calls_are_not_kept() -> None:
    async def main() -> None:
        held = Held(most_waiting=6)
        first = held.ask("a")
        for _ in range(1000):
            task = held.ask("a")
            await asyncio.sleep(0)
            task.cancel()
            await settled(task)
        (share,) = held.lane._shares.values()
        assert share.n == 1
        held.gate.set()
        await settled(first)
        assert not held.lane._shares

    asyncio.run(main())


def test_a_result_is_freed_with_its_last_user() -> None:
    """A result may be megabytes, and must not wait for a garbage collection, which is rare in a server."""

    class Body:
        pass

    async def main() -> None:
        lane = Lane("test", threads=1)
        body = await lane.run(1, Body)
        ref = weakref.ref(body)
        del body
        await asyncio.sleep(0)
        assert ref() is None

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_an_idle_thread_does_the_next_work(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[threading.Thread]()
    start = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    async def main() -> None:
        lane = Lane("test", threads=2)
        first = await lane.run(1, threading.current_thread)
        async with asyncio.timeout(SOON):
            while not lane._n_idle:
                await asyncio.sleep(0)
        assert await lane.run(1, threading.current_thread) is first

    monkeypatch.setattr(threading.Thread, "start", counted)
    asyncio.run(main())
    assert len(started) == 1


def test_a_thread_ends_that_nobody_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_IDLE_SECONDS", 0.0)

    async def main() -> None:
        lane = Lane("test", threads=1)
        first = await lane.run(1, threading.current_thread)
        first.join(SOON)
        assert not lane._n_threads
        assert await lane.run(1, threading.current_thread) is not first

    asyncio.run(main())


def test_an_error_of_the_work_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(Lane("test", threads=1).run(1, lambda: 1 // 0))


def test_without_a_thread_the_work_fails_and_the_lane_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        lane = Lane("test", threads=2, most_waiting=1)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(RuntimeError, match="can't start"):
                await lane.run(1, lambda: 5)
        assert await lane.run(1, lambda: 5) == 5

    asyncio.run(main())


def test_forty_expensive_requests_of_one_owner_delay_no_other() -> None:
    async def main() -> None:
        held = Held()
        flood = [held.ask("flood", 12) for _ in range(40)]
        await asyncio.sleep(0)
        honest = held.ask("honest", 1)
        await asyncio.sleep(0)
        held.gate.set()
        await settled(*flood, honest)
        assert [owner for owner, _ in held.order[:2]] == ["flood", "honest"]

    asyncio.run(main())


def test_an_owner_has_half_of_the_threads() -> None:
    gate = threading.Event()
    both = threading.Barrier(3)

    async def main() -> None:
        lane = Lane("test", threads=4)
        flood = [task_of("flood", lambda: lane.run(0, lambda: gate.wait(SOON))) for _ in range(8)]
        await asyncio.sleep(0)
        honest = [task_of("honest", lambda: lane.run(0, lambda: both.wait(SOON))) for _ in range(2)]
        await asyncio.to_thread(both.wait, SOON)  # two of them run at once, beside the flood
        await settled(*honest)
        assert not any(task.done() for task in flood)
        gate.set()
        assert await settled(*flood) == [True] * 8

    asyncio.run(main())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20)), min_size=1, max_size=40))
def test_owners_who_wait_have_had_the_same_time_up_to_one_work(asked: list[tuple[str, int]]) -> None:
    async def main() -> list[tuple[str, int]]:
        held = Held()
        tasks = list[asyncio.Task[str]]()
        for owner, cost in asked:
            tasks.append(held.ask(owner, cost))
            await asyncio.sleep(0)
        held.gate.set()
        await settled(*tasks)
        return held.order

    order = asyncio.run(main())
    for owner in "abc":  # each owner's in the order they came
        assert [cost for who, cost in order if who == owner] == [cost for who, cost in asked if who == owner]
    left = Counter(owner for owner, _ in asked)
    had = Counter[str]()
    most = max(cost for _, cost in asked)
    for owner, cost in order:
        waiting = [each for each in left if left[each]]
        assert max(had[each] for each in waiting) - min(had[each] for each in waiting) <= most
        left[owner] -= 1
        had[owner] += cost


def test_time_without_work_is_no_credit() -> None:
    """An owner that comes to a busy lane takes turns from its first work on."""
    began, late_is_there = threading.Event(), threading.Event()

    def middle() -> None:
        began.set()
        assert late_is_there.wait(SOON)

    async def main() -> str:
        held = Held()
        busy: list[asyncio.Task[Any]] = [held.ask("busy", 10) for _ in range(10)]
        busy.append(task_of("busy", lambda: held.lane.run(0, middle)))
        busy += [held.ask("busy", 10) for _ in range(5)]
        await asyncio.sleep(0)
        held.gate.set()
        assert await asyncio.to_thread(began.wait, SOON)
        late = [held.ask("late", 10) for _ in range(3)]
        await asyncio.sleep(0)
        late_is_there.set()
        await settled(*busy, *late)
        return "".join(owner[0] for owner, _ in held.order[10:])

    assert asyncio.run(main()) == "blblblbb"
