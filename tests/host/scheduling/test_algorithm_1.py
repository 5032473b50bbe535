"""Algorithm 1 line by line, with literal examples from the paper. Altering a line makes a test here fail."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Never

import pytest

from orca_jax.config import ServingConfig
from orca_jax.errors import EngineError, LossCause, WorkerLost
from orca_jax.request.request import FinishReason, Request, RequestState, Row
from orca_jax.scheduling.engine_protocol import Returned
from orca_jax.scheduling.request_pool import InArrivalOrder
from orca_jax.scheduling.restart import fail_all, run_again
from orca_jax.scheduling.select import select
from orca_jax.simulation.simulation import Simulation
from tests.host.house import STOP_TOKEN, House, make_request, names

INITIATION, RUNNING, INCREMENT, FINISHED = RequestState


def make_pool(*requests: tuple[str, RequestState, int]) -> list[Request]:
    """Requests in arrival order: name, state, max_tokens."""
    return [
        make_request(name, arrival=i, n_output=max_tokens - 1, state=state)
        for i, (name, state, max_tokens) in enumerate(requests)
    ]


# Select, lines 17 to 28.


def test_line_18_the_batch_starts_empty():
    assert select([], 7, max_bs=4, n_slots=100) == ([], 7)


def test_line_19_a_running_request_is_left_out():
    pool = make_pool(("A", RUNNING, 9), ("B", INCREMENT, 9), ("C", RUNNING, 9), ("D", INITIATION, 9))
    batch, _ = select(pool, 27, max_bs=4, n_slots=100)
    assert names(batch) == "BD"


def test_line_19_running_requests_take_no_place_of_the_batch():
    pool = make_pool(("A", RUNNING, 9), ("B", RUNNING, 9), ("C", INCREMENT, 9), ("D", INCREMENT, 9))
    batch, _ = select(pool, 36, max_bs=2, n_slots=36)
    assert names(batch) == "CD"


def test_line_19_running_requests_count_no_tokens():
    pool = make_pool(("A", RUNNING, 9), ("B", INCREMENT, 9), ("C", INCREMENT, 9))
    batch, _ = select(pool, 27, max_bs=3, n_slots=100, max_batch_tokens=2)
    assert names(batch) == "BC"


def test_line_20_the_pool_is_sorted_by_arrival():
    a, b, c, d = make_pool(
        ("A", INITIATION, 9), ("B", INITIATION, 9), ("C", INITIATION, 9), ("D", INITIATION, 9)
    )
    batch, _ = select([c, a, d, b], 0, max_bs=3, n_slots=100)
    assert names(batch) == "ABC"


def test_line_20_any_iterable_will_do_and_is_not_changed():
    pool = make_pool(("A", INITIATION, 9), ("B", INITIATION, 9))
    backwards = pool[::-1]
    assert names(select(backwards, 0, max_bs=2, n_slots=100)[0]) == "AB"
    assert names(backwards) == "BA"
    assert names(select(iter(pool), 0, max_bs=2, n_slots=100)[0]) == "AB"


def test_line_20_the_pool_s_own_view_is_read_no_further_than_needed():
    read: list[str] = []

    def view() -> "Sequence[Request]":
        return make_pool(*((name, INITIATION, 9) for name in "ABCDEFGH"))

    class Counted(InArrivalOrder):
        def __iter__(self):
            for req in super().__iter__():
                read.append(req.request_id)
                yield req

    batch, _ = select(Counted(view(), lambda: iter(())), 0, max_bs=2, n_slots=100)
    assert names(batch) == "AB"
    assert read == ["A", "B", "C"]


def test_line_21_goes_over_the_whole_pool():
    pool = make_pool(*((name, INITIATION, 2) for name in "ABCDEFGH"))
    batch, n_rsrv = select(pool, 0, max_bs=100, n_slots=100)
    assert names(batch) == "ABCDEFGH"
    assert n_rsrv == 16


@pytest.mark.parametrize("max_bs", [1, 2, 3])
def test_line_22_a_batch_has_at_most_max_bs_requests(max_bs: int):
    pool = make_pool(*((name, INCREMENT, 2) for name in "ABC"))
    assert names(select(pool, 6, max_bs=max_bs, n_slots=6)[0]) == "ABC"[:max_bs]


def test_line_22_nothing_is_reserved_for_a_request_beyond_max_bs():
    pool = make_pool(("A", INITIATION, 9), ("B", INITIATION, 9))
    assert select(pool, 0, max_bs=1, n_slots=100)[1] == 9


def test_line_23_only_the_initiation_phase_reserves():
    pool = make_pool(("A", INCREMENT, 9), ("B", INITIATION, 9))
    batch, n_rsrv = select(pool, 9, max_bs=4, n_slots=18)
    assert names(batch) == "AB"
    assert n_rsrv == 18


def test_line_23_a_request_that_runs_again_after_a_fault_holds_its_reservation():
    again = make_request("A", arrival=0, n_output=8, row=3)
    new = make_request("B", arrival=1, n_output=8)
    batch, n_rsrv = select([again, new], 9, max_bs=4, n_slots=18)
    assert names(batch) == "AB"
    assert n_rsrv == 18


def test_line_23_row_0_is_a_row():
    assert select([make_request("A", arrival=0, row=0)], 9, max_bs=4, n_slots=9)[1] == 9


def test_line_24_adds_the_tokens_of_input_and_output():
    requests = [make_request("A", arrival=0, n_input=5, n_output=7)]
    assert select(requests, 10, max_bs=4, n_slots=100)[1] == 22


def test_lines_24_to_26_worked_by_hand():
    """n_slots 20. A: 0 + 6 = 6. B: 6 + 9 = 15. C: 15 + 5 = 20, which still fits. D: 20 + 1 > 20: it waits."""
    pool = make_pool(("A", INITIATION, 6), ("B", INITIATION, 9), ("C", INITIATION, 5), ("D", INITIATION, 2))
    batch, n_rsrv = select(pool, 0, max_bs=10, n_slots=20)
    assert names(batch) == "ABC"
    assert n_rsrv == 20


def test_line_25_exactly_n_slots_may_be_reserved_and_not_one_more():
    pool = make_pool(("A", INITIATION, 10))
    assert select(pool, 10, max_bs=1, n_slots=20) == (pool, 20)
    assert select(pool, 11, max_bs=1, n_slots=20) == ([], 11)


def test_line_25_breaks_so_that_no_smaller_request_overtakes():
    pool = make_pool(("A", INITIATION, 6), ("B", INITIATION, 50), ("C", INITIATION, 2), ("D", INCREMENT, 2))
    batch, n_rsrv = select(pool, 0, max_bs=10, n_slots=20)
    assert names(batch) == "A"
    assert n_rsrv == 6


def test_line_26_what_did_not_fit_is_not_reserved():
    pool = make_pool(("A", INITIATION, 6), ("B", INITIATION, 15))
    assert select(pool, 0, max_bs=10, n_slots=20)[1] == 6


def test_line_27_holds_for_both_phases_in_their_order():
    """Figure 4: x1 and x2 in the increment phase, x3 and x4 new, all in one batch."""
    pool = make_pool(("1", INCREMENT, 9), ("2", INCREMENT, 9), ("3", INITIATION, 9), ("4", INITIATION, 9))
    batch, n_rsrv = select(pool, 18, max_bs=4, n_slots=100)
    assert names(batch) == "1234"
    assert n_rsrv == 36


def test_line_28_returns_what_was_reserved_before_as_well():
    assert select(make_pool(("A", INITIATION, 9)), 31, max_bs=1, n_slots=100)[1] == 40


def test_select_changes_no_request():
    pool = make_pool(("A", INCREMENT, 9), ("B", INITIATION, 9), ("C", RUNNING, 9))
    select(pool, 9, max_bs=4, n_slots=100)
    assert [(req.state, req.row, req.n_iterations) for req in pool] == [
        (INCREMENT, -1, 0),
        (INITIATION, -1, 0),
        (RUNNING, -1, 0),
    ]


# What is added to Select: whole blocks, and a bound on the tokens of a batch.


def test_reservations_are_of_whole_blocks():
    """Blocks of 4. A: 5 tokens, 8 slots. B: 4 tokens, 4 slots. C: 1 of 2 tokens, 4 slots, and 16 are full."""
    pool = make_pool(("A", INITIATION, 5), ("B", INITIATION, 4), ("C", INITIATION, 2), ("D", INITIATION, 2))
    batch, n_rsrv = select(pool, 0, max_bs=10, n_slots=16, block_size=4)
    assert names(batch) == "ABC"
    assert n_rsrv == 16


def test_slots_beyond_the_last_whole_block_do_not_count():
    pool = make_pool(("A", INITIATION, 4), ("B", INITIATION, 3))
    batch, n_rsrv = select(pool, 0, max_bs=10, n_slots=7, block_size=4)
    assert names(batch) == "A"
    assert n_rsrv == 4


def token_pool() -> list[Request]:
    return [
        make_request("A", arrival=0, n_input=50, state=INCREMENT),
        make_request("B", arrival=1, n_input=3),
        make_request("C", arrival=2, n_input=4),
        make_request("D", arrival=3, n_input=1),
    ]


@pytest.mark.parametrize(
    "limit, expected", [(0, ""), (1, "A"), (3, "A"), (4, "AB"), (7, "AB"), (8, "ABC"), (9, "ABCD")]
)
def test_tokens_of_a_batch_are_bounded_and_order_is_kept(limit: int, expected: str):
    """1 token for the increment of A; then 3, 4 and 1 of input: sums 1, 4, 8, 9."""
    batch, n_rsrv = select(token_pool(), 58, max_bs=9, n_slots=1000, max_batch_tokens=limit)
    assert names(batch) == expected
    assert n_rsrv == 58 + sum(req.max_tokens for req in batch if req.request_id != "A")


def test_without_a_bound_any_number_of_tokens_goes():
    pool = [make_request("A", arrival=0, n_input=10**6)]
    assert names(select(pool, 0, max_bs=1, n_slots=10**7)[0]) == "A"


def test_a_request_that_runs_again_goes_in_with_all_its_tokens():
    again = make_request("A", arrival=0, n_input=3, row=0)
    again.output_ids = [7, 8]
    assert again.n_to_compute == 5
    assert select([again], 11, max_bs=1, n_slots=11, max_batch_tokens=4)[0] == []
    assert select([again], 11, max_bs=1, n_slots=11, max_batch_tokens=5)[0] == [again]


# The loop, lines 1 to 15.


def test_lines_1_and_2_start_at_zero():
    scheduler = House().scheduler
    assert (scheduler.n_scheduled, scheduler.n_rsrv) == (0, 0)


def test_line_3_every_turn_is_one_iteration_while_there_is_work_and_false_when_there_is_none():
    house = House()
    assert house.scheduler.step() is False
    house.add("A", n_output=2)
    assert house.steps(2) == ["issue A", "return A", "issue A", "return A"]
    assert house.scheduler.step() is False
    assert house.engine.log[4:] == []  # no empty batch was issued, and nothing waited for


def test_a_deterministic_engine_runs_the_phases_in_turn():
    """Line 4 selects as always, but only one phase of its batch is issued; initiations go first."""
    house = House(max_bs=3, deterministic=True)
    house.add("A")
    house.add("B")
    assert house.steps(2) == ["issue AB", "return AB", "issue AB", "return AB"]
    house.add("C")
    house.add("D")  # three requests are a batch: it waits
    assert house.steps(3)[::2] == ["issue C", "issue ABC", "issue ABC"]
    for name in "AB":
        house.pool.end_named(name, FinishReason.CANCELLED)
    assert house.steps(2)[::2] == ["issue D", "issue CD"]
    house.add("E")
    house.steps(1)
    house.pool.end_named("C", FinishReason.CANCELLED)
    house.add("F")
    assert house.steps(2)[::2] == ["issue DE", "issue F"], "increments had to wait, and go before the next"
    assert house.scheduler.n_rsrv == 27


def test_line_4_selects_with_what_is_reserved_already():
    """n_slots 20: A takes 9, B 9; C would need 4 more than the 2 that are left, until A has finished."""
    house = House(max_bs=4, n_slots=20)
    house.add("A", n_output=2 + 6)
    assert house.steps(1) == ["issue A", "return A"]
    assert house.scheduler.n_rsrv == 9
    house.add("B", n_output=8)
    house.add("C", n_output=3)
    assert house.steps(1) == ["issue AB", "return AB"]
    assert house.scheduler.n_rsrv == 18
    assert house.steps(1) == ["issue AB", "return AB"]
    house.engine.tokens["A"] = STOP_TOKEN
    house.steps(1)
    assert house.scheduler.n_rsrv == 9
    assert house.steps(1) == ["issue BC", "return BC"]
    assert house.scheduler.n_rsrv == 13


def test_line_4_hands_every_parameter_to_select():
    house = House(max_bs=3, n_slots=39, block_size=8)  # 4 whole blocks
    house.add("A", n_input=30, n_output=1)
    house.steps(1)
    for name in "BCDE":
        house.add(name, n_input=3, n_output=4)  # a block each
    assert house.steps(1) == ["issue BCD", "return BCD"]  # max_bs
    assert house.scheduler.n_rsrv == 24
    house.pool.end_named("B", FinishReason.CANCELLED)
    house.pool.end_named("C", FinishReason.CANCELLED)
    house.add("F", n_input=9, n_output=9)  # 3 blocks, where 2 are left
    assert house.steps(1) == ["issue DE", "return DE"]
    house.engine.tokens["D"] = STOP_TOKEN
    assert house.steps(2) == ["issue DE", "return DE", "issue EF", "return EF"]

    house = House(max_bs=3, n_slots=1000)
    house.add("A", n_input=60)
    house.add("B", n_input=5)  # with A 65 tokens: above max_batch_tokens, 64
    assert house.steps(2) == ["issue A", "return A", "issue AB", "return AB"]


def test_line_5_a_batch_reaches_the_engine_with_rows_and_blocks_and_its_phases():
    house = House(n_slots=64, block_size=4)
    seen: list[list[tuple[RequestState, int]]] = []

    def on_issue(rows: Sequence[Row]) -> None:
        seen.append([(req.state, len(house.kv.blocks_of(req.row))) for req, _ in rows])

    house.engine.on_issue = on_issue
    a = house.add("A", n_output=8)  # 9 tokens: 3 blocks of 4
    house.steps(1)
    house.add("B", n_output=3)  # 4 tokens: 1 block
    row = a.row
    house.steps(2)
    assert a.row == row
    assert seen == [[(INITIATION, 3)], [(INCREMENT, 3), (INITIATION, 1)], [(INCREMENT, 3), (INCREMENT, 1)]]
    assert house.kv.n_free_blocks == 12


def test_line_5_a_batch_s_requests_wait_no_longer():
    house = House()
    for name in "ABC":
        house.add(name)
    house.steps(1)
    assert house.pool.n_waiting == 1
    house.steps(1)
    assert (house.pool.n_waiting, len(house.pool)) == (1, 3)


def test_lines_6_and_7_every_request_of_an_issued_batch_is_running():
    house = House(n_workers=2)
    a, b, c = (house.add(name) for name in "ABC")
    house.steps(1)
    assert [req.state for req in (a, b, c)] == [RUNNING, RUNNING, INITIATION]
    assert [req.n_iterations for req in (a, b, c)] == [1, 1, 0]


def test_line_8_counts_batches():
    house = House(n_workers=3)
    for name in "ABCDEF":
        house.add(name)
    house.steps(1)
    assert house.scheduler.n_scheduled == 1
    house.steps(1)
    assert house.scheduler.n_scheduled == 2


def test_line_9_waits_when_every_worker_has_a_batch_and_not_before():
    house = House(n_workers=3)
    for name in "ABCDEF":
        house.add(name)
    assert house.steps(1) == ["issue AB"]
    assert house.steps(1) == ["issue CD"]
    assert house.steps(1) == ["issue EF", "return AB"]
    assert house.steps(1) == ["issue AB", "return CD"]


def test_line_10_nothing_interrupts_the_wait_when_every_worker_has_a_batch():
    house = House()
    a = house.add("A")

    def on_wait(interrupted: Callable[[], bool]) -> bool:
        house.add("B")
        house.pool.end_named("A", FinishReason.CANCELLED)
        return interrupted()

    house.engine.on_wait = on_wait
    assert house.steps(1) == ["issue A", "return A"]
    assert a.finish_reason is FinishReason.CANCELLED


def test_lines_11_and_12_every_request_of_the_returned_batch_is_in_the_increment_phase():
    house = House(n_workers=2)
    a, b, c = (house.add(name) for name in "ABC")
    assert house.steps(2) == ["issue AB", "issue C", "return AB"]
    assert [req.state for req in (a, b, c)] == [INCREMENT, INCREMENT, RUNNING]
    assert (a.output_ids, b.output_ids, c.output_ids) == ([9], [9], [])


def test_line_13_a_request_finishes_at_max_tokens_or_at_its_stop_token():
    house = House()
    a = house.add("A", n_output=2)
    b = house.add("B", n_output=5)
    house.steps(1)
    assert (a.finish_reason, b.finish_reason) == (None, None)
    house.engine.tokens["B"] = STOP_TOKEN
    house.steps(1)
    assert (a.finish_reason, b.finish_reason) == (FinishReason.LENGTH, FinishReason.STOP)
    assert (a.state, b.state) == (FINISHED, FINISHED)
    assert len(house.pool) == 0
    assert house.delivered() == [
        [("A", 9, None), ("B", 9, None)],
        [("A", 9, FinishReason.LENGTH), ("B", STOP_TOKEN, FinishReason.STOP)],
    ]


def test_line_14_returns_the_reservation_of_what_finished_and_of_nothing_else():
    """Blocks of 4, n_slots 32. A has 3 tokens: 4 slots; B has 9: 12; together 16. A finishes: 12 stay."""
    house = House(n_slots=32, block_size=4)
    a = house.add("A", n_output=2)
    b = house.add("B", n_output=8)
    house.steps(1)
    assert house.scheduler.n_rsrv == 16
    assert house.kv.n_free_blocks == 4
    house.steps(1)
    assert house.scheduler.n_rsrv == 12
    assert (house.kv.n_free_blocks, house.kv.n_free_rows) == (5, 1)
    assert a.row == -1
    assert b.row >= 0


def test_line_14_a_finished_request_s_slots_serve_in_the_very_next_iteration():
    house = House(n_slots=9)
    house.add("A", n_output=8)
    house.add("B", n_output=8)
    house.engine.tokens["A"] = STOP_TOKEN
    assert house.steps(2) == ["issue A", "return A", "issue B", "return B"]


def test_line_15_a_returned_batch_frees_its_worker():
    house = House(n_workers=2)
    for name in "ABCD":
        house.add(name)
    house.steps(2)
    assert house.scheduler.n_scheduled == 1
    assert house.steps(1) == ["issue AB", "return CD"]
    assert house.scheduler.n_scheduled == 1


# What is added to the loop.


def test_a_free_worker_waits_for_the_oldest_return_when_nothing_can_be_selected():
    house = House(n_workers=3)
    house.add("A", n_output=2)
    assert house.steps(1) == ["issue A"]
    assert house.steps(1) == ["return A"]
    assert house.scheduler.n_scheduled == 0
    assert house.steps(2) == ["issue A", "return A"]


def test_a_free_worker_takes_an_arrival_before_the_oldest_return():
    house = House(n_workers=2)
    house.add("A")
    house.steps(1)
    asked: list[bool] = []

    def on_wait(interrupted: Callable[[], bool]) -> bool:
        asked.append(interrupted())
        house.add("B")
        asked.append(interrupted())
        return True

    house.engine.on_wait = on_wait
    assert house.steps(1) == ["interrupted"]
    assert asked == [False, True]
    assert house.scheduler.n_scheduled == 1
    house.engine.on_wait = lambda _: False
    assert house.steps(1) == ["issue B", "return A"]


def test_a_free_worker_hears_that_a_waiting_request_is_asked_to_end():
    """A runs and B waits for slots. When B's user gives up, B ends at once, not when A returns."""
    house = House(n_workers=2, n_slots=9)
    house.add("A")
    house.add("B")
    house.steps(1)

    def on_wait(interrupted: Callable[[], bool]) -> bool:
        house.pool.end_named("B", FinishReason.TIMEOUT)
        return interrupted()

    house.engine.on_wait = on_wait
    assert house.steps(1) == ["interrupted"]
    house.engine.on_wait = lambda _: False
    assert house.steps(1) == ["return A"]
    assert house.delivered()[0] == [("B", None, FinishReason.TIMEOUT)]


