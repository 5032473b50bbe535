"""The comparison with other engines: the trace as a peer gets it, and the ratios of engines' rounds."""

import math
import random
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.peers.child import Asked, Playing, environment_variables
from bench.peers.played import Agreement, Played, agreement, ratio
from bench.policies.traces import as_requests, conversations
from server.load.trace import TracedRequest, input_lengths


class Clock:
    """A clock that only tests advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def played(
    latency: Sequence[float] = (1.0,),
    n_tokens: Sequence[int] = (1,),
    seconds: float = 1.0,
    token_ids: tuple[tuple[int, ...], ...] | None = None,
) -> Played:
    return Played(seconds, tuple(latency), tuple(n_tokens), token_ids)


def test_requests_are_given_when_they_arrive_and_latency_is_from_then() -> None:
    clock = Clock()
    playing = Playing([Asked([1], 2, 0.0), Asked([2], 1, 0.0), Asked([3], 1, 2.0)], clock)
    assert playing.arrived(1) == [0]
    assert playing.arrived() == [1]
    assert playing.arrived() == []
    assert playing.until_next() == 2.0
    clock.now += 1.5
    assert playing.until_next() == 0.5
    playing.done(1, [9])
    clock.now += 1.5  # the engine was busy, and looks a second after the third has arrived
    assert playing.next_arrivals() == [2]
    assert playing.until_next() is None
    assert playing.next_arrivals() == []
    playing.done(0, [7, 8])
    assert not playing.is_done
    clock.now += 1.0
    playing.done(2, [6])
    assert playing.is_done
    assert playing.answer() == {
        "seconds": 4.0,
        "latency": [3.0, 1.5, 2.0],
        "first_token": None,
        "token_ids": [[7, 8], [9], [6]],
    }


def test_a_next_turn_arrives_after_the_answer_and_its_prompt_is_the_conversation() -> None:
    clock = Clock()
    turns = [Asked([1, 2], 1, 0.0), Asked([3], 2, 0.5, 0), Asked([4], 1, 0.25, 1), Asked([5], 1, 9.0)]
    playing = Playing(turns, clock, streams=True)
    assert playing.next_arrivals() == [0]
    assert playing.until_next() == 9.0  # until the first is answered
    clock.now += 1.0
    playing.done(0, [7])
    assert playing.until_next() == 0.5
    assert playing.arrived() == []
    clock.now += 0.5
    assert playing.arrived() == [1]
    assert list(playing.requests[1].prompt) == [1, 2, 7, 3]
    clock.now += 0.125
    playing.first(1)
    clock.now += 0.125
    playing.done(1, [8, 9])
    clock.now += 8.0
    assert playing.arrived() == [2, 3]
    assert list(playing.requests[2].prompt) == [1, 2, 7, 3, 8, 9, 4]
    playing.done(3, [6])
    playing.done(2, [6])
    answer = playing.answer()
    assert answer["latency"] == [1.0, 0.25, 7.75, 0.75]
    assert answer["first_token"] == [1.0, 0.125, 7.75, 0.75]


def test_a_wait_for_the_next_turn_ends_with_the_answer() -> None:
    playing = Playing([Asked([1], 1, 0.0), Asked([2], 1, 0.0, 0)])
    assert playing.next_arrivals() == [0]
    assert playing.until_next() == math.inf
    answering = threading.Timer(0.02, playing.done, (0, [3]))
    answering.start()
    assert playing.next_arrivals() == [1]
    answering.join(10)


def test_conversations_as_requests_have_the_lengths_of_their_turns() -> None:
    trace = as_requests(conversations(2, 1.0, n_turns=3, n_question=(2, 4), n_output=(1, 3), think=1.0), 10)
    assert [request.after for request in trace] == [None, 0, 1, None, 3, 4]
    assert max(max(request.prompt_ids) for request in trace) < 10
    lengths = input_lengths(trace)
    assert lengths[0] == len(trace[0].prompt_ids) == 200 + len(trace[0].prompt_ids[200:])
    assert lengths[2] == sum(len(request.prompt_ids) + request.n_output for request in trace[:2]) + len(
        trace[2].prompt_ids
    )
    assert trace[3].prompt_ids[:200] == trace[0].prompt_ids[:200]


def test_a_trace_that_was_not_played_whole_has_no_answer() -> None:
    playing = Playing([Asked([1], 2, 0.0), Asked([2], 1, 0.0)], Clock())
    playing.done(0, [1, 2])
    with pytest.raises(KeyError):
        playing.answer()


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20), st.integers(1, 4), st.randoms())
def test_every_request_is_given_once_in_order_and_never_early(
    arrivals: list[float], most: int, chance: random.Random
) -> None:
    clock = Clock()
    playing = Playing([Asked([1], 1, arrival) for arrival in sorted(arrivals)], clock)
    given_out: list[int] = []
    while (wait := playing.until_next()) is not None:
        clock.now += wait * chance.choice([0.5, 1.0, 1.5]) + 1e-9
        taken = playing.arrived(most)
        assert len(taken) <= most
        assert all(playing.requests[i].arrival <= clock.now - 100.0 for i in taken)
        given_out += taken
    assert given_out == list(range(len(arrivals)))


def test_reported_environment_variables_have_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    monkeypatch.setenv("VLLM_API_KEY", "hidden")
    monkeypatch.setenv("HOME", "/nowhere")
    variables = environment_variables()
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert "VLLM_API_KEY" not in variables
    assert "HOME" not in variables


def test_rates_and_normalized_latency_by_hand() -> None:
    # 1, 2 and 4 seconds for 10, 10 and 8 tokens: 100, 200 and 500 ms a token.
    one = played([1.0, 2.0, 4.0], [10, 10, 8], seconds=7.0)
    assert one.tokens_per_second == 4.0
    assert one.requests_per_second == pytest.approx(3 / 7)
    latency = one.normalized_latency_ms()
    assert latency["p50"] == pytest.approx(200)
    assert latency["p90"] == pytest.approx(
        200 + 0.8 * 300
    )  # 0.9 * 2 is 1.8: between the second and the third
    assert latency["p99"] == pytest.approx(200 + 0.98 * 300)
    assert played([3.0], [0]).normalized_latency_ms()["p50"] == 3000.0


def test_missing_tokens_are_counted() -> None:
    trace = (TracedRequest((1,), 10), TracedRequest((1,), 4))
    assert played([1.0, 1.0], [10, 4]).missing(trace) == 0
    assert played([1.0, 1.0], [7, 5]).missing(trace) == 3  # one too many elsewhere does not make up for it


def test_the_ratio_is_of_each_round() -> None:
    assert ratio([100.0, 50.0, 90.0], [50.0, 25.0, 100.0]) == 2.0
    assert ratio([100.0, 60.0], [50.0, 60.0]) == 1.5


def test_agreement_counts_requests_and_tokens_before_a_difference() -> None:
    ours = played(token_ids=((1, 2, 3, 4), (5, 6)))
    assert agreement(ours, ours) == Agreement(requests=2, of=2, tokens=1.0)
    theirs = played(token_ids=((1, 2, 9, 4), (5, 6)))
    assert agreement(ours, theirs) == Agreement(requests=1, of=2, tokens=4 / 6)
    shorter = played(token_ids=((1, 2, 3), (5, 6)))
    assert agreement(ours, shorter) == Agreement(requests=1, of=2, tokens=5 / 6)
    assert agreement(ours, played()) is None
