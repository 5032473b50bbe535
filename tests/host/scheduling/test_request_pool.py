"""The request pool: order, ends, waiting, and refusals."""

import threading
from collections.abc import Callable
from functools import partial

import pytest

from orca_jax.config import ORCA, SchedulingConfig, ServingConfig
from orca_jax.errors import (
    EmptyPrompt,
    InvalidRequest,
    OrcaError,
    PromptTooLong,
    QueueFull,
    RequestTooLarge,
    ServiceClosed,
    TokenOutOfRange,
)
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.admission import admissible
from orca_jax.scheduling.request_pool import Delivery, RequestPool
from orca_jax.scheduling.select import select
from tests.gpt_config import gpt_config

CANCELLED, TIMEOUT = FinishReason.CANCELLED, FinishReason.TIMEOUT


def make_request(
    name: str, *, prompt_ids: tuple[int, ...] = (5,), n_output: int = 3, max_tokens: int | None = None
) -> Request:
    return Request(
        request_id=name,
        prompt_ids=prompt_ids,
        max_tokens=len(prompt_ids) + n_output if max_tokens is None else max_tokens,
        sampling=SamplingParams(max_tokens=n_output),
        seed=0,
    )


def make_pool(*, max_waiting: int = 100, check: Callable[[Request], None] = lambda _: None) -> RequestPool:
    return RequestPool(max_waiting=max_waiting, check=check, on_deliveries=lambda _: None)


def filled(names: str, *, n_admitted: int = 0) -> tuple[RequestPool, list[Request]]:
    pool = make_pool()
    requests = [make_request(name) for name in names]
    for request in requests:
        pool.add(request)
    pool.admit(requests[:n_admitted])
    return pool, requests


def names(pool: RequestPool) -> str:
    return "".join(request.request_id for request in pool.in_arrival_order())


def test_arrival_numbers_count_up():
    pool, requests = filled("CAB")
    assert [request.arrival for request in requests] == [0, 1, 2]
    assert names(pool) == "CAB"
    assert len(pool) == pool.n_waiting == 3


def test_admitted_requests_stand_before_waiting_ones():
    pool, requests = filled("ABCDE", n_admitted=2)
    assert names(pool) == "ABCDE"
    assert (len(pool), pool.n_waiting) == (5, 3)
    pool.admit(requests[2:4])
    assert names(pool) == "ABCDE"
    assert pool.n_waiting == 1


def test_only_waiting_requests_may_be_admitted():
    pool, requests = filled("ABC", n_admitted=1)
    with pytest.raises(KeyError):
        pool.admit([requests[0]])


@pytest.mark.parametrize("order", [(2, 1), (1, 2)])
def test_preempted_requests_wait_in_their_place(order: tuple[int, int]):
    pool, requests = filled("ABCDE", n_admitted=3)
    for i in order:
        pool.preempt(requests[i])
    assert names(pool) == "ABCDE"
    assert (len(pool), pool.n_waiting) == (5, 4)
    pool.admit(requests[1:2])
    assert names(pool) == "ABCDE"
    assert pool.n_waiting == 3


@pytest.mark.parametrize("n_admitted", [0, 2, 5])
@pytest.mark.parametrize("name", "ABCDE")
def test_a_request_may_be_removed_from_anywhere(name: str, n_admitted: int):
    pool, requests = filled("ABCDE", n_admitted=n_admitted)
    pool.remove(requests["ABCDE".index(name)])
    assert names(pool) == "ABCDE".replace(name, "")
    assert len(pool) == 4
    assert pool.end_named(name, CANCELLED) is False


@pytest.mark.parametrize("n", [1, 7, 8, 9, 23, 24, 25, 1000])
def test_the_view_reads_every_waiting_request_once(n: int):
    pool = make_pool(max_waiting=n)
    for i in range(n):
        pool.add(make_request(str(i)))
    assert [request.arrival for request in pool.in_arrival_order()] == list(range(n))


def test_a_request_that_is_added_while_the_view_is_read_is_seen_or_waits_for_the_next():
    pool, _ = filled("ABC", n_admitted=1)
    seen = ""
    for request in pool.in_arrival_order():
        seen += request.request_id
        if request.request_id in "AC":
            pool.add(make_request("D" if request.request_id == "A" else "E"))
    assert seen[:4] == "ABCD"
    assert names(pool) == "ABCDE"


def test_select_takes_the_view_as_it_is():
    pool, requests = filled("ABCD", n_admitted=1)
    assert select(pool.in_arrival_order(), 0, max_bs=3, n_slots=100) == (requests[:3], 12)