def test_an_arrival_while_the_pool_is_looked_at_is_not_missed():
    """A request that comes after Select has looked, but before the wait, is noticed by the wait."""
    house = House(n_workers=2)
    house.add("A")
    house.steps(1)
    view = house.pool.in_arrival_order

    def view_and_arrival() -> InArrivalOrder:
        before = list(view())
        house.add("B")
        return InArrivalOrder(before, lambda: iter(()))

    house.pool.in_arrival_order = view_and_arrival
    house.engine.on_wait = lambda interrupted: interrupted()
    assert house.steps(1) == ["interrupted"]


def test_a_late_cancellation_is_not_missed():
    house = House(n_workers=2, n_slots=9)
    house.add("A")
    house.add("B")
    house.steps(1)
    take_ending = house.pool.take_ending

    def take_and_ask() -> list[tuple[Request, FinishReason]]:
        taken = take_ending()
        house.pool.end_named("B", FinishReason.CANCELLED)
        return taken

    house.pool.take_ending = take_and_ask
    house.engine.on_wait = lambda interrupted: interrupted()
    assert house.steps(1) == ["interrupted"]


def test_a_waiting_request_that_is_asked_to_end_never_runs():
    house = House()
    a = house.add("A")
    house.pool.end_named("A", FinishReason.CANCELLED)
    assert house.scheduler.step() is True  # it ended something
    assert house.engine.log == []
    assert (a.state, a.finish_reason) == (FINISHED, FinishReason.CANCELLED)
    assert house.delivered() == [[("A", None, FinishReason.CANCELLED)]]
    assert house.scheduler.n_rsrv == 0
    assert house.scheduler.step() is False


