"""The virtual clock, the simulated engine's pipeline, and a whole simulated serving."""

import math
from collections.abc import Iterator
from functools import partial

import pytest

from orca_jax.config import ServingConfig
from orca_jax.errors import EngineError, QueueFull, RequestTooLarge
from orca_jax.planning.cost_model import Device, IterationShape, IterationSums, floor, operations
from orca_jax.request.request import FinishReason, Request, RequestState, Row
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.admission import admissible
from orca_jax.scheduling.engine_protocol import Returned
from orca_jax.simulation.engine import SimulatedEngine, VirtualClock
from orca_jax.simulation.simulation import Simulation
from tests.gpt_config import gpt_config

MODEL = gpt_config(vocab_size=50, n_positions=64, hidden_size=8, n_layers=2, n_heads=2, ffn_size=32)


def never() -> bool:
    return False


def make_request(
    name: str, *, n_input: int = 1, n_output: int = 3, state: RequestState = RequestState.INITIATION
) -> Request:
    return Request(
        request_id=name,
        prompt_ids=(5,) * n_input,
        max_tokens=n_input + n_output,
        sampling=SamplingParams(max_tokens=n_output),
        seed=ord(name[0]),
        state=state,
    )


# The clock.


def test_events_happen_in_the_order_of_their_times_and_then_of_their_setting():
    clock = VirtualClock()
    happened: list[tuple[str, float]] = []
    for name, time in [("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)]:
        clock.call_at(time, lambda name=name: happened.append((name, clock.now())))
    while clock.next_event() < math.inf:
        clock.run_next()
    assert happened == [("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 2.0)]
    clock.advance_to(9.0)
    assert clock.now() == 9.0


def test_time_does_not_go_back_and_no_event_is_left_out():
    clock = VirtualClock()
    clock.advance_to(2.0)
    with pytest.raises(AssertionError):
        clock.advance_to(1.0)
    with pytest.raises(AssertionError, match="past"):
        clock.call_at(1.0, never)
    clock.call_at(3.0, never)
    with pytest.raises(AssertionError):
        clock.advance_to(3.0)


# The engine.


def whole(*requests: Request) -> list[Row]:
    """Rows in which each request computes all that is left."""
    return [(request, request.n_to_compute) for request in requests]


def test_batches_follow_each_other_through_the_stages():
    """Two stages take 1, 2 and 1 units for three batches that are issued at once."""
    clock = VirtualClock()
    durations = {1: 2.0, 2: 4.0, 3: 2.0}
    engine = SimulatedEngine(clock, n_workers=2, duration=lambda shape: durations[shape.input_lengths[0]])
    done: list[float] = []
    for iteration in [engine.issue(whole(make_request("A", n_input=n))) for n in (1, 2, 3)]:
        assert engine.wait(iteration, never) is not None
        done.append(clock.now())
    # Stage 1: 0-1, 1-3, 3-4. Stage 2: 1-2, 3-5, 5-6.
    assert done == [2.0, 5.0, 6.0]
    clock.advance_to(10.0)
    engine.wait(engine.issue(whole(make_request("A", n_input=1))), never)
    assert clock.now() == 12.0


def test_unequal_places_hold_one_batch_each():
    """A stage of 1, a link of 3, a stage of 2: later batches wait for the link, the slowest place."""
    clock = VirtualClock()
    sums: list[IterationSums] = []

    def places(shape: IterationSums) -> list[float]:
        sums.append(shape)
        return [1.0, 3.0, 2.0]

    engine = SimulatedEngine(clock, n_workers=2, places=places, token=None)
    done: list[float] = []
    batch = whole(make_request("A", n_input=3), make_request("B", n_input=2))
    for iteration in [engine.issue(batch) for _ in range(3)]:
        returned = engine.wait(iteration, never)
        assert returned is not None and returned.token_ids == [0, 0]
        done.append(clock.now())
    # Stage 1: 0-1, 1-2, 2-3. Link: 1-4, 4-7, 7-10. Stage 2: 4-6, 7-9, 10-12.
    assert done == [6.0, 9.0, 12.0]
    assert sums == [IterationSums(n_rows=2, n_tokens=5, n_keys=5, n_seen=6 + 3)] * 3


def test_a_batch_returns_with_a_token_for_each_request():
    engine = SimulatedEngine(
        VirtualClock(), n_workers=2, token=lambda request, index: 100 * index + request.seed
    )
    a, b, c = make_request("A"), make_request("B"), make_request("C")
    b.output_ids = [1, 2]
    both, alone = engine.issue(whole(a, b)), engine.issue(whole(c))
    assert both.rows == [(a, 1), (b, 3)] and alone.rows == [(c, 1)]
    returned = engine.wait(both, never)
    assert returned is not None
    assert returned.token_ids == [65, 266]
    returned = engine.wait(alone, never)
    assert returned is not None
    assert returned.token_ids == [67]


def test_the_shape_of_an_iteration_reaches_the_duration():
    shapes: list[IterationShape] = []

    def duration(shape: IterationShape) -> float:
        shapes.append(shape)
        return 1.0

    grown = make_request("A", n_input=4, state=RequestState.INCREMENT)
    grown.output_ids = [1, 2]
    grown.n_computed = 5
    piece = make_request("C", n_input=9)
    piece.n_computed = 4
    rows = [*whole(grown, make_request("B", n_input=3)), (piece, 2)]
    SimulatedEngine(VirtualClock(), duration=duration).issue(rows)
    assert shapes == [IterationShape([1, 3, 2], [6, 3, 6])]


def test_an_event_on_the_way_may_interrupt_the_wait():
    clock = VirtualClock()
    engine = SimulatedEngine(clock, duration=lambda _: 4.0)
    happened: list[float] = []
    for time in (1.0, 2.0, 4.0, 5.0):
        clock.call_at(time, lambda: happened.append(clock.now()))
    iteration = engine.issue(whole(make_request("A")))
    assert engine.wait(iteration, lambda: len(happened) == 2) is None
    assert clock.now() == 2.0
    assert isinstance(engine.wait(iteration, never), Returned)
    assert happened == [1.0, 2.0, 4.0]  # what comes at the very time of the return comes before it
    assert clock.now() == 4.0


def test_an_interruption_from_before_the_wait_counts():
    engine = SimulatedEngine(VirtualClock())
    assert engine.wait(engine.issue(whole(make_request("A"))), lambda: True) is None
    assert engine.clock.now() == 0.0


@pytest.mark.parametrize("at", ["issue", "wait"])
def test_it_fails_once_on_request_and_loses_the_iterations_in_flight(at: str):
    engine = SimulatedEngine(VirtualClock(), n_workers=2, duration=lambda _: 8.0)
    first = engine.issue(whole(make_request("A")))
    engine.fail("issue" if at == "issue" else "wait")
    if at == "issue":
        engine.wait(first, never)  # nobody asked for a failure here
        with pytest.raises(EngineError, match="failed in issue"):
            engine.issue(whole(make_request("B")))
    else:
        engine.issue(whole(make_request("B")))
        with pytest.raises(EngineError, match="failed in wait"):
            engine.wait(first, never)
    iteration = engine.issue(whole(make_request("C")))
    start = engine.clock.now()
    assert engine.wait(iteration, never) is not None
    assert engine.clock.now() == start + 8.0  # the stages were free


def test_the_same_request_gets_the_same_tokens_in_every_simulation():
    def tokens(max_bs: int, n_workers: int) -> dict[str, list[int]]:
        config = ServingConfig(max_batch_size=max_bs, n_slots=99, block_size=3, max_batch_tokens=64)
        simulation = Simulation(config, n_workers=n_workers)
        requests = [make_request(name, n_output=4) for name in "ABCDE"]
        for request in requests:
            simulation.add_at(0.0, request)
        simulation.run()
        return {request.request_id: request.output_ids for request in requests}

    assert tokens(1, 1) == tokens(3, 1) == tokens(2, 3)
    assert len({tuple(ids) for ids in tokens(1, 1).values()}) == 5


# A whole serving.


def test_a_serving_is_played_to_its_end_with_every_time_on_record():
    """One iteration takes 2. A comes at 1, B at 1.5 and is cancelled at 4, C at 100."""
    config = ServingConfig(max_batch_size=4, n_slots=64, block_size=4, max_batch_tokens=64, overlap=False)
    simulation = Simulation(config, duration=lambda _: 2.0, bucket_sizes=(8, 16))
    simulation.add_at(1.0, make_request("A", n_output=2))
    simulation.add_at(1.5, make_request("B", n_output=9))
    simulation.end_at(4.0, "B")
    simulation.end_at(4.5, "B", FinishReason.TIMEOUT)
    simulation.add_at(100.0, make_request("C", n_output=1))
    timeline = simulation.run()
    assert [
        (iteration.issued, iteration.returned, iteration.request_ids) for iteration in timeline.iterations
    ] == [
        (1.0, 3.0, ("A",)),
        (3.0, 5.0, ("A", "B")),
        (100.0, 102.0, ("C",)),
    ]
    records = {record.request_id: record for record in timeline.requests}
    assert (records["A"].arrived, list(records["A"].token_times)) == (1.0, [3.0, 5.0])
    assert records["A"].normalized_latency == 2.0
    assert (records["B"].finish_reason, records["B"].finished) == (FinishReason.CANCELLED, 5.0)
    assert (records["C"].time_to_first_token, records["C"].finish_reason) == (2.0, FinishReason.LENGTH)
    assert [iteration.padding for iteration in timeline.iterations] == [7, 6, 7]


def test_sequential_requests_are_submitted_when_their_predecessor_is_done():
    config = ServingConfig(max_batch_size=2, n_slots=64, block_size=4, max_batch_tokens=64, overlap=False)
    simulation = Simulation(config, duration=lambda _: 2.0)
    asked: list[float] = []

    def arrivals() -> Iterator[tuple[float, Request]]:
        for name, time in [("A", 1.0), ("B", 1.0), ("C", 4.5)]:
            asked.append(simulation.clock.now())
            yield time, make_request(name, n_output=2)

    simulation.add_each(arrivals())
    timeline = simulation.run()
    assert asked == [0.0, 1.0, 1.0]
    assert [(iteration.issued, iteration.request_ids) for iteration in timeline.iterations] == [
        (1.0, ("A", "B")),
        (3.0, ("A", "B")),
        (5.0, ("C",)),
        (7.0, ("C",)),
    ]


def test_a_long_run_keeps_few_records_and_no_delivery():
    config = ServingConfig(max_batch_size=2, n_slots=64, block_size=4, max_batch_tokens=64)
    simulation = Simulation(config, max_records=3)
    simulation.add_each((float(i), make_request(f"A{i}")) for i in range(20))
    timeline = simulation.run()
    assert [record.request_id for record in timeline.requests] == ["A17", "A18", "A19"]
    assert len(timeline.iterations) == 3
    assert not simulation.deliveries


def test_what_the_pool_refuses_is_kept_with_its_error():
    config = ServingConfig(max_batch_size=1, n_slots=16, block_size=4, max_batch_tokens=64, max_queue=1)
    simulation = Simulation(config, check=partial(admissible, config=config, model=MODEL))
    simulation.add_at(0.0, make_request("A", n_output=16))
    simulation.add_at(0.0, make_request("B"))
    simulation.add_at(0.0, make_request("C"))
    simulation.run()
    refused = [(request.request_id, type(error)) for request, error in simulation.refused]
    assert refused == [("A", RequestTooLarge), ("C", QueueFull)]
    assert [record.request_id for record in simulation.timeline.requests] == ["B"]


def test_a_thousand_requests_on_a_cost_model_play_in_moments():
    config = ServingConfig(max_batch_size=8, n_slots=400, block_size=8, max_batch_tokens=64)
    device = Device(bandwidth=1e9, matrix_rate=1e10)

    def duration(shape: IterationShape) -> float:
        return floor(operations(MODEL, shape, weight_bytes=4, kv_bytes=4), device)

    simulation = Simulation(
        config, n_workers=2, duration=duration, check=partial(admissible, config=config, model=MODEL)
    )
    for i in range(1000):
        simulation.add_at(i * 1e-6, make_request("A" + str(i), n_input=1 + i % 20, n_output=1 + i % 7))
    timeline = simulation.run()
    assert len(timeline.requests) == 1000
    assert simulation.clock.now() == timeline.iterations[-1].returned
    assert all(record.normalized_latency for record in timeline.requests)
