"""A request runs only while its LoRA adapter is on the devices, and no adapter keeps another one out."""

import random
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from orca_jax.config import ORCA, SchedulingConfig, ServingConfig
from orca_jax.errors import AdapterFailed, NotACheckpoint
from orca_jax.request.adapter import NOWHERE, Adapter
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.adapter_slots import AdapterSlots, PutAdapter
from orca_jax.scheduling.restart import run_again
from orca_jax.simulation.simulation import Simulation


class Store:
    """Adapters without arrays: a slot holds the adapter that was put there last."""

    def __init__(self, names: Iterable[str]) -> None:
        self.generation = 0
        self.adapters: Mapping[str, Adapter] = {name: Adapter(name, i, name) for i, name in enumerate(names)}
        self.broken = ""  # names of those that cannot be read
        self.held: dict[int, Adapter] = {}
        self.n_read = 0

    def add(self, name: str, directory: str, *, replace: bool = False) -> Adapter:
        raise AssertionError("not used here")

    def update(self, name: str, weights: object, *, scale: float) -> Adapter:
        raise AssertionError("not used here")

    def remove(self, name: str) -> Adapter:
        raise AssertionError("not used here")

    def read(self, adapter: Adapter) -> PutAdapter:
        self.n_read += 1
        if adapter.name in self.broken:
            raise NotACheckpoint(f"{adapter.name} is gone")

        def put(slot: int) -> None:
            self.held[slot] = adapter

        return put