def test_a_request_asked_to_end_between_iterations_gives_its_slots_back_before_select():
    house = House(n_slots=9)
    a = house.add("A")
    house.add("B")
    house.steps(1)
    house.pool.end_named("A", FinishReason.TIMEOUT)
    assert house.steps(1) == ["issue B", "return B"]
    assert (a.state, a.finish_reason, a.row) == (FINISHED, FinishReason.TIMEOUT, -1)
    assert house.scheduler.n_rsrv == 9


def test_a_running_request_that_is_asked_to_end_ends_when_it_returns_and_its_token_is_dropped():
    house = House(n_workers=2)
    a = house.add("A")
    b = house.add("B")
    house.steps(1)
    house.add("C")
    house.pool.end_named("A", FinishReason.CANCELLED)
    assert house.steps(1) == ["issue C", "return AB"]
    assert (a.state, a.finish_reason, a.output_ids) == (FINISHED, FinishReason.CANCELLED, [])
    assert (b.state, b.output_ids) == (INCREMENT, [9])
    assert house.scheduler.n_rsrv == 18
    assert house.delivered() == [[("A", None, FinishReason.CANCELLED), ("B", 9, None)]]


def test_a_running_request_is_not_touched_before_it_returns():
    house = House(n_workers=3)
    a = house.add("A")
    house.steps(1)
    house.pool.end_named("A", FinishReason.CANCELLED)
    house.add("B")
    assert house.steps(1) == ["issue B"]
    assert a.state is RUNNING
    assert house.scheduler.n_rsrv == 18


