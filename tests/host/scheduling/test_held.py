"""The first request that had to wait when a batch was chosen, and the reason."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.request.adapter import Adapter
from orca_jax.request.request import Request, Row
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.adapter_slots import AdapterSlots
from orca_jax.scheduling.timeline import IterationRecord, TimelineObserver
from orca_jax.service.iteration_lines import IterationLines
from orca_jax.simulation.simulation import Simulation
from tests.host.engines import FakeAdapters

ORCA = SchedulingConfig(policy="orca", chunked_prefill=False, prefix_caching=False, reservation="full")
SERVING = SchedulingConfig()


class Watched(TimelineObserver):
    """Keeps the lines of all iterations."""

    def __init__(self, simulation: Simulation) -> None:
        self.lines: list[dict[str, Any]] = []
        self._lines = IterationLines(simulation.scheduler)
        simulation.timeline.observers = (self,)

    def issued(self, record: IterationRecord, rows: Sequence[Row]) -> None:
        self._lines.begin(record, rows)

    def returned(self, record: IterationRecord) -> None:
        line = self._lines.end(record)
        assert line is not None and line["returned"] == record.returned
        self.lines.append(line)


class NoThread(Executor):
    """Reads one adapter, whenever the test says."""

    def __init__(self) -> None:
        self.read: Future[Any] = Future()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        return self.read


def run(
    config: ServingConfig, prompts: Sequence[Sequence[int]], n_output: int | Sequence[int], **more: Any
) -> list[dict[str, Any]]:
    """The lines of these requests, all of which arrive at 0."""
    simulation = Simulation(config, **more)
    watched = Watched(simulation)
    n_outputs = [n_output] * len(prompts) if isinstance(n_output, int) else n_output
    for i, (prompt, n) in enumerate(zip(prompts, n_outputs, strict=True)):
        request = Request(
            request_id=str(i),
            prompt_ids=tuple(prompt),
            max_tokens=len(prompt) + n,
            sampling=SamplingParams(),
            seed=i,
        )
        simulation.add_at(0.0, request)
    simulation.run()
    return watched.lines


def config(scheduling: SchedulingConfig, **sizes: int) -> ServingConfig:
    usual: dict[str, Any] = {"max_batch_size": 8, "n_slots": 64, "max_batch_tokens": 64, "block_size": 4}
    return ServingConfig(**{**usual, **sizes}, overlap=False, scheduling=scheduling)


def test_requests_whose_adapter_is_not_there_are_named() -> None:
    simulation = Simulation(config(SERVING))
    watched, adapter, thread = Watched(simulation), Adapter("sql", 0, ""), NoThread()
    store = FakeAdapters("sql")
    simulation.scheduler.adapters = AdapterSlots(1, store, wake=simulation.pool.wake, thread=thread)
    for i, one in enumerate((None, adapter, None)):
        request = Request(
            request_id=str(i),
            prompt_ids=(1,),
            max_tokens=3,
            sampling=SamplingParams(),
            seed=i,
            adapter=one,
        )
        simulation.pool.add(request)
    for _ in range(2):
        simulation.scheduler.step()
    thread.read.set_result(lambda slot: None)
    while len(simulation.pool):
        simulation.scheduler.step()
    assert [line["rows"] for line in watched.lines] == [[(0, 1), (2, 1)]] * 2 + [[(1, 1)]] * 2
    assert [line["adapters"] for line in watched.lines] == [[1], [1], [], []]
    assert [line["held"] for line in watched.lines] == [None] * 4


@pytest.mark.parametrize("scheduling", [ORCA, SERVING])
def test_the_batch_is_full(scheduling: SchedulingConfig) -> None:
    lines = run(config(scheduling, max_batch_size=2), [[1], [2], [3], [4]], n_output=2)
    assert [line["rows"] for line in lines] == [[(0, 1), (1, 1)]] * 2 + [[(2, 1), (3, 1)]] * 2
    assert [line["held"] for line in lines] == [(2, "batch")] * 2 + [None] * 2
    assert [line["waiting"] for line in lines] == [2, 2, 0, 0]
    assert [line["prefill"] for line in lines] == [[0, 1], [], [0, 1], []]


def test_too_few_slots_for_the_whole_request() -> None:
    # 8 slots are promised to each, 20 exist.
    lines = run(config(ORCA, n_slots=20), [[1, 2, 3, 4]] * 3, n_output=3)
    assert [line["held"] for line in lines] == [(2, "slots")] * 3 + [None] * 3
    assert [line["slots"] for line in lines[:4]] == [(16, 0, 0), (16, 8, 0), (16, 10, 0), (8, 0, 0)]


def test_too_few_slots_for_the_prompt() -> None:
    prompts = [list(range(10 * i, 10 * i + 8)) for i in range(3)]
    lines = run(config(SERVING, n_slots=20), prompts, n_output=1)
    assert [(line["rows"], line["held"]) for line in lines] == [
        ([(0, 8), (1, 8)], (2, "slots")),
        ([(2, 8)], None),
    ]


@pytest.mark.parametrize(("scheduling", "first"), [(ORCA, [(0, 6)]), (SERVING, [(0, 6), (1, 2)])])
def test_no_room_for_more_tokens(scheduling: SchedulingConfig, first: list[tuple[int, int]]) -> None:
    prompts = [list(range(10 * i, 10 * i + 6)) for i in range(3)]
    lines = run(config(scheduling, max_batch_tokens=8), prompts, n_output=1)
    assert lines[0]["rows"] == first
    assert lines[0]["held"] == (len(first), "tokens")


def test_another_request_computes_the_same_prefix() -> None:
    prompt = list(range(10))
    lines = run(config(SERVING), [prompt, prompt], n_output=1)
    assert [(line["rows"], line["held"]) for line in lines] == [
        ([(0, 10)], (1, "prefix")),
        ([(1, 2)], None),
    ]
    assert lines[1]["slots"] == (12, 8, 0), "the shared blocks count once"


def test_the_last_chunk_of_another_request_computes_the_same_prefix() -> None:
    prompt = list(range(30))
    lines = run(config(SERVING, max_batch_tokens=12), [prompt, prompt], n_output=2)
    assert [(line["rows"], line["starts"], line["held"]) for line in lines] == [
        ([(0, 12)], [0], (1, "prefix")),
        ([(0, 12)], [12], (1, "prefix")),
        ([(0, 6)], [24], (1, "prefix")),  # there is room for tokens 24 to 30 of request 1 too
        ([(0, 1), (1, 2)], [28], None),
        ([(1, 1)], [], None),
    ]


def test_a_long_prompt_in_chunks_together_with_a_decode() -> None:
    # After the first iteration request 0 decodes, and 1 has the room that is left of 8 tokens.
    lines = run(config(SERVING, max_batch_tokens=8), [[1] * 4, list(range(20))], n_output=4)
    assert [(line["rows"], line["prefill"], line["starts"], line["partial"]) for line in lines[:4]] == [
        ([(0, 4), (1, 4)], [0, 1], [0, 0], [1]),
        ([(0, 1), (1, 7)], [1], [4], [1]),
        ([(0, 1), (1, 7)], [1], [11], [1]),
        ([(0, 1), (1, 2)], [1], [18], []),
    ]


def test_what_the_prefix_cache_has_is_where_a_prompt_starts() -> None:
    prompt = list(range(10))
    lines = run(config(SERVING), [prompt, prompt], n_output=1)
    assert [(line["starts"], line["partial"]) for line in lines] == [([0], []), ([8], [])]


def test_who_lost_its_slots() -> None:
    # Three blocks: request 1 takes the last one a token before request 0 needs it.
    lines = run(config(SERVING, n_slots=12), [[1, 2, 3], [4, 5, 6, 7]], n_output=5)
    assert [(line["rows"], line["held"], line["preempted"]) for line in lines] == [
        ([(0, 3), (1, 4)], None, []),
        ([(0, 1), (1, 1)], None, []),
        ([(0, 1)], (1, "slots"), [1]),
        ([(0, 1)], (1, "slots"), [1]),
        ([(0, 1)], (1, "slots"), [1]),
        ([(1, 2)], None, []),
        ([(1, 1)], None, []),
        ([(1, 1)], None, []),
    ]
    assert (lines[5]["prefill"], lines[5]["starts"]) == ([0], [4]), "its first block is cached"


def test_an_admitted_request_that_cannot_grow() -> None:
    # Three blocks: both need a second one for their fifth token, and the first request gets it.
    lines = run(config(SERVING, n_slots=12), [[1, 2, 3], [4, 5, 6]], n_output=4)
    assert [(line["rows"], line["held"]) for line in lines[2:4]] == [
        ([(0, 1)], (1, "slots")),
        ([(0, 1)], (1, "slots")),
    ]


def test_the_phases_of_a_deterministic_engine_wait_for_each_other() -> None:
    serving = replace(config(ORCA, max_batch_size=2), deterministic=True)
    lines = run(serving, [[1], [2], [3]], n_output=[1, 4, 2])
    assert [(line["rows"], line["held"]) for line in lines[:4]] == [
        ([(0, 1), (1, 1)], (2, "batch")),
        ([(1, 1)], (2, "phase")),
        ([(2, 1)], (1, "phase")),
        ([(1, 1), (2, 1)], None),
    ]


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9),
    n_output=st.integers(1, 5),
    sizes=st.fixed_dictionaries(
        {"max_batch_size": st.integers(1, 4), "n_slots": st.integers(4, 10).map(lambda n: 4 * n)}
    ),
    max_batch_tokens=st.integers(9, 20),
    scheduling=st.sampled_from([ORCA, SERVING]),
)
@settings(max_examples=150, deadline=None)
def test_every_wait_is_reported(
    prompts: list[list[int]],
    n_output: int,
    sizes: dict[str, int],
    max_batch_tokens: int,
    scheduling: SchedulingConfig,
) -> None:
    lines = run(config(scheduling, **sizes, max_batch_tokens=max_batch_tokens), prompts, n_output)
    for line in lines:
        chosen = {arrival for arrival, _ in line["rows"]}
        n_reserved, n_used, n_cached = line["slots"]
        assert 0 <= n_used <= n_reserved <= sizes["n_slots"] - n_cached
        if line["waiting"]:
            assert line["held"] is not None, line
        if line["held"] is None:
            continue
        arrival, why = line["held"]
        assert arrival not in chosen
        if why == "batch":
            assert len(chosen) == sizes["max_batch_size"] or scheduling is SERVING
        if why == "prefix":
            assert scheduling is SERVING and prompts[arrival][:1] in [
                prompts[other][:1] for other in range(arrival)
            ]
