"""The baseline's batches, microbatches and rows, worked by hand and over random traces."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.paper.request_level import RequestLevelScheduler, RowWork, most_tokens_at_once
from orca_jax.config import ServingConfig
from orca_jax.planning.cost_model import IterationShape
from orca_jax.request.request import FinishReason, Request, RequestState
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.request_pool import Delivery, RequestPool
from orca_jax.scheduling.timeline import Timeline
from orca_jax.simulation.engine import SimulatedEngine, VirtualClock
from orca_jax.simulation.simulation import Shown, Simulation, shown

GENERATING, FED, DONE = RowWork
MAX_LENGTH = 40
BLOCK_SIZE = 8


def of_the_context(request: Request, index: int) -> int:
    """A token that depends on all tokens before it, like a model's."""
    context = (*request.prompt_ids, *request.output_ids)
    return int.from_bytes(hashlib.sha256(repr(context).encode()).digest()[:2])


def make_request(name: str, n_input: int, n_output: int) -> Request:
    """A request with a unique prompt, which ends only by the number of its output tokens."""
    sampling = SamplingParams(max_tokens=n_output, temperature=0, ignore_eos=True)
    prompt = tuple(1000 * (ord(name[-1]) % 50) + i for i in range(n_input))
    return Request(name, prompt, n_input + n_output, sampling, seed=0)


