"""The timeline records each event with its time."""

import itertools
from array import array
from collections.abc import Iterable, Sequence

import pytest

from orca_jax.iteration.shape import bucket_sizes
from orca_jax.request.request import FinishReason, Request, RequestState
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.timeline import (
    Interruption,
    IterationRecord,
    RequestRecord,
    Timeline,
    TimelineObserver,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


ARRIVALS = itertools.count()


def make_request(name: str, *, n_input: int = 1, state: RequestState = RequestState.INITIATION) -> Request:
    return Request(
        request_id=name,
        prompt_ids=(5,) * n_input,
        max_tokens=n_input + 3,
        sampling=SamplingParams(max_tokens=3),
        seed=0,
        arrival=next(ARRIVALS),
        state=state,
    )


def test_a_request_from_arrival_to_end(clock: Clock):
    timeline = Timeline(clock)
    a = make_request("A", n_input=4)
    clock.now = 1.0
    timeline.arrived(a)
    for time, n_new, reason in [(3.0, 1, None), (4.0, 2, None), (6.0, 1, FinishReason.LENGTH)]:
        assert not timeline.requests
        clock.now = time
        timeline.delivered([(a, n_new, reason)])
    (record,) = timeline.requests
    assert (record.request_id, record.n_input, record.n_output) == ("A", 4, 4)
    assert (record.arrived, list(record.token_times), record.finished) == (1.0, [3.0, 4.0, 4.0, 6.0], 6.0)
    assert record.finish_reason is FinishReason.LENGTH
    assert record.time_to_first_token == 2.0
    assert record.normalized_latency == pytest.approx(5.0 / 4)


def test_interruptions_end_when_the_request_runs_again(clock: Clock):
    timeline = Timeline(clock)
    a, b = make_request("A", n_input=4), make_request("B")
    timeline.arrived(a)
    timeline.arrived(b)
    timeline.issued([(a, 4), (b, 1)])
    clock.now = 2.0
    timeline.interrupted([a], "preempted")
    clock.now = 3.0
    timeline.issued([(b, 1)])
    clock.now = 4.0
    timeline.issued([(a, 2)])
    clock.now = 5.0
    timeline.issued([(a, 2)])  # the rest of its prompt
    clock.now = 6.0
    timeline.interrupted([a, b], "worker lost")
    timeline.delivered([(a, 0, FinishReason.CANCELLED), (b, 1, FinishReason.LENGTH)])
    of_a, of_b = timeline.requests
    assert of_a.interruptions == (Interruption(2.0, "preempted", 4.0), Interruption(6.0, "worker lost"))
    assert of_b.interruptions == (Interruption(6.0, "worker lost"),)
    assert of_a.scheduled == 0.0


def test_a_request_that_ends_without_a_token(clock: Clock):
    timeline = Timeline(clock)
    a = make_request("A")
    timeline.arrived(a)
    clock.now = 2.0
    timeline.delivered([(a, 0, FinishReason.CANCELLED)])
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
    timeline.delivered([(a, 1, None), (b, 1, FinishReason.STOP)])
    (record,) = timeline.requests  # A is not among the finished ones
    assert record.request_id == "B"
    record.finished = None
    assert record.normalized_latency is None


def test_an_id_can_be_reused(clock: Clock):
    timeline = Timeline(clock)
    for time in (0.0, 5.0):
        clock.now = time
        a = make_request("A")
        timeline.arrived(a)
        timeline.delivered([(a, 1, FinishReason.STOP)])
    assert [record.arrived for record in timeline.requests] == [0.0, 5.0]


def test_iterations_with_phases_tokens_bucket_and_padding(clock: Clock):
    timeline = Timeline(clock, bucket_sizes=bucket_sizes(128))
    a = make_request("A", state=RequestState.INCREMENT)
    b = make_request("B", n_input=9)
    c = make_request("C")
    for request in (a, b, c):
        timeline.arrived(request)
    clock.now = 1.0
    issued = timeline.issued([(a, 1), (b, 9)])
    clock.now = 2.0
    timeline.issued([(c, 1)])
    clock.now = 4.0
    timeline.returned(issued)
    first, second = timeline.iterations
    assert (first.number, first.issued, first.returned) == (0, 1.0, 4.0)
    assert (first.request_ids, first.initiation, first.input_lengths) == (("A", "B"), (False, True), (1, 9))
    assert (first.n_rows, first.n_tokens, first.bucket, first.padding) == (2, 10, 16, 6)
    assert (second.number, second.issued, second.returned) == (1, 2.0, None)
    assert (second.n_rows, second.bucket, second.padding) == (1, 1, 0)


def test_without_buckets_nothing_is_padded(clock: Clock):
    timeline = Timeline(clock)
    a = make_request("A", n_input=9)
    timeline.arrived(a)
    timeline.issued([(a, 9)])
    assert (timeline.iterations[0].bucket, timeline.iterations[0].padding) == (9, 0)


def test_lost_iterations_stay_on_record_and_never_return(clock: Clock):
    timeline = Timeline(clock)
    a, b, c = requests = [make_request(name) for name in "ABC"]
    for request in requests:
        timeline.arrived(request)
    timeline.issued([(a, 1)])
    timeline.issued([(b, 1)])
    clock.now = 3.0
    timeline.returned(timeline.issued([(c, 1)]))
    assert [iteration.returned for iteration in timeline.iterations] == [None, None, 3.0]


@pytest.mark.parametrize("max_records, kept", [(3, [7, 8, 9]), (None, list(range(10)))])
def test_only_the_youngest_records_are_kept(clock: Clock, max_records: int | None, kept: list[int]):
    timeline = Timeline(clock, max_records=max_records)
    for i in range(10):
        request = make_request(str(i))
        timeline.arrived(request)
        timeline.returned(timeline.issued([(request, 1)]))
        timeline.delivered([(request, 1, FinishReason.STOP)])
    assert [iteration.number for iteration in timeline.iterations] == kept
    assert [int(record.request_id) for record in timeline.requests] == kept


def test_a_request_is_scheduled_once_however_often_it_runs(clock: Clock):
    timeline = Timeline(clock)
    a, b = make_request("A"), make_request("B")
    clock.now = 1.0
    for request in (a, b):
        timeline.arrived(request)
    clock.now = 4.0
    timeline.issued([(a, 1)])
    clock.now = 5.0
    timeline.returned(timeline.issued([(a, 1)]))  # again, after a fault
    timeline.delivered([(a, 1, FinishReason.STOP), (b, 0, FinishReason.TIMEOUT)])
    ran, waited = timeline.requests
    assert (ran.scheduled, ran.queue_time) == (4.0, 3.0)
    assert (waited.scheduled, waited.queue_time) == (None, None)


class Listener(TimelineObserver):
    """Records the events that it receives, with their times."""

    def __init__(self, clock: Clock) -> None:
        self.heard: list[tuple[object, ...]] = []
        self._clock = clock

    def returned(self, record: IterationRecord) -> None:
        self.heard.append((self._clock.now, "returned", record.number, record.returned))

    def delivered(self, gaps: "array[float]", first: Sequence[RequestRecord]) -> None:
        firsts = [(record.request_id, record.time_to_first_token) for record in first]
        self.heard.append((self._clock.now, "delivered", list(gaps), firsts))

    def ended(self, record: RequestRecord, request: Request) -> None:
        self.heard.append(
            (self._clock.now, "ended", record.request_id, record.finish_reason, record.n_output)
        )


def test_an_observer_hears_of_all_once_and_in_order(clock: Clock):
    timeline = Timeline(clock)
    listener = Listener(clock)
    timeline.observers = (listener,)
    a, b = make_request("A"), make_request("B")
    timeline.arrived(a)
    clock.now = 1.0
    issued = timeline.issued([(a, 1)])
    clock.now = 2.0
    timeline.arrived(b)
    clock.now = 3.0
    timeline.returned(issued)
    timeline.delivered([(a, 1, None)])
    a.state = RequestState.INCREMENT
    issued = timeline.issued([(a, 1), (b, 1)])
    clock.now = 7.0
    timeline.returned(issued)
    timeline.delivered([(a, 3, FinishReason.LENGTH), (b, 2, None)])
    timeline.delivered([(b, 0, FinishReason.CANCELLED)])
    timeline.delivered([])
    assert timeline.n_arrived == 2
    assert listener.heard == [
        (3.0, "returned", 0, 3.0),
        (3.0, "delivered", [], [("A", 3.0)]),
        (7.0, "returned", 1, 7.0),
        (7.0, "delivered", [4.0, 0.0, 0.0, 0.0], [("B", 5.0)]),
        (7.0, "ended", "A", FinishReason.LENGTH, 4),
        (7.0, "ended", "B", FinishReason.CANCELLED, 2),
    ]


def arrive(timeline: Timeline, names: Iterable[str]) -> dict[str, Request]:
    requests = {name: make_request(name) for name in names}
    for request in requests.values():
        timeline.arrived(request)
    return requests


def end_at(timeline: Timeline, clock: Clock, request: Request, time: float) -> None:
    clock.now = time
    timeline.delivered([(request, 1, FinishReason.STOP)])


def test_how_fast_requests_finish(clock: Clock):
    timeline = Timeline(clock)
    live = arrive(timeline, "ABCD")
    assert timeline.recent_finish_interval() is None
    end_at(timeline, clock, live["A"], 10.0)
    assert timeline.recent_finish_interval() is None
    end_at(timeline, clock, live["B"], 11.0)
    assert timeline.recent_finish_interval() == 1.0
    end_at(timeline, clock, live["C"], 16.0)
    assert timeline.recent_finish_interval() == 3.0  # (16 - 10) / 2


def test_idle_time_does_not_affect_the_finish_rate(clock: Clock):
    timeline = Timeline(clock)
    for start in (0.0, 1000.0):
        live = arrive(timeline, "AB")
        end_at(timeline, clock, live["A"], start + 1.0)
        end_at(timeline, clock, live["B"], start + 3.0)
        assert timeline.recent_finish_interval() == 2.0


def test_the_finish_rate_uses_only_recent_ends(clock: Clock):
    timeline = Timeline(clock)
    live = arrive(timeline, ["stays", *map(str, range(65))])
    end_at(timeline, clock, live["0"], 0.0)
    for i in range(1, 65):
        end_at(timeline, clock, live[str(i)], 1000.0 + 2.0 * i)
    assert timeline.recent_finish_interval() == 2.0  # the last 64 alone, two seconds apart


def test_an_id_may_be_used_again_before_the_end_is_delivered(clock: Clock):
    timeline = Timeline(clock)
    first, second = make_request("A"), make_request("A")
    timeline.arrived(first)
    timeline.arrived(second)  # the pool has let go of the first, and its end is on its way
    end_at(timeline, clock, first, 1.0)
    end_at(timeline, clock, second, 2.0)
    assert [(record.request_id, record.finished) for record in timeline.requests] == [("A", 1.0), ("A", 2.0)]