def test_all_deliveries_of_an_iteration_go_out_in_one_call():
    house = House(max_bs=4)
    for name in "ABCD":
        house.add(name, n_output=1)
    house.steps(1)
    assert [len(some) for some in house.deliveries] == [4]


def test_the_timeline_hears_of_every_iteration():
    house = House(n_workers=2)
    house.add("A", n_input=3)
    house.add("B")
    house.now = 1.0
    house.steps(1)
    house.now = 2.0
    house.steps(1)
    (iteration,) = house.timeline.iterations
    assert (iteration.issued, iteration.returned) == (1.0, 2.0)
    assert (iteration.request_ids, iteration.input_lengths) == (("A", "B"), (3, 1))
    assert iteration.initiation == (True, True)
    house.add("C", n_output=1)
    house.now = 5.0
    house.steps(1)
    house.now = 6.0
    assert house.engine.log[-1] == "issue AB"  # C waits, as max_bs is 2
    house.steps(1)
    assert [it.initiation for it in house.timeline.iterations] == [(True, True), (False, False), (True,)]
    house.engine.tokens["C"] = 9
    house.steps(1)
    (record,) = house.timeline.requests
    assert (record.request_id, record.arrived, record.finish_reason) == ("C", 2.0, FinishReason.LENGTH)