@dataclass
class House:
    """A baseline over a simulated engine; an iteration takes one second unless `duration` says more."""

    max_bs: int = 4
    mbs: int = 4
    n_workers: int = 1
    n_slots: int = 4 * MAX_LENGTH
    ahead: bool = False
    duration: Callable[[IterationShape], float] = lambda _: 1.0
    delivered: list[tuple[float, Shown]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.timeline = Timeline(self.clock.now, max_records=None)
        self.pool = RequestPool(
            max_waiting=1000, on_arrival=self.timeline.arrived, on_deliveries=self._deliver
        )
        self.kv = KVManager(
            n_blocks=self.n_slots // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            n_rows=(self.n_workers + 1) * self.max_bs,
            max_blocks_per_row=MAX_LENGTH // BLOCK_SIZE,
        )
        self.engine = SimulatedEngine(
            self.clock, n_workers=self.n_workers, duration=self.duration, token=of_the_context
        )
        self.scheduler = RequestLevelScheduler(
            self.pool,
            self.engine,
            self.kv,
            max_bs=self.max_bs,
            mbs=self.mbs,
            max_length=MAX_LENGTH,
            timeline=self.timeline,
            overlap=self.ahead,
        )

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        self.delivered += [(self.clock.now(), delivery) for delivery in shown(deliveries)]

    def play(self, requests: Sequence[Request], arrivals: Sequence[float] = ()) -> None:
        """Play until all requests have ended."""
        for request, time in zip(requests, arrivals or [0.0] * len(requests), strict=True):
            self.clock.call_at(time, lambda request=request: self.pool.add(request))
        while True:
            while self.clock.next_event() <= self.clock.now():
                self.clock.run_next()
            if self.scheduler.step():
                continue
            if self.clock.next_event() == math.inf:
                break
            self.clock.run_next()
        assert len(self.pool) == 0
        assert self.kv.n_free_blocks == self.kv.n_blocks and self.kv.n_free_rows == self.kv.n_rows

    def times(self) -> list[tuple[float, float | None]]:
        return [(record.issued, record.returned) for record in self.timeline.iterations]


def test_a_batch_of_unequal_requests_worked_by_hand():
    """A: 2 in, 3 out. B: 4 in, 1 out. C: 3 in, 4 out. The shortest has 2: max(3, 2 + 1, 1 + 4) iterations."""
    house = House()
    requests = [make_request("A", 2, 3), make_request("B", 4, 1), make_request("C", 3, 4)]
    house.play(requests)
    assert [record.rows for record in house.scheduler.iterations] == [
        (GENERATING, FED, FED),
        (GENERATING, FED, GENERATING),
        (GENERATING, GENERATING, GENERATING),
        (DONE, DONE, GENERATING),
        (DONE, DONE, GENERATING),
    ]
    iterations = list(house.timeline.iterations)
    assert [record.input_lengths for record in iterations] == [(2, 2, 2)] + [(1, 1, 1)] * 4
    assert [record.initiation for record in iterations] == [
        (True, True, True),
        (False, True, True),
        (False, True, False),
        *[(False, False, False)] * 2,
    ]
    assert [record.number for record in house.scheduler.iterations] == [0, 1, 2, 3, 4]
    assert {record.request_ids for record in iterations} == {("A", "B", "C")}
    assert house.times() == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    # Everything is delivered when the longest is done: the tokens of each, and its end with the last one.
    assert [(time, req.request_id, reason) for time, (req, _, reason) in house.delivered] == [
        *[(5, "A", None)] * 2, (5, "A", FinishReason.LENGTH),
        (5, "B", FinishReason.LENGTH),
        *[(5, "C", None)] * 3, (5, "C", FinishReason.LENGTH),
    ]  # fmt: skip
    for request in requests:
        delivered = [token_id for _, (req, token_id, _) in house.delivered if req is request]
        assert delivered == request.output_ids
        assert (request.state, request.finish_reason) == (RequestState.FINISHED, FinishReason.LENGTH)
    records = {record.request_id: record for record in house.timeline.requests}
    assert [(records[name].n_input, records[name].n_output) for name in "ABC"] == [(2, 3), (4, 1), (3, 4)]
    assert {(record.scheduled, record.finished) for record in records.values()} == {(0, 5)}
    assert records["B"].normalized_latency == 5.0


def test_the_engine_computes_from_the_contents_of_its_cache():
    """The input tokens of request B of the batch above, and its tokens in the cache."""
    shapes: list[tuple[list[int], list[int]]] = []

    def duration(shape: IterationShape) -> float:
        shapes.append((list(shape.input_lengths), list(shape.kv_lengths)))
        return 1.0

    house = House(duration=duration)
    house.play([make_request("A", 2, 3), make_request("B", 4, 1), make_request("C", 3, 4)])
    assert shapes == [([2] * 3, [2] * 3), *(([1] * 3, [n] * 3) for n in (3, 4, 5, 6))]


def test_a_late_request_waits_for_the_whole_batch():
    house = House(max_bs=2, mbs=2)
    requests = [make_request("A", 3, 1), make_request("B", 3, 6), make_request("C", 3, 2)]
    house.play(requests, [0.0, 0.0, 0.5])
    records = {record.request_id: record for record in house.timeline.requests}
    assert (records["A"].scheduled, records["A"].finished) == (0, 6)
    assert (records["C"].scheduled, records["C"].finished) == (6, 8)
    assert [record.batch for record in house.scheduler.iterations] == [0] * 6 + [1] * 2
    assert house.scheduler.n_batches == 2


def test_a_request_that_arrives_at_the_end_of_a_batch_starts_there():
    house = House()
    house.play([make_request("A", 3, 2), make_request("B", 3, 2)], [0.0, 2.0])
    assert house.times() == [(0, 1), (1, 2), (2, 3), (3, 4)]


@pytest.mark.parametrize(
    ("mbs", "times"),
    [
        # Each of two stages takes a second. One microbatch leaves one stage idle at any time.
        (2, [(0, 2), (2, 4)]),
        # A, B: stage 1 at 0, 1, 2, 3; stage 2 a second later.
        (1, [(0, 2), (0, 3), (2, 4), (3, 5)]),
    ],
)
def test_microbatches_through_two_stages(mbs: int, times: list[tuple[float, float]]):
    house = House(max_bs=2, mbs=mbs, n_workers=2, duration=lambda _: 2.0)
    house.play([make_request("A", 1, 2), make_request("B", 1, 2)])
    assert house.times() == times
    assert {time for time, _ in house.delivered} == {times[-1][1]}


def test_no_more_microbatches_than_stages_are_in_flight_and_each_has_its_turn():
    """Five requests in microbatches of 2, 2 and 1, two stages of a second each: stage 1 is never idle."""
    house = House(max_bs=5, mbs=2, n_workers=2, n_slots=5 * MAX_LENGTH, duration=lambda _: 2.0)
    house.play([make_request(name, 1, 2) for name in "ABCDE"])
    batches = ["".join(record.request_ids) for record in house.timeline.iterations]
    assert batches == ["AB", "CD", "E", "AB", "CD", "E"]
    assert house.times() == [(0, 2), (0, 3), (2, 4), (3, 5), (4, 6), (5, 7)]


def test_on_an_engine_that_keeps_tokens_input_goes_in_ahead_of_what_is_sampled():
    """A: 1 in, 4 out. B: 3 in, 1 out. B's second and third token go into iterations 1 and 2."""
    house = House(ahead=True)
    house.play([make_request("A", 1, 4), make_request("B", 3, 1)])
    phases = [record.initiation for record in house.timeline.iterations]
    assert phases == [(True, True), (False, True), (False, True), (False, False)]
    # Each iteration is issued when the one before the one before it is done.
    assert house.times() == [(0, 1), (0, 2), (1, 3), (2, 4)]


def test_ahead_of_two_stages_one_iteration_more_is_in_flight():
    house = House(max_bs=2, mbs=1, n_workers=2, ahead=True, duration=lambda _: 2.0)
    house.play([make_request("A", 1, 2), make_request("B", 1, 2)])
    batches = ["".join(record.request_ids) for record in house.timeline.iterations]
    assert batches == ["A", "B", "A", "B"]
    assert house.times() == [(0, 2), (0, 3), (0, 4), (2, 5)]


def test_slots_for_the_model_s_maximum_length_bound_the_batch():
    """A request of 2 tokens holds 40 slots, 5 blocks of 8: 12 blocks are two requests."""
    house = House(max_bs=4, mbs=4, n_slots=12 * BLOCK_SIZE)
    house.play([make_request(name, 1, 1) for name in "ABCDE"])
    assert ["".join(record.request_ids) for record in house.timeline.iterations] == ["AB", "CD", "E"]


def test_an_end_token_ends_the_output_but_not_the_batch():
    house = House()
    request = make_request("A", 2, 6)
    free = make_request("A", 2, 6)
    house.play([free])
    ending = House()
    request.end_token_ids = frozenset({free.output_ids[2]})
    ending.play([request])
    assert request.output_ids == free.output_ids[:3]
    assert request.finish_reason is FinishReason.STOP
    assert len(ending.timeline.iterations) == 6


def test_the_most_tokens_of_an_iteration_worked_by_hand():
    """Three requests of 4 tokens at a time, or two of 6; one may have 9."""
    assert most_tokens_at_once([4, 6, 6, 1, 9], 1) == 9
    assert most_tokens_at_once([4, 6, 6, 1, 9], 2) == 12
    assert most_tokens_at_once([5, 6, 6, 1, 9], 3) == 15
    assert most_tokens_at_once([5, 6, 6, 1, 9], 4) == 15


@st.composite
def played(draw: st.DrawFn) -> tuple[House, list[Request], list[float]]:
    max_bs = draw(st.integers(1, 5))
    house = House(
        max_bs=max_bs,
        mbs=draw(st.integers(1, max_bs)),
        n_workers=draw(st.integers(1, 3)),
        n_slots=draw(st.integers(1, 6)) * MAX_LENGTH,
        ahead=draw(st.booleans()),
        duration=lambda shape: 1.0 + sum(shape.input_lengths) / 8,
    )
    requests, arrivals = list[Request](), list[float]()
    for i in range(draw(st.integers(1, 12))):
        n_input = draw(st.integers(1, MAX_LENGTH - 1))
        requests.append(make_request(f"r{i}", n_input, draw(st.integers(1, MAX_LENGTH - n_input))))
        arrivals.append(draw(st.integers(0, 400)) / 8)
    return house, requests, sorted(arrivals)


@settings(max_examples=200, deadline=None)
@given(played())
def test_what_holds_of_every_trace(case: tuple[House, list[Request], list[float]]):
    house, requests, arrivals = case
    house.play(requests, arrivals)
    for request in requests:
        # The tokens of the request alone, its whole prompt at once, one after the other.
        alone = Request("", request.prompt_ids, request.max_tokens, request.sampling, seed=0)
        while alone.n_tokens < alone.max_tokens:
            alone.output_ids.append(of_the_context(alone, 0))
        assert request.output_ids == alone.output_ids, request.request_id
    iterations, works = list(house.timeline.iterations), list(house.scheduler.iterations)
    assert [work.number for work in works] == [iteration.number for iteration in iterations]
    batches: list[list[int]] = [[] for _ in range(house.scheduler.n_batches)]
    for i, work in enumerate(works):
        batches[work.batch].append(i)
    ended, taken = 0.0, list[str]()
    by_name = {request.request_id: request for request in requests}
    for numbers in batches:
        rows = [list(zip(iterations[i].request_ids, works[i].rows, strict=True)) for i in numbers]
        # dictionaries keep the order of the first iterations, which is that of the microbatches
        names = list(dict.fromkeys(name for row in rows for name, _ in row))
        batch = [by_name[name] for name in names]
        assert len(batch) <= house.max_bs and len(batch) * MAX_LENGTH <= house.n_slots
        shortest = min(len(request.prompt_ids) for request in batch)
        n_iterations = max(len(r.prompt_ids) - shortest + r.sampling.max_tokens for r in batch)
        for request in batch:
            mine = [work for row in rows for name, work in row if name == request.request_id]
            n_fed, n_output = len(request.prompt_ids) - shortest, request.sampling.max_tokens
            n_done = n_iterations - n_fed - n_output
            assert mine == [FED] * n_fed + [GENERATING] * n_output + [DONE] * n_done
        assert min(iterations[i].issued for i in numbers) >= ended, "a batch began before the last ended"
        ended = max(iterations[i].returned or math.inf for i in numbers)
        assert {time for time, (req, _, _) in house.delivered if req in batch} == {ended}
        taken += names
    assert taken == [request.request_id for request in requests], "first come, first served"
    most = most_tokens_at_once([len(request.prompt_ids) for request in requests], house.mbs)
    assert max(iteration.n_tokens for iteration in iterations) <= most


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 20), st.integers(1, 14))
def test_equal_requests_that_are_all_there_at_once_run_as_under_orca(
    max_bs: int, n_input: int, n_output: int, n_requests: int
):
    def duration(shape: IterationShape) -> float:
        return 1.0 + sum(shape.input_lengths) / 8 + sum(shape.kv_lengths) / 64

    requests = [[make_request(f"r{i}", n_input, n_output) for i in range(n_requests)] for _ in range(2)]
    house = House(max_bs=max_bs, mbs=max_bs, n_slots=max_bs * MAX_LENGTH, duration=duration)
    house.play(requests[0])
    config = ServingConfig(
        max_batch_size=max_bs, n_slots=house.n_slots, block_size=BLOCK_SIZE, overlap=False, max_queue=1000
    )
    orca = Simulation(config, duration=duration, token=of_the_context)
    for request in requests[1]:
        orca.add_at(0.0, request)
    orca.run()
    assert list(house.timeline.iterations) == list(orca.timeline.iterations)
    assert [request.output_ids for request in requests[0]] == [request.output_ids for request in requests[1]]
    assert not any({FED, DONE} & set(record.rows) for record in house.scheduler.iterations)
