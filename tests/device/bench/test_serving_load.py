"""The figures' tools on a real engine: systems under load, injected batches, the check of fairness."""

import math
from functools import cache

import pytest

from bench.paper.engine import fits, inject
from bench.paper.serving_load import Load, System, honesty, own_execution
from bench.paper.shared_engine import SharedEngine
from orca_jax.errors import ConfigError, PromptTooLong
from server.load.trace import homogeneous_trace, uniform_trace

MAX_BS = 2
N_SLOTS = 1024  # two requests of the demo model's 512 positions


@cache
def shared() -> SharedEngine:
    return SharedEngine("demo", most_bs=MAX_BS, n_slots=N_SLOTS, buckets=(8, 48))


def silent(name: str, done: int, total: int) -> None:
    """Progress that shows nothing."""


def at_rest() -> bool:
    kv = shared().kv
    return kv.n_free_blocks == kv.n_blocks and kv.n_free_rows == kv.n_rows


def load(until: float, reach: float = 0.0) -> tuple[Load, list[System]]:
    trace = uniform_trace(40, n_input=(1, 20), n_output=(1, 6), vocab_size=2048, rate=1.0)
    systems = [
        System("orca(2)", True, shared().orca(2)),
        System("orca(1)", True, shared().orca(1, overlap=False)),
        System("ft(2, 1)", False, shared().baseline(2, 1)),
    ]
    return Load(trace, False, requests=5, seconds=0.02, until=until, reach=reach), systems


def test_every_rate_is_played_on_every_system() -> None:
    climbed, systems = load(until=math.inf)
    progress: list[tuple[str, int, int]] = []
    climbed.climb(shared(), systems, [1000.0, 400.0], lambda *args: progress.append(args))
    assert [(playing.system.label, playing.rate) for playing in climbed.playings] == [
        (label, rate) for rate in (400.0, 1000.0) for label in ("orca(2)", "orca(1)", "ft(2, 1)")
    ]
    # Eight requests arrive in 0.02 seconds at 400 a second, twenty at 1,000.
    assert [playing.figures.n_requests for playing in climbed.playings] == [8] * 3 + [20] * 3
    assert progress[-1] == ("ft(2, 1) at 1e+03 req/s", 20, 20)
    tokens = {
        playing.rate: playing.figures.tokens_s * playing.figures.seconds for playing in climbed.playings
    }
    for playing in climbed.playings:
        assert playing.figures.tokens_s * playing.figures.seconds == pytest.approx(tokens[playing.rate])
        assert [
            record.arrived for record in sorted(playing.records.requests, key=lambda r: int(r.request_id))
        ] == [traced.arrival for traced in climbed.at_rate(playing.rate)]
        rows = max(iteration.n_rows for iteration in playing.records.iterations)
        assert rows <= (2 if playing.system.label == "orca(2)" else 1)
    assert [playing.rate for playing in climbed.playings if playing.system is systems[0]] == [400.0, 1000.0]
    assert climbed.curve(systems[2]) == [climbed.playings[2].figures, climbed.playings[5].figures]
    assert at_rest()


def test_a_system_that_is_past_the_limit_is_not_played_at_higher_rates() -> None:
    climbed, systems = load(until=0.0)
    climbed.climb(shared(), systems, [400.0, 1000.0], silent)
    assert [playing.rate for playing in climbed.playings] == [400.0] * 3


def test_systems_that_have_not_come_to_where_they_are_compared_go_on() -> None:
    climbed, systems = load(until=math.inf, reach=math.inf)
    climbed.climb(shared(), systems[:1], [16.0], silent)
    assert [playing.rate for playing in climbed.playings] == [16.0, 24.0, 36.0, 54.0, 81.0, 121.5, 182.25]


def test_one_request_alone_and_both_where_scheduling_makes_no_difference() -> None:
    trace = uniform_trace(8, n_input=(2, 4), n_output=(3, 5), vocab_size=2048, rate=1.0)
    alone, own = own_execution(shared(), shared().orca(2), trace, silent)
    assert 0 < own < alone
    result = honesty(shared(), trace, 2, 2, silent)
    assert [comparison.case for comparison in result] == ["max_bs 1", "equal requests, max_bs 2"]
    for comparison in result:
        assert len(comparison.overlap) == len(comparison.no_overlap) == 2
        assert min(comparison.overlap + comparison.no_overlap) > 0
    assert at_rest()


def test_a_batch_is_injected_until_it_is_done_if_its_slots_fit() -> None:
    """1,024 slots hold 21 requests of 33 tokens, in 3 blocks of 16, or 2 of the model's 512 positions."""
    traces = {n: homogeneous_trace(n, n_input=28, n_output=5, vocab_size=2048) for n in (1, 2, 3, 21, 22)}
    assert [fits(shared(), "orca", trace) for trace in traces.values()] == [True] * 4 + [False]
    assert [fits(shared(), "ft", trace) for trace in traces.values()] == [True, True, False, False, False]
    assert inject(shared(), traces[1]) > 0
    assert at_rest()


def test_requests_that_do_not_fit_are_reported() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel"):
        SharedEngine("demo", most_bs=1, pipeline_parallel=64)
    long = homogeneous_trace(1, n_input=512, n_output=1, vocab_size=2048)
    with pytest.raises(PromptTooLong):
        own_execution(shared(), shared().orca(1), long, silent)