# When the engine fails.


@pytest.mark.parametrize("at", ["issue", "wait"])
def test_after_a_failure_everything_live_ends_with_an_error_and_all_is_given_back(at: str):
    house = House(n_workers=2)
    requests = [house.add(name) for name in "ABCDE"]
    house.steps(1)

    def failure(_: object) -> Never:
        raise EngineError("lost")

    if at == "issue":
        house.engine.on_issue = failure
    else:
        house.engine.on_wait = failure
    with pytest.raises(EngineError, match="lost"):
        house.scheduler.step()
    fail_all(house.scheduler)
    assert [req.finish_reason for req in requests] == [FinishReason.ERROR] * 5
    assert [req.state for req in requests] == [FINISHED] * 5
    assert house.delivered() == [[(name, None, FinishReason.ERROR) for name in "ABCDE"]]
    assert (house.scheduler.n_rsrv, house.scheduler.n_scheduled, len(house.pool)) == (0, 0, 0)
    assert (house.kv.n_free_blocks, house.kv.n_free_rows) == (64, 4)
    house.engine.on_issue = lambda _: None
    house.engine.on_wait = lambda _: False
    assert house.scheduler.step() is False
    house.add("F")
    house.now = 3.0
    assert house.steps(2) == ["issue F", "return F"]
    assert house.timeline.iterations[-1].returned == 3.0
    assert [it.returned for it in house.timeline.iterations] == [None, None, 3.0]


