"""The example policies choose what their papers say; every run is watched (simulation/checked_policy.py)."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from examples.policies.shortest_remaining import ShortestRemaining
from examples.policies.skip_join_mlfq import SkipJoinMLFQ
from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.simulation.engine import hashed_token
from orca_jax.simulation.simulation import Simulation

SHORTEST = "examples.policies.shortest_remaining:ShortestRemaining"
ROUGHLY = "examples.policies.shortest_remaining:RoughlyShortestRemaining"
MLFQ = "examples.policies.skip_join_mlfq:SkipJoinMLFQ"
FIRST = "examples.policies.earliest_deadline:FirstTokenDeadline"
EACH = "examples.policies.earliest_deadline:TokenDeadline"


def kv() -> KVManager:
    return KVManager(n_blocks=4, block_size=16, n_rows=2, max_blocks_per_row=4)


@dataclass(frozen=True)
class Ran:
    """The order in which requests first ran, and in which they ended; how often one was preempted."""

    began: str
    ended: str
    n_preempted: int


def run(policy: str, requests: Iterable[tuple[str, float, int, int]], *, max_bs: int = 1) -> Ran:
    """Play requests: a name of one letter, seconds of arrival, input and output tokens; a turn takes 1 s."""
    scheduling = SchedulingConfig(policy=policy)
    config = ServingConfig(
        max_batch_size=max_bs, n_slots=4096, block_size=16, max_batch_tokens=2048, scheduling=scheduling
    )
    simulation = Simulation(config)
    made: list[Request] = []
    for name, time, n_input, n_output in requests:
        sampling = SamplingParams(max_tokens=n_output)
        request = Request(name, (ord(name),) * n_input, n_input + n_output, sampling, seed=len(made))
        made.append(request)
        simulation.add_at(time, request)
    timeline = simulation.run()
    for request in made:  # tokens do not depend on the policy
        assert request.output_ids == [hashed_token(request, i) for i in range(request.most_output)]
    return Ran(
        "".join(dict.fromkeys(name for each in timeline.iterations for name in each.request_ids)),
        "".join(each.request_id for each in timeline.requests),
        simulation.scheduler.n_preemptions,
    )


def test_the_shortest_goes_first_and_preempts_a_longer_one() -> None:
    # c, with 20 tokens, arrives when a has 60 left; b, with 105, does not go before it.
    ran = run(SHORTEST, [("a", 0, 8, 100), ("b", 1, 8, 105), ("c", 40, 8, 20)])
    assert (ran.began, ran.ended, ran.n_preempted) == ("acb", "cab", 1)


def test_a_request_that_is_nearly_done_keeps_its_place() -> None:
    # At 85 s a has 15 of 100 tokens left, more than c's 5.
    ran = run(SHORTEST, [("a", 0, 8, 100), ("c", 85, 8, 5)])
    assert (ran.ended, ran.n_preempted) == ("ac", 0)


def test_predictions_err_by_the_given_factor() -> None:
    class Erring(ShortestRemaining):
        error = 0.5

    policy = Erring(ServingConfig(n_slots=64), kv(), n_workers=1)
    request = Request("a", (1,), 101, SamplingParams(max_tokens=100), seed=0)
    factors: list[float] = []
    for request.arrival in range(2000):
        assert policy.predicted(request) == policy.predicted(request)
        factors.append(policy.predicted(request) / 100)
    factors.sort()
    # The quartiles of a log-normal factor: exp of 0.6745 sigma around 1.
    assert factors[1000] == pytest.approx(1.0, rel=0.06)
    assert factors[1500] == pytest.approx(1.401, rel=0.06)
    assert factors[500] == pytest.approx(1 / 1.401, rel=0.06)


def test_wrong_predictions_change_the_order() -> None:
    requests = [(chr(97 + i), 0.0, 8, 30 + i) for i in range(12)]
    assert run(SHORTEST, requests).ended == "abcdefghijkl"
    assert run(ROUGHLY, requests).ended != "abcdefghijkl"


def test_a_long_prompt_joins_a_lower_level_and_is_overtaken() -> None:
    # Both wait while a runs; b's prompt of 600 exceeds the first quantum of 512.
    ran = run(MLFQ, [("a", 0, 8, 10), ("b", 1, 600, 10), ("c", 2, 8, 10)])
    assert (ran.began, ran.ended) == ("acb", "acb")


def test_a_request_sinks_when_it_has_used_its_quantum() -> None:
    # a's 8 prompt tokens and 15 decodes of 32 fill the level's 512; c arrives before or after that.
    early = run(MLFQ, [("a", 0, 8, 40), ("c", 10, 8, 5)])
    late = run(MLFQ, [("a", 0, 8, 40), ("c", 30, 8, 5)])
    assert (early.ended, late.ended) == ("ca", "ca")
    assert (early.n_preempted, late.n_preempted) == (1, 1)
    policy = SkipJoinMLFQ(ServingConfig(n_slots=64), kv(), n_workers=1)
    request = Request("a", (1,) * 8, 48, SamplingParams(max_tokens=40), seed=0)
    levels: list[int] = []
    for _ in range(60):
        levels.append(policy.level(request))
        request.output_ids.append(0)
    # Quanta of 512, 1,024 and 2,048 less the prompt: 15.75, 47.75 and 111.75 decodes.
    assert [levels.index(level) for level in (0, 1, 2)] == [0, 16, 48]


def test_a_long_wait_is_rewarded_with_the_first_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SkipJoinMLFQ, "patience", 50)
    # Short requests keep coming; b's long prompt would wait for all of them.
    short = [(chr(99 + i), 20.0 * i, 8, 20) for i in range(12)]
    ran = run(MLFQ, [*short[:1], ("b", 1.0, 900, 4), *short[1:]])
    assert 1 < ran.began.index("b") < 6


def test_the_first_token_that_is_due_first_is_admitted_first() -> None:
    # b is due at 1 + 0.25 + 2, c at 2.5 + 0.25 + 0.008.
    ran = run(FIRST, [("a", 0, 8, 10), ("b", 1, 2000, 4), ("c", 2.5, 8, 4)])
    assert (ran.began, ran.n_preempted) == ("acb", 0)


def test_a_request_far_ahead_of_its_reader_gives_way() -> None:
    # A token is due each 0.1 s: a's 31st at 3.25 s, much later than b's first at 2.25 + 0.008 s. The clock
    # of the simulation, where a turn takes a second, only orders the arrivals.
    ran = run(EACH, [("a", 0, 8, 80), ("b", 2, 8, 40)])
    assert ran.n_preempted > 0
    assert ran.ended == "ba"
