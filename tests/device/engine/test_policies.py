"""Every combination of the scheduler's switches on the real engine: the tokens are those of Algorithm 1.

test_engine.py holds Algorithm 1's tokens against model/reference.py, and one test here does so directly.
"""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from orca_jax.config import QueueOrder, Reservation, SchedulingConfig
from orca_jax.request.sampling_params import SamplingParams
from tests.device.engine.planned_requests import (
    MODEL,
    MODES,
    Mode,
    PlannedRequest,
    assert_same,
    parameters,
    planned_requests,
    play,
)
from tests.device.greedy_reference import GreedyReference

RESERVATIONS: tuple[Reservation, ...] = ("full", "on-demand")
ORDERS: tuple[QueueOrder, ...] = ("fcfs", "priority", "fair")
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
# Long outputs in little memory, so that some are preempted; prompts that begin alike or are equal.
CROWD = [
    *(PlannedRequest(0, tuple(range(17)), 28, GREEDY, (1, 2)) for _ in range(3)),
    PlannedRequest(1, (*range(17), 3, 4), 20, SamplingParams(temperature=1.0, repetition_penalty=1.7)),
    PlannedRequest(2, tuple(range(25)), 12, SamplingParams(temperature=0.0, prompt_logprobs=1, logprobs=1)),
    PlannedRequest(
        9, tuple(range(17)), 9, SamplingParams(temperature=1.0, frequency_penalty=1.5), priority=-1
    ),
]


QUICK = [("overlap", 1), ("through the host", 1), ("overlap", 2)]


@pytest.mark.matrix(but=["overlap-1"])
@pytest.mark.parametrize(
    "mode, n_stages",
    [
        pytest.param(mode, n, marks=() if (mode, n) in QUICK else pytest.mark.long)
        for mode in MODES
        for n in (1, 2)
    ],
)
def test_all_combinations_give_the_tokens_of_algorithm_1(n_stages: int, mode: Mode) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @example(all_planned=CROWD, prefill_tokens=5, lost_before=-1)
    @example(all_planned=CROWD, prefill_tokens=None, lost_before=8)
    @given(
        all_planned=planned_requests,
        prefill_tokens=st.none() | st.integers(1, 12),
        lost_before=st.integers(-1, 20),
    )
    def outputs_are_the_same(
        all_planned: list[PlannedRequest], prefill_tokens: int | None, lost_before: int
    ) -> None:
        expected, _ = play(all_planned, n_stages, "no overlap")
        for chunked, prefixes, reservation in itertools.product((False, True), (False, True), RESERVATIONS):
            scheduling = SchedulingConfig(
                chunked_prefill=chunked,
                prefill_tokens=prefill_tokens,
                prefix_caching=prefixes,
                reservation=reservation,
                scheduling_policy=ORDERS[(chunked + prefixes + (reservation == "full") + n_stages) % 3],
            )
            requests, scheduler = play(
                all_planned, n_stages, mode, lost_before=lost_before, scheduling=scheduling
            )
            for ours, theirs in zip(requests, expected, strict=True):
                assert_same(ours, theirs)
            seen["preempted"] += scheduler.n_preemptions
            seen["cached"] += sum(req.n_cached for req in requests)

    outputs_are_the_same()
    assert seen["preempted"] > 3 and seen["cached"] > 30, seen


@pytest.mark.parametrize("order", ORDERS)
def test_preempted_chunked_and_cached_tokens_are_the_reference_s(order: QueueOrder) -> None:
    reference = GreedyReference(MODEL, parameters())
    crowd = [replace(planned, sampling=GREEDY, banned=()) for planned in CROWD]
    requests, scheduler = play(
        crowd, 1, "overlap", scheduling=SchedulingConfig(prefill_tokens=6, scheduling_policy=order)
    )
    assert scheduler.n_preemptions and any(req.n_cached for req in requests)
    assert sum(reference.sure(req) for req in requests) > 60


def test_policies_of_papers_give_the_tokens_of_algorithm_1() -> None:
    expected, _ = play(CROWD, 1, "no overlap")
    n_preempted = 0
    for name in (
        "shortest_remaining:RoughlyShortestRemaining",
        "skip_join_mlfq:SkipJoinMLFQ",
        "earliest_deadline:TokenDeadline",
    ):
        scheduling = SchedulingConfig(policy=f"examples.policies.{name}", prefill_tokens=5)
        requests, scheduler = play(CROWD, 1, "overlap", scheduling=scheduling)
        n_preempted += scheduler.n_preemptions
        for ours, theirs in zip(requests, expected, strict=True):
            assert_same(ours, theirs)
    assert n_preempted > 0