def test_a_batch_that_could_not_be_issued_keeps_its_reservation_and_runs_again():
    house = House()
    a = house.add("A")
    issue = house.engine.on_issue

    def failure(_: object) -> None:
        raise EngineError("lost")

    house.engine.on_issue = failure
    with pytest.raises(EngineError):
        house.scheduler.step()
    assert (a.state, house.scheduler.n_rsrv, house.scheduler.n_scheduled) == (INITIATION, 9, 0)
    house.engine.on_issue = issue
    assert house.steps(1) == ["issue A", "return A"]
    assert house.scheduler.n_rsrv == 9


class BrokenSink:
    def push(self, token_id: int) -> bool:
        raise ValueError("broken")


def test_a_sink_that_raises_ends_its_own_request_alone():
    house = House(max_bs=3)
    house.add("A", n_output=1)
    b = house.add("B", n_output=2)
    b.sink = BrokenSink()
    house.add("C", n_output=1)
    house.scheduler.step()
    deliveries = [("A", 9, FinishReason.LENGTH), ("B", 9, FinishReason.ERROR), ("C", 9, FinishReason.LENGTH)]
    assert house.delivered() == [deliveries]
    assert b.failure == "ValueError: broken"
    assert (house.scheduler.n_rsrv, len(house.pool)) == (0, 0)


def test_an_engine_that_returns_a_token_too_few_is_found_out():
    house = House()
    house.add("A")
    house.add("B")
    house.engine.wait = lambda iteration, interrupted: Returned([9])
    with pytest.raises(ValueError, match="shorter"):
        house.scheduler.step()


# When a worker is lost, and the engine is brought up again.


def lose(house: House, cause: LossCause = LossCause.FAULT) -> None:
    """Let the engine raise at its next wait."""

    def failure(_: object) -> Never:
        raise WorkerLost(0, "gone")

    house.engine.on_wait = failure
    with pytest.raises(WorkerLost):
        house.steps(9)
    house.engine.on_wait = lambda _: False
    run_again(house.scheduler, cause=cause)


def test_what_was_admitted_goes_back_to_initiation_with_row_blocks_and_reservation():
    house = House(n_workers=2, n_slots=36, block_size=4)
    a, b, c, d, e = (house.add(name, n_input=2, n_output=6) for name in "ABCDE")
    house.steps(3)
    before = [(req.row, house.kv.blocks_of(req.row).tolist()) for req in (a, b, c, d)]
    outputs = [list(req.output_ids) for req in (a, b, c, d)]
    deliveries = house.delivered()
    lose(house)
    assert [(req.row, house.kv.blocks_of(req.row).tolist()) for req in (a, b, c, d)] == before
    assert [req.state for req in (a, b, c, d, e)] == [INITIATION] * 5
    assert [req.output_ids for req in (a, b, c, d)] == outputs
    assert (house.scheduler.n_rsrv, house.scheduler.n_scheduled, e.row) == (32, 0, -1)
    assert house.delivered() == deliveries, "nothing is delivered by it"


def test_a_request_that_runs_again_puts_in_all_its_tokens_and_gets_the_next_one():
    house = House()
    a = house.add("A", n_input=2, n_output=4)
    house.steps(2)
    house.engine.tokens["A"] = 7  # of the iteration that is lost
    lose(house)
    house.engine.tokens["A"] = 8
    assert a.n_to_compute == 4
    assert house.steps(1) == ["issue A", "return A"]
    assert (a.output_ids, a.state, a.n_iterations) == ([9, 9, 8], INCREMENT, 3)
    assert a.n_to_compute == 1
    house.steps(1)
    assert house.delivered() == [
        [("A", 9, None)],
        [("A", 9, None)],
        [("A", 8, None)],
        [("A", 8, FinishReason.LENGTH)],
    ]
    assert [it.input_lengths for it in house.timeline.iterations] == [(2,), (1,), (1,), (4,), (1,)]
    assert [it.returned is None for it in house.timeline.iterations] == [False, False, True, False, False]


def test_resumed_requests_keep_their_order_and_precede_waiting_ones():
    house = House(n_workers=2)
    for name in "ABCDEF":
        house.add(name)
    house.steps(4)
    lose(house)  # with AB and CD in flight: each has to come past that iteration alone
    alone = [event for name in "ABCD" for event in (f"issue {name}", f"return {name}")]
    assert house.steps(8) == alone
    assert house.steps(3) == ["issue AB", "issue CD", "return AB", "issue AB", "return CD"]
    counts = [req.n_iterations for req in house.pool.in_arrival_order()]
    assert counts == sorted(counts, reverse=True)


def test_a_loss_with_nothing_in_flight_makes_no_request_suspect():
    house = House()
    a, b = house.add("A"), house.add("B")
    house.steps(2)
    assert run_again(house.scheduler) == (frozenset(), None)
    assert house.steps(1) == ["issue AB", "return AB"]
    assert (a.n_losses, b.n_losses) == (0, 0)


def test_a_request_that_costs_another_loss_alone_is_ended_and_the_others_go_on():
    house = House(max_bs=3)
    a, b, c = (house.add(name, n_output=4) for name in "ABC")
    house.steps(2)
    lose(house)
    assert house.steps(1) == ["issue A", "return A"]
    lose(house)  # B was alone
    assert b.finish_reason is FinishReason.ERROR
    assert b.failure is not None and b.failure.startswith(
        "a worker was lost 2 times while this request ran, "
    )
    assert house.delivered()[-1] == [("B", None, FinishReason.ERROR)]
    assert house.steps(2) == ["issue C", "return C", "issue AC", "return AC"]
    assert (len(a.output_ids), len(c.output_ids), house.scheduler.n_rsrv) == (4, 4, 0)


