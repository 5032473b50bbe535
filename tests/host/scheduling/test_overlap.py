"""Overlap (design: one batch more in flight than there are workers), turn by turn."""

import pytest

from orca_jax.errors import EngineError, WorkerLost
from orca_jax.request.request import FinishReason, RequestState
from orca_jax.scheduling.restart import fail_all, run_again
from tests.host.house import STOP_TOKEN, House

INITIATION, RUNNING, INCREMENT, FINISHED = RequestState


def test_the_next_iteration_is_issued_before_the_previous_one_returns():
    house = House(overlap=True)
    a = house.add("A", n_output=4)
    assert house.steps(1) == ["issue A"]
    assert (a.state, a.n_in_flight, a.n_tokens, a.n_tokens_issued) == (RUNNING, 1, 1, 2)
    assert house.steps(1) == ["issue A", "return A"]
    assert (a.state, a.n_in_flight, a.n_tokens, a.n_tokens_issued) == (RUNNING, 1, 2, 3)
    assert house.steps(2) == ["issue A", "return A"] * 2
    assert house.scheduler.n_scheduled == 1 and not house.pool.n_waiting
    assert house.steps(1) == ["return A"], "its length is known: not an iteration too many"
    assert house.scheduler.step() is False
    assert house.delivered() == [
        [("A", 9, None)], [("A", 9, None)], [("A", 9, None)], [("A", 9, FinishReason.LENGTH)]
    ]  # fmt: skip


def test_a_new_request_waits_for_two_iterations_at_most():
    house = House(overlap=True)
    house.add("A")
    house.steps(3)
    house.add("B")
    assert house.steps(2) == ["issue AB", "return A", "issue AB", "return AB"]


def test_without_overlap_or_with_tokens_that_go_by_way_of_the_host_nothing_runs_ahead():
    house = House(n_workers=2)
    assert house.scheduler.overlaps is False
    house.add("A")
    house.add("B")
    house.add("C")
    assert house.steps(3) == ["issue AB", "issue C", "return AB", "issue AB", "return C"]


def test_a_stopped_request_keeps_its_slots_until_its_last_batch_returns():
    """9 slots are one request's: B waits for those that A's last iteration may still write to."""
    house = House(overlap=True, n_slots=9)
    a = house.add("A")
    house.add("B")
    house.steps(2)
    house.engine.tokens["A"] = STOP_TOKEN
    row = a.row
    assert house.steps(1) == ["issue A", "return A"]
    assert house.delivered()[-1] == [("A", STOP_TOKEN, FinishReason.STOP)]
    assert (a.state, a.row, a.n_in_flight, house.scheduler.leaving) == (FINISHED, row, 1, [a])
    assert (house.scheduler.n_rsrv, house.kv.n_free_blocks, len(house.pool)) == (9, 0, 1)
    assert house.steps(1) == ["return A"], "B may not begin yet"
    assert (a.row, a.output_ids, house.scheduler.leaving) == (-1, [9, STOP_TOKEN], [])
    assert house.scheduler.n_rsrv == 0
    assert len(house.delivered()) == 2, "the discarded result is delivered to nobody"
    assert house.steps(1) == ["issue B"]


def test_a_cancelled_request_leaves_in_the_same_way():
    house = House(overlap=True)
    a, b = house.add("A"), house.add("B")
    house.steps(2)
    house.pool.end_named("A", FinishReason.CANCELLED)
    assert house.steps(1) == ["issue B", "return AB"], "it runs ahead no more"
    assert house.delivered()[-1] == [("A", None, FinishReason.CANCELLED), ("B", 9, None)]
    assert (a.state, a.row, b.n_in_flight) == (FINISHED, -1, 1)


def test_a_request_cancelled_after_it_was_issued_again():
    house = House(overlap=True)
    a = house.add("A")
    house.engine.on_wait = lambda _: (house.pool.end_named("A", FinishReason.CANCELLED), False)[1]
    assert house.steps(2) == ["issue A", "issue A", "return A"]
    assert house.delivered() == [[("A", None, FinishReason.CANCELLED)]]
    assert house.scheduler.leaving == [a] and a.row >= 0
    assert house.steps(1) == ["return A"]
    assert a.row == -1 and house.scheduler.step() is False


def test_a_free_worker_begins_with_others_before_it_is_given_what_it_must_wait_for():
    house = House(n_workers=2, overlap=True)
    for name in "ABCD":
        house.add(name)
    assert house.steps(3) == ["issue AB", "issue CD", "issue AB", "return AB"]
    assert house.steps(2) == ["issue CD", "return CD", "issue AB", "return AB"]


def test_only_the_batch_that_returns_next_runs_ahead():
    house = House(n_workers=3, overlap=True)
    house.add("A")
    house.add("B")
    assert house.steps(2) == ["issue AB", "issue AB"]
    house.engine.on_wait = lambda _: True
    assert house.steps(1) == ["interrupted"], "twice in flight already"
    house.add("C")
    assert house.steps(1) == ["issue C"]


@pytest.mark.parametrize("n_workers", [1, 2])
def test_what_leaves_when_the_engine_fails_gives_its_slots_back(n_workers: int):
    house = House(n_workers=n_workers, overlap=True)
    a, b = house.add("A"), house.add("B")
    house.engine.tokens["A"] = STOP_TOKEN
    house.steps(1 + n_workers)
    assert house.scheduler.leaving == [a]

    def fail(_: object) -> bool:
        raise EngineError("gone")

    house.engine.on_wait = fail
    house.steps(n_workers - 1)  # fills up what is in flight
    with pytest.raises(EngineError):
        house.scheduler.step()
    fail_all(house.scheduler)
    assert (b.state, b.finish_reason) == (FINISHED, FinishReason.ERROR)
    assert (house.scheduler.n_rsrv, house.kv.n_free_rows) == (0, house.kv.n_rows)


def test_after_a_loss_what_was_in_flight_does_not_count_and_what_left_is_gone():
    house = House(overlap=True)
    a, b = house.add("A"), house.add("B")
    house.steps(2)
    house.engine.tokens["A"] = STOP_TOKEN
    house.steps(1)
    assert (house.scheduler.leaving, b.n_iterations, b.n_in_flight) == ([a], 3, 1)

    def lose(_: object) -> bool:
        raise WorkerLost(0, "gone")

    house.engine.on_wait = lose
    with pytest.raises(WorkerLost):
        house.scheduler.step()
    run_again(house.scheduler)
    assert (b.state, b.n_iterations, b.n_in_flight, b.row >= 0) == (INITIATION, 2, 0, True)
    assert (a.row, house.scheduler.leaving, house.scheduler.n_rsrv) == (-1, [], 9)
    house.engine.on_wait = lambda _: False
    assert house.steps(2) == ["issue B", "issue B", "return B"]


def test_a_deterministic_engine_runs_its_phases_in_turn_with_overlap_too():
    house = House(max_bs=3, deterministic=True, overlap=True)
    house.add("A")
    house.steps(2)
    house.add("B")
    assert [line for line in house.steps(4) if line.startswith("issue")] == [
        "issue B", "issue AB", "issue AB", "issue AB"
    ]  # fmt: skip