class Thread(Executor):
    """Does work when it is told to, in order."""

    def __init__(self) -> None:
        self.to_do: list[Callable[[], None]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        self.to_do.append(work)
        return future

    def work(self) -> None:
        for each in self.to_do:
            each()
        self.to_do.clear()


class Engine:
    """A simulated engine with slots for adapters, which checks each token's adapter."""

    def __init__(
        self, names: Iterable[str], n_slots: int, scheduling: SchedulingConfig, **sizes: int
    ) -> None:
        usual = {"max_batch_size": 4, "n_slots": 256, "max_batch_tokens": 64, "block_size": 4}
        config = ServingConfig(**(usual | sizes), scheduling=scheduling)  # pyright: ignore[reportArgumentType]
        self.store, self.thread, self.n_slots = Store(names), Thread(), n_slots
        self.simulation = Simulation(config, token=self._token)
        wake = self.simulation.pool.wake
        self.slots = AdapterSlots(n_slots, self.store, wake=wake, thread=self.thread)
        self.simulation.scheduler.adapters = self.slots
        self.ended: list[str] = []
        self.requests: dict[str, Request] = {}

    def _token(self, request: Request, index: int) -> int:
        if request.adapter is not None:
            assert self.store.held[request.adapter.slot] is request.adapter
        return 7

    def add(self, name: str, adapter: str | None, n_output: int = 4) -> None:
        request = Request(
            request_id=name,
            prompt_ids=(1, 2, 3),
            max_tokens=3 + n_output,
            sampling=SamplingParams(),
            seed=0,
            adapter=None if adapter is None else self.store.adapters[adapter],
        )
        self.requests[name] = request
        self.simulation.pool.add(request)

    def turn(self) -> None:
        self.simulation.scheduler.step()
        self.ended += [req.request_id for req, _, reason in self.simulation.deliveries if reason is not None]
        self.simulation.deliveries.clear()

    def run(self) -> None:
        for _ in range(2000):
            if not len(self.simulation.pool):
                return
            self.turn()
            self.thread.work()
        raise AssertionError(f"requests still wait: {len(self.simulation.pool)}")


@pytest.mark.parametrize("scheduling", [ORCA, SchedulingConfig()], ids=["orca", "default"])
@pytest.mark.parametrize("n_slots", [1, 2, 5])
def test_all_requests_run_with_their_own_adapters(scheduling: SchedulingConfig, n_slots: int) -> None:
    engine, chance = Engine("abcde", n_slots, scheduling), random.Random(n_slots)
    for i in range(60):
        engine.add(str(i), chance.choice(["a", "b", "c", "d", "e", None]), chance.randint(1, 6))
    engine.run()
    assert sorted(engine.ended, key=int) == [str(i) for i in range(60)]
    assert {req.finish_reason for req in engine.requests.values()} == {FinishReason.LENGTH}
    resident = engine.slots.resident
    assert len(resident) == min(n_slots, 5)
    assert sorted(one.slot for one in resident) == list(range(len(resident)))
    assert all(one.slot == NOWHERE for one in engine.store.adapters.values() if one not in resident)
    assert n_slots < 5 or engine.store.n_read == 5, "what is there is not read again"


def test_others_run_while_an_adapter_is_read() -> None:
    engine = Engine("ab", 2, SchedulingConfig())
    engine.add("first", "a")
    engine.add("other", None)
    for _ in range(8):  # the thread does nothing yet
        engine.turn()
    assert engine.ended == ["other"]
    assert engine.slots.waits(engine.requests["first"])
    engine.run()
    assert engine.ended == ["other", "first"]


def test_no_adapter_keeps_another_one_out() -> None:
    """`a` always has requests that wait, and its slot is never free by itself."""
    engine = Engine("ab", 1, SchedulingConfig(), max_batch_size=2)
    engine.add("a0", "a")
    engine.add("a1", "a", 6)
    engine.add("b", "b")
    for i in range(2, 40):
        engine.add(f"a{i}", "a", 3 + i % 3)
    engine.run()
    assert engine.ended.index("b") <= 4


def test_the_least_recently_used_adapter_makes_room() -> None:
    engine = Engine("abc", 2, SchedulingConfig())
    for name in "aba":
        engine.add(name + str(len(engine.requests)), name)
        engine.run()
    engine.add("c", "c")
    engine.run()
    assert {one.name for one in engine.slots.resident} == {"a", "c"}


def test_an_adapter_that_cannot_be_read_ends_its_requests_alone() -> None:
    engine = Engine("ab", 2, SchedulingConfig())
    engine.store.broken = "a"
    for i, adapter in enumerate(("a", "b", None, "a")):
        engine.add(str(i), adapter)
    engine.run()
    for name in ("0", "3"):
        assert engine.requests[name].finish_reason is FinishReason.ERROR
        assert engine.requests[name].failure == "the adapter could not be read: a is gone"
        assert engine.requests[name].failure_kind is AdapterFailed
    assert {engine.requests[name].finish_reason for name in ("1", "2")} == {FinishReason.LENGTH}
    engine.store.broken = ""  # the next request reads it again
    engine.add("again", "a")
    engine.run()
    assert engine.requests["again"].finish_reason is FinishReason.LENGTH


def test_the_first_adapters_are_there_before_the_first_request() -> None:
    engine = Engine("abc", 2, SchedulingConfig())
    engine.slots.fill()
    assert [one.name for one in engine.slots.resident] == ["a", "b"]
    engine.add("b", "b", 1)
    engine.turn()
    assert not engine.slots.waits(engine.requests["b"])
    assert engine.store.n_read == 2


@pytest.mark.parametrize("scheduling", [ORCA, SchedulingConfig()], ids=["orca", "default"])
def test_after_a_loss_all_adapters_come_again(scheduling: SchedulingConfig) -> None:
    """Requests that were admitted keep their place, and run once their adapter is there again."""
    engine = Engine("abc", 2, scheduling)
    for i, adapter in enumerate(("a", "b", None, "c", "a")):
        engine.add(str(i), adapter, 6)
    engine.turn()
    engine.thread.work()
    for _ in range(3):
        engine.turn()
    assert {one.name for one in engine.slots.resident} == {"a", "b"}
    assert {req.request_id for req in engine.simulation.pool.admitted()} == {"0", "1", "2", "4"}
    engine.store.generation += 1
    engine.store.held.clear()
    run_again(engine.simulation.scheduler)
    engine.turn()  # the thread has done nothing yet
    assert not engine.slots.resident and engine.store.adapters["a"].slot == NOWHERE
    engine.run()
    assert sorted(engine.ended) == [str(i) for i in range(5)]
    assert {len(req.output_ids) for req in engine.requests.values()} == {6}


def test_an_adapter_that_was_read_before_a_loss_is_read_again() -> None:
    engine = Engine("a", 1, SchedulingConfig())
    engine.add("0", "a")
    engine.turn()
    engine.thread.work()  # the old workers have it, and no slot does
    engine.store.generation += 1
    engine.run()
    assert engine.store.n_read == 2 and engine.ended == ["0"]


@pytest.mark.parametrize("scheduling", [ORCA, SchedulingConfig()], ids=["orca", "default"])
def test_a_flood_for_other_adapters_stops_nobody_else(scheduling: SchedulingConfig) -> None:
    """Not one of the flood's adapters ever arrives; half of those that are there may make room for them."""
    there, flood = "abcd", [f"flood {i}" for i in range(400)]
    engine = Engine([*there, *flood], 4, scheduling, max_batch_size=8)
    for name in there:
        engine.add(f"{name}0", name, 6)
    engine.turn()
    for _ in range(2):
        engine.thread.work()
        engine.turn()
    assert {one.name for one in engine.slots.resident} == set(there)
    for name in flood:
        engine.add(name, name)
    for name in there:
        engine.add(f"{name}1", name)
    engine.add("none", None)
    for _ in range(40):
        engine.turn()
    assert {f"{name}0" for name in there} <= set(engine.ended), "what runs goes on"
    later = {f"{name}1" for name in there} & set(engine.ended)
    assert len(later) >= 2 and "none" in engine.ended
    waiting = [req for req in engine.requests.values() if req.finish_reason is None]
    assert len(waiting) >= 400 and all(engine.slots.waits(req) for req in waiting)
    engine.run()
    assert len(engine.ended) == 409