@pytest.mark.parametrize(
    ("cause", "n_alone"), [(LossCause.MEMORY, 2), (LossCause.UNKNOWN, 3), (LossCause.OUTSIDE, 4)]
)
def test_losses_that_prove_nothing_end_only_a_request_that_gets_no_token_further(
    cause: LossCause, n_alone: int
):
    house = House(max_bs=3)
    a, b = house.add("A", n_output=9), house.add("B", n_output=9)
    house.steps(2)
    for _ in range(3):  # each time A gets a token further
        lose(house, cause)
        for _ in range(n_alone - 1):
            lose(house, cause)
            assert (a.finish_reason, b.finish_reason) == (None, None)
        assert house.steps(1) == ["issue A", "return A"]
        assert house.steps(1) == ["issue B", "return B"]
        assert house.steps(1) == ["issue AB", "return AB"]
    lose(house, cause)
    for _ in range(n_alone):
        assert a.finish_reason is None
        lose(house, cause)
    assert a.finish_reason is FinishReason.ERROR and b.finish_reason is None
    assert house.steps(1) == ["issue B", "return B"]


def test_one_fault_among_other_losses_ends_no_request():
    house = House(max_bs=3)
    a, b = house.add("A", n_output=30), house.add("B", n_output=30)
    house.steps(2)
    for cause in (LossCause.OUTSIDE, LossCause.FAULT, LossCause.OUTSIDE, LossCause.MEMORY):
        lose(house, cause)
        house.steps(3)
        assert (a.finish_reason, b.finish_reason) == (None, None)
    assert (a.n_losses, a.n_faults) == (4, 1)
    lose(house, LossCause.OUTSIDE)
    lose(house, LossCause.FAULT)  # A was alone, at its second fault
    assert a.finish_reason is FinishReason.ERROR and b.finish_reason is None


def test_a_cancelled_suspect_frees_the_requests_after_it():
    house = House(max_bs=3)
    for name in "ABC":
        house.add(name)
    house.steps(1)
    lose(house)
    house.pool.end_named("A", FinishReason.CANCELLED)
    house.pool.end_named("C", FinishReason.CANCELLED)
    assert house.steps(2) == ["issue B", "return B", "issue B", "return B"]


def test_with_each_loss_more_a_suspect_runs_alone_for_longer():
    house = House(max_bs=3, n_slots=300)
    a, b = (house.add(name, n_output=60) for name in "AB")
    lose(house)
    assert house.steps(2) == ["issue A", "return A", "issue B", "return B"]
    house.steps(1)
    for n_alone in (1 + 4, 1 + 16):  # the iteration that was lost, and more
        lose(house)
        for name in "AB":
            assert house.steps(n_alone) == [f"issue {name}", f"return {name}"] * n_alone
        assert house.steps(1) == ["issue AB", "return AB"]
    assert (a.n_losses, b.n_losses) == (3, 3)


def test_alone_means_that_no_other_is_in_flight():
    """With overlap, a request that has passed its place still has another iteration in flight."""
    house = House(max_bs=2, overlap=True)
    house.add("A", n_output=9)
    house.add("B", n_output=9)
    house.steps(2)
    lose(house)
    events = house.steps(12)
    for before, event in pairwise(events):
        if event == "issue B":
            assert before in ("return A", "issue B", "return B")
    assert "issue AB" in events


def test_no_more_run_again_at_once_than_max_batch_tokens_allows():
    house = House(max_bs=4, n_slots=300)
    a, b, c = (house.add(name, n_input=20, n_output=20) for name in "ABC")
    house.steps(5)
    assert [len(req.output_ids) for req in (a, b, c)] == [5, 5, 5]
    run_again(house.scheduler)  # with nothing in flight
    assert house.steps(1) == ["issue AB", "return AB"], "75 tokens are more than 64"
    assert house.steps(1) == ["issue ABC", "return ABC"]
    assert [len(req.output_ids) for req in (a, b, c)] == [7, 7, 6]


def test_what_was_asked_to_end_ends_when_it_is_lost():
    house = House()
    a, b = house.add("A"), house.add("B")
    wait = house.engine.on_wait

    def asks(interrupted: Callable[[], bool]) -> bool:
        house.pool.end_named("A", FinishReason.CANCELLED)
        return wait(interrupted)

    house.engine.on_wait = asks
    house.steps(1)
    house.pool.add(c := make_request("C"))
    house.steps(1)
    house.pool.end_named("B", FinishReason.TIMEOUT)
    n_deliveries = len(house.delivered())
    lose(house)
    assert a.finish_reason is FinishReason.CANCELLED
    assert b.finish_reason is FinishReason.TIMEOUT
    assert house.delivered()[n_deliveries:] == [[("B", None, FinishReason.TIMEOUT)]]
    assert (c.state, house.scheduler.n_rsrv) == (INITIATION, 9)
    assert house.pool.take_ending() == []


def test_a_request_that_was_running_when_asked_to_end_ends_when_it_is_lost():
    house = House()
    a = house.add("A")

    def failure(_: object) -> Never:
        house.pool.end_named("A", FinishReason.CANCELLED)
        raise WorkerLost(0, "gone")

    house.engine.on_wait = failure
    with pytest.raises(WorkerLost):
        house.scheduler.step()
    run_again(house.scheduler)
    assert (a.state, a.row, a.output_ids) == (FINISHED, -1, [])
    assert house.delivered() == [[("A", None, FinishReason.CANCELLED)]]
    assert house.scheduler.step() is False


