"""The timeline: what happened when."""

import pytest

from orca_jax.buckets import bucket_sizes
from orca_jax.request import FinishReason, Request, RequestState, SamplingParams
from orca_jax.request_pool import Delivery
from orca_jax.timeline import Timeline


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_request(name: str, *, n_input: int = 1, state: RequestState = RequestState.INITIATION) -> Request:
    return Request(
        request_id=name,
        prompt_ids=(5,) * n_input,
        max_tokens=n_input + 3,
        sampling=SamplingParams(max_tokens=3),
        seed=0,
        state=state,
    )


def test_a_request_from_arrival_to_end(clock: Clock):
    timeline = Timeline(clock)
    a = make_request("A", n_input=4)
    clock.now = 1.0
    timeline.arrived(a)
    for time, token_id, reason in [(3.0, 7, None), (4.0, 8, None), (6.0, 9, FinishReason.LENGTH)]:
        assert not timeline.requests
        clock.now = time
        timeline.delivered([Delivery(a, token_id, reason)])
    (record,) = timeline.requests
    assert (record.request_id, record.n_input, record.n_output) == ("A", 4, 3)
    assert (record.arrived, list(record.token_times), record.finished) == (1.0, [3.0, 4.0, 6.0], 6.0)
    assert record.finish_reason is FinishReason.LENGTH
    assert record.time_to_first_token == 2.0
    assert record.normalized_latency == pytest.approx(5.0 / 3)


def test_a_request_that_ends_without_a_token(clock: Clock):
    timeline = Timeline(clock)
    a = make_request("A")
    timeline.arrived(a)
    clock.now = 2.0
    timeline.delivered([Delivery(a, None, FinishReason.CANCELLED)])
    (record,) = timeline.requests
    assert (record.n_output, record.finished) == (0, 2.0)
    assert record.time_to_first_token is None
    assert record.normalized_latency is None


def test_normalized_latency_is_known_at_the_end_only(clock: Clock):
    timeline = Timeline(clock)
    a, b = make_request("A"), make_request("B")
    timeline.arrived(a)
    timeline.arrived(b)
    clock.now = 2.0
    timeline.delivered([Delivery(a, 7, None), Delivery(b, 8, FinishReason.STOP)])
    (record,) = timeline.requests  # A is not among the finished ones
    assert record.request_id == "B"
    record.finished = None
    assert record.normalized_latency is None


def test_an_id_may_come_again(clock: Clock):
    timeline = Timeline(clock)
    for time in (0.0, 5.0):
        clock.now = time
        a = make_request("A")
        timeline.arrived(a)
        timeline.delivered([Delivery(a, 7, FinishReason.STOP)])
    assert [record.arrived for record in timeline.requests] == [0.0, 5.0]


def test_iterations_with_phases_tokens_bucket_and_padding(clock: Clock):
    timeline = Timeline(clock, bucket_sizes=bucket_sizes(128))
    a = make_request("A", state=RequestState.INCREMENT)
    b = make_request("B", n_input=9)
    clock.now = 1.0
    timeline.issued([a, b], [1, 9])
    clock.now = 2.0
    timeline.issued([make_request("C")], [1])
    clock.now = 4.0
    timeline.returned()
    first, second = timeline.iterations
    assert (first.number, first.issued, first.returned) == (0, 1.0, 4.0)
    assert (first.request_ids, first.initiation, first.input_lengths) == (("A", "B"), (False, True), (1, 9))
    assert (first.n_rows, first.n_tokens, first.bucket, first.padding) == (2, 10, 16, 6)
    assert (second.number, second.issued, second.returned) == (1, 2.0, None)
    assert (second.n_rows, second.bucket, second.padding) == (1, 1, 0)


def test_without_buckets_nothing_is_padded(clock: Clock):
    timeline = Timeline(clock)
    timeline.issued([make_request("A", n_input=9)], [9])
    assert (timeline.iterations[0].bucket, timeline.iterations[0].padding) == (9, 0)


def test_lost_iterations_stay_on_record_and_never_return(clock: Clock):
    timeline = Timeline(clock)
    timeline.issued([make_request("A")], [1])
    timeline.issued([make_request("B")], [1])
    timeline.lost()
    timeline.issued([make_request("C")], [1])
    clock.now = 3.0
    timeline.returned()
    assert [iteration.returned for iteration in timeline.iterations] == [None, None, 3.0]


@pytest.mark.parametrize("max_records, kept", [(3, [7, 8, 9]), (None, list(range(10)))])
def test_only_the_youngest_records_are_kept(clock: Clock, max_records: int | None, kept: list[int]):
    timeline = Timeline(clock, max_records=max_records)
    for i in range(10):
        request = make_request(str(i))
        timeline.arrived(request)
        timeline.issued([request], [1])
        timeline.returned()
        timeline.delivered([Delivery(request, 7, FinishReason.STOP)])
    assert [iteration.number for iteration in timeline.iterations] == kept
    assert [int(record.request_id) for record in timeline.requests] == kept