def test_a_full_queue_refuses_and_counts_only_waiting_requests():
    pool = make_pool(max_waiting=2)
    a, b = make_request("A"), make_request("B")
    pool.add(a)
    pool.add(b)
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        pool.add(make_request("C"))
    pool.admit([a])
    pool.add(make_request("D"))
    assert names(pool) == "ABD"
    assert [request.arrival for request in pool.in_arrival_order()] == [0, 1, 2]


@pytest.mark.parametrize("n_admitted", [0, 1])
def test_an_id_may_be_used_again_only_after_its_request_has_ended(n_admitted: int):
    pool, (a,) = filled("A", n_admitted=n_admitted)
    with pytest.raises(InvalidRequest, match="'A'") as info:
        pool.add(make_request("A"))
    assert info.value.param == "request_id"
    pool.remove(a)
    pool.add(make_request("A"))
    assert names(pool) == "A"


def test_a_refused_request_leaves_no_trace():
    def check(request: Request) -> None:
        raise EmptyPrompt("no", param="prompt")

    arrived: list[Request] = []
    pool = RequestPool(max_waiting=1, check=check, on_arrival=arrived.append, on_deliveries=lambda _: None)
    before = pool.activity()
    with pytest.raises(EmptyPrompt):
        pool.add(make_request("A"))
    assert (len(pool), pool.activity(), arrived) == (0, before, [])


def test_an_arrival_is_reported_before_the_request_is_visible():
    pool = RequestPool(
        max_waiting=1,
        on_arrival=lambda request: arrivals.append((request.request_id, request.arrival, len(pool))),
        on_deliveries=lambda _: None,
    )
    arrivals: list[tuple[str, int, int]] = []
    pool.add(make_request("A"))
    assert arrivals == [("A", 0, 0)]


def test_a_closed_pool_refuses_and_keeps_what_is_live():
    pool, _ = filled("A")
    pool.close()
    with pytest.raises(ServiceClosed):
        pool.add(make_request("B"))
    assert names(pool) == "A"
    assert pool.end_named("A", CANCELLED) is True


# Ends.


@pytest.mark.parametrize("n_admitted", [0, 1])
def test_the_first_reason_to_end_counts_and_is_taken_once(n_admitted: int):
    pool, (a, _) = filled("AB", n_admitted=n_admitted)
    assert pool.take_ending() == []
    assert pool.end_named("A", TIMEOUT) is True
    assert pool.end_named("A", CANCELLED) is True
    assert a.ending is TIMEOUT
    assert pool.take_ending() == [(a, TIMEOUT)]
    assert pool.take_ending() == []
    assert pool.end_named("A", CANCELLED) is True  # still live: a RUNNING request ends when it returns
    assert (a.ending, pool.take_ending()) == (TIMEOUT, [])


def test_nothing_of_that_id_is_live():
    pool, (a,) = filled("A")
    assert pool.end_named("B", CANCELLED) is False
    pool.remove(a)
    assert pool.end_named("A", CANCELLED) is False
    assert a.ending is None
    assert pool.take_ending() == []


def test_a_request_that_ended_by_itself_is_not_taken_any_more():
    pool, (a, b) = filled("AB")
    pool.end_named("A", CANCELLED)
    pool.end_named("B", CANCELLED)
    pool.remove(a)
    assert pool.take_ending() == [(b, CANCELLED)]


# Activity and waiting.


def test_activity_grows_with_arrivals_and_asked_ends():
    pool, (a,) = filled("A")
    counts = [pool.activity()]
    pool.add(make_request("B"))
    counts.append(pool.activity())
    pool.end_named("A", CANCELLED)
    counts.append(pool.activity())
    assert counts == sorted(set(counts))
    pool.end_named("A", CANCELLED)  # no news
    pool.end_named("X", CANCELLED)
    pool.admit([a])
    pool.remove(a)
    assert pool.activity() == counts[-1]


def test_waiting_for_work_ends_at_once_while_a_request_is_live():
    pool, requests = filled("A")
    assert pool.wait_for_work(timeout=60) is True
    pool.admit(requests)
    assert pool.wait_for_work(timeout=60) is True
    pool.remove(requests[0])
    assert pool.wait_for_work(timeout=0.001) is False