def test_requests_that_wait_are_not_touched_by_a_loss():
    house = House(max_bs=1)
    house.add("A")
    b = house.add("B")
    house.steps(1)
    lose(house)
    assert (b.state, b.row, b.n_iterations, house.pool.n_waiting) == (INITIATION, -1, 0, 1)


def test_a_cancellation_while_nothing_can_run_is_delivered_at_once():
    house = House()
    house.add("A")
    house.add("B")
    assert house.scheduler.end_cancelled() is False
    house.pool.end_named("B", FinishReason.TIMEOUT)
    assert house.scheduler.end_cancelled() is True
    assert house.delivered() == [[("B", None, FinishReason.TIMEOUT)]]


# The paper's figures.


def batches(simulation: Simulation) -> list[str]:
    return ["".join(it.request_ids) for it in simulation.timeline.iterations]


def test_figure_8a_three_workers_are_kept_busy_by_three_batches():
    """Six requests A to F of four tokens each, max_bs 2, a unit of time for each of the three stages."""
    config = ServingConfig(max_batch_size=2, n_slots=100, block_size=1, max_batch_tokens=100, overlap=False)
    simulation = Simulation(config, n_workers=3, duration=lambda _: 3.0)
    for name in "ABCDEF":
        simulation.add_at(0.0, make_request(name, n_output=4))
    timeline = simulation.run()
    assert batches(simulation) == ["AB", "CD", "EF"] * 4
    # From the first return on there is one in every unit of time: no stage idles, nothing is cut up.
    assert [it.returned for it in timeline.iterations] == [3.0 + i for i in range(12)]


def test_figures_3_and_5_a_finished_request_leaves_at_once_and_a_late_one_enters_at_once():
    """x1 generates three tokens, x2 one; x3 comes while the first iteration runs, with max_bs 2."""
    config = ServingConfig(max_batch_size=2, n_slots=100, block_size=1, max_batch_tokens=100, overlap=False)
    simulation = Simulation(config)
    simulation.add_at(0.0, make_request("1", n_input=2, n_output=3))
    simulation.add_at(0.0, make_request("2", n_input=2, n_output=1))
    simulation.add_at(0.5, make_request("3", n_input=3, n_output=2))
    timeline = simulation.run()
    assert batches(simulation) == ["12", "13", "13"]
    assert [(record.request_id, record.finished) for record in timeline.requests] == [
        ("2", 1.0),
        ("1", 3.0),
        ("3", 3.0),
    ]
    assert [it.initiation for it in timeline.iterations] == [(True, True), (False, True), (False, False)]


def test_figure_4_four_requests_of_both_phases_make_seven_tokens():
    """x1 and x2 are in the increment phase when x3 with two tokens and x4 with three come: 1 + 1 + 2 + 3."""
    config = ServingConfig(max_batch_size=4, n_slots=100, block_size=1, max_batch_tokens=100, overlap=False)
    simulation = Simulation(config)
    simulation.add_at(0.0, make_request("1", n_input=3))
    simulation.add_at(0.0, make_request("2", n_input=1))
    simulation.add_at(0.5, make_request("3", n_input=2))
    simulation.add_at(0.6, make_request("4", n_input=3))
    second = simulation.run().iterations[1]
    assert second.request_ids == ("1", "2", "3", "4")
    assert second.input_lengths == (1, 1, 2, 3)
    assert second.n_tokens == 7


def test_iterations_with_max_bs_3_worked_by_hand():
    """Output tokens A 3, B 1, C 2, D 1, E 2; A, B at 0, C, D, E at 0.5, 0.6 and 1.5; slots for all.

    1: A B. 2: A C D (B is done). 3: A C E (D is done; E came at 1.5). 4: E (A and C are done).
    """
    config = ServingConfig(max_batch_size=3, n_slots=100, block_size=1, max_batch_tokens=100, overlap=False)
    simulation = Simulation(config)
    for time, name, n_output in [(0, "A", 3), (0, "B", 1), (0.5, "C", 2), (0.6, "D", 1), (1.5, "E", 2)]:
        simulation.add_at(time, make_request(name, n_output=n_output))
    simulation.run()
    assert batches(simulation) == ["AB", "ACD", "ACE", "E"]


def test_slots_worked_by_hand_over_a_whole_serving():
    """n_slots 10, blocks of 2. A: 1 in, 2 out: 4 slots. B: 1 in, 3 out: 4. C: 4. D: 1 in, 1 out: 2.

    A and B hold 8, and C would make 12; D's 2 would fit, but may not overtake C. After iteration 2 A is done:
    B, C and D hold 10. D is done in iteration 3, as B is; C has one more.
    """
    config = ServingConfig(max_batch_size=4, n_slots=10, block_size=2, max_batch_tokens=100, overlap=False)
    simulation = Simulation(config)
    for name, n_output in [("A", 2), ("B", 3), ("C", 2), ("D", 1)]:
        simulation.add_at(0.0, make_request(name, n_output=n_output))
    reserved: list[int] = []
    for _ in simulation.steps():
        reserved.append(simulation.scheduler.n_rsrv)
    assert batches(simulation) == ["AB", "AB", "BCD", "C"]
    assert reserved == [8, 4, 4, 0]