@pytest.mark.parametrize("how", ["add", "close"])
def test_a_waiting_thread_is_woken(how: str):
    pool = make_pool()
    result: list[bool] = []
    waiting = threading.Thread(target=lambda: result.append(pool.wait_for_work(timeout=60)), daemon=True)
    waiting.start()
    if how == "add":
        pool.add(make_request("A"))
    else:
        pool.close()
    waiting.join(30)
    assert result == [how == "add"]


# Deliveries.


def test_deliveries_go_out_in_one_call_and_none_makes_no_call():
    calls: list[list[Delivery]] = []
    pool = RequestPool(max_waiting=1, on_deliveries=lambda some: calls.append(list(some)))
    a = make_request("A")
    pool.deliver([])
    pool.deliver([(a, 1, None), (a, 0, CANCELLED)])
    assert calls == [[(a, 1, None), (a, 0, CANCELLED)]]


# What can never run is refused.

MODEL = gpt_config(vocab_size=50, n_positions=32, hidden_size=8, n_layers=1, n_heads=2, ffn_size=8)


def config(
    *,
    n_slots: int = 1000,
    block_size: int = 1,
    max_batch_tokens: int = 100,
    scheduling: SchedulingConfig = ORCA,
) -> ServingConfig:
    return ServingConfig(
        max_batch_size=4,
        n_slots=n_slots,
        block_size=block_size,
        max_batch_tokens=max_batch_tokens,
        scheduling=scheduling,
    )


WHOLE_PROMPTS = SchedulingConfig(chunked_prefill=False)


def ids(n: int, *last: int) -> tuple[int, ...]:
    return (5,) * n + last


@pytest.mark.parametrize(
    "request_, serving, error, words",
    [
        (make_request("A", prompt_ids=()), config(), EmptyPrompt, "no token"),
        (make_request("A", prompt_ids=ids(3, 50)), config(), TokenOutOfRange, "token id 50 .* 0 to 49"),
        (make_request("A", prompt_ids=ids(3, -1)), config(), TokenOutOfRange, "token id -1"),
        (make_request("A", prompt_ids=ids(32)), config(), PromptTooLong, "has 32 tokens.*at most 31"),
        (make_request("A", prompt_ids=ids(33)), config(), PromptTooLong, "has 33 tokens"),
        (
            make_request("A", prompt_ids=ids(30), n_output=3),
            config(),
            RequestTooLarge,
            "30 input and 3 output.*positions allow 32 together.*at most 2",
        ),
        (
            make_request("A", prompt_ids=ids(10), n_output=7),
            config(n_slots=19, block_size=8),
            RequestTooLarge,
            "n_slots in whole blocks allow 16 together; ask for at most 6",
        ),
        (
            make_request("A", prompt_ids=ids(16), n_output=1),
            config(n_slots=19, block_size=8),
            RequestTooLarge,
            "shorten the prompt",
        ),
        (
            make_request("A", prompt_ids=ids(4), n_output=8),
            config(max_batch_tokens=10),
            RequestTooLarge,
            "max_batch_tokens without chunked_prefill allow 11 together",
        ),
        (
            make_request("A", prompt_ids=ids(4), n_output=8),
            config(max_batch_tokens=10, scheduling=WHOLE_PROMPTS),
            RequestTooLarge,
            "max_batch_tokens without chunked_prefill allow 11 together",
        ),
        (
            make_request("A", prompt_ids=ids(30), n_output=3),
            config(max_batch_tokens=10, scheduling=SchedulingConfig()),
            RequestTooLarge,
            "positions allow 32 together",
        ),
    ],
)
def test_what_can_never_run_is_refused_when_it_is_added(
    request_: Request, serving: ServingConfig, error: type[OrcaError], words: str
):
    pool = make_pool(check=partial(admissible, config=serving, model=MODEL))
    with pytest.raises(error, match=words) as info:
        pool.add(request_)
    assert isinstance(info.value, InvalidRequest)
    assert info.value.param == ("max_tokens" if error is RequestTooLarge else "prompt")
    assert len(pool) == 0


def test_a_request_without_room_for_output_fails_an_assertion():
    with pytest.raises(AssertionError, match="input and output"):
        admissible(make_request("A", n_output=1, max_tokens=1), config=config(), model=MODEL)


@pytest.mark.parametrize(
    "request_, serving",
    [
        (make_request("A", prompt_ids=(0, 49), n_output=30), config()),
        (make_request("A", prompt_ids=ids(31), n_output=1), config()),
        (make_request("A", prompt_ids=ids(10), n_output=6), config(n_slots=19, block_size=8)),
        (make_request("A", prompt_ids=ids(4), n_output=7), config(max_batch_tokens=10)),
    ],
)
def test_what_just_fits_is_taken_and_can_be_selected(request_: Request, serving: ServingConfig):
    pool = make_pool(check=partial(admissible, config=serving, model=MODEL))
    pool.add(request_)
    batch, _ = select(
        pool.in_arrival_order(),
        0,
        max_bs=1,
        n_slots=serving.n_slots,
        max_batch_tokens=serving.max_batch_tokens,
        block_size=serving.block_size,
    )
    assert batch == [request_]


@pytest.mark.parametrize("n_input, n_output", [(4, 8), (11, 1), (31, 1), (1, 31)])
def test_with_chunked_prefill_a_request_may_exceed_an_iteration(n_input: int, n_output: int):
    """The prompt, and after a preemption or a loss all tokens, are computed in chunks."""
    serving = config(max_batch_tokens=10, scheduling=SchedulingConfig())
    pool = make_pool(check=partial(admissible, config=serving, model=MODEL))
    pool.add(make_request("A", prompt_ids=ids(n_input), n_output=n_output))
    assert len(pool) == 1


def test_asking_for_the_end_of_a_request_does_not_touch_its_successor():
    pool, (first,) = filled("A")
    pool.remove(first)
    second = make_request("A")
    pool.add(second)
    assert pool.end(first, CANCELLED) is False
    assert second.ending is None
    assert pool.take_ending() == []
    assert pool.end(second, TIMEOUT) is True
    assert pool.take_ending() == [(second, TIMEOUT)]


# One owner's share, and the queue's bound in bytes.


def owned(name: str, owner: str, weight: int = 0) -> Request:
    request = make_request(name)
    request.owner, request.weight = owner, weight
    return request


def shared_pool(*, max_bytes: int = 1 << 30) -> RequestPool:
    return RequestPool(max_waiting=8, max_each=3, max_bytes=max_bytes, on_deliveries=lambda _: None)


def test_one_owner_has_a_share_of_the_queue_and_the_others_the_rest():
    pool = shared_pool()
    greedy = [owned(f"g{i}", "greedy") for i in range(3)]
    for request in greedy:
        pool.add(request)
    message = "3 requests from this API key or address are waiting, its share of the queue; "
    with pytest.raises(QueueFull, match=message):
        pool.add(owned("g3", "greedy"))
    for i in range(3):
        pool.add(owned(f"m{i}", "modest"))
    pool.add(make_request("nobody's"))
    pool.admit(greedy[:1])  # what runs does not count
    pool.add(owned("g3", "greedy"))
    with pytest.raises(QueueFull, match="3 requests from this"):
        pool.add(owned("g4", "greedy"))
    pool.remove(greedy[2])  # nor what ended while it waited
    pool.add(owned("g4", "greedy"))
    with pytest.raises(QueueFull, match="the queue is full: 8 requests are waiting"):
        [pool.add(owned(f"o{i}", "other")) for i in range(9)]


def test_the_queue_is_bounded_in_bytes_as_well():
    pool = shared_pool(max_bytes=8_000)  # 3,000 for each owner
    pool.add(owned("A", "greedy", 2_000))
    with pytest.raises(QueueFull, match="1 requests of 2000 bytes from this API key or address"):
        pool.add(owned("B", "greedy", 1_001))
    pool.add(owned("C", "modest", 5_000))  # larger than its share: alone it may wait, or it could never run
    with pytest.raises(QueueFull, match="the queue is full: 2 requests of 7000 bytes are waiting"):
        pool.add(owned("D", "third", 1_001))
    pool.add(owned("D", "third", 1_000))


def test_owners_without_requests_leave_no_trace():
    pool = shared_pool()
    for i in range(1_000):
        request = owned(str(i), f"owner {i}", 10)
        pool.add(request)
        if i % 2:
            pool.admit([request])
        pool.remove(request)
    assert not pool._usage_of
    assert (pool._usage.n, pool._usage.n_bytes) == (0, 0)


def test_a_request_whose_arrival_callback_fails_takes_no_room():
    def fail(_: Request) -> None:
        raise RuntimeError("nobody hears")

    pool = RequestPool(max_waiting=1, on_arrival=fail, on_deliveries=lambda _: None)
    for name in "AB":
        with pytest.raises(RuntimeError, match="nobody hears"):
            pool.add(owned(name, "mine", 10))
    assert len(pool) == pool._usage.n == pool._usage.n_bytes == len(pool._usage_of) == 0
