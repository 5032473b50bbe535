"""Pools for prefill and decode, simulated: times by hand, and what the searches find."""

import json
from dataclasses import replace

import pytest

from bench.pools import DEFAULTS, TRACES, Limits, Pools, Seen, goodputs, jobs_of, main
from bench.reproduced.played import Cost, Job
from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.errors import ConfigError
from orca_jax.planning.cost_model import IterationShape


def by_token(shape: IterationShape) -> float:
    """A second for each input token."""
    return float(sum(shape.input_lengths))


def pools(cost: Cost, *, prefill_tokens: int = 8) -> Pools:
    """Engines of four places, whose link takes half a second for a token of a prompt."""
    scheduling = SchedulingConfig(prefill_tokens=prefill_tokens)
    serving = ServingConfig(
        max_batch_size=4, n_slots=4096, max_batch_tokens=64, overlap=False, scheduling=scheduling
    )
    return Pools(cost=cost, serving=serving, kv_bytes=1.0, bandwidth=2.0, longest=64)


def test_a_prompt_delays_decodes_together_and_only_the_link_does_apart() -> None:
    """B's prompt of 40 tokens arrives when A decodes. Times by hand."""
    jobs = [Job(0.0, 8, 20, 20), Job(10.5, 40, 2, 2)]
    whole = pools(by_token).together(jobs, chunked=False)
    assert whole.first[0] == 8 and max(whole.gaps) == 42, "B's prompt alone, and a token of both"
    chunks = pools(by_token).together(jobs, chunked=True)
    assert max(chunks.gaps) == 8, "an iteration of at most eight tokens"
    assert chunks.first[1] > whole.first[1], "A's tokens run beside the chunks"
    apart = pools(by_token).apart(jobs, 1, 1)
    assert apart.first == [8, 40], "nothing beside a prompt"
    assert apart.gaps[0] == 8 / 2 + 1 and apart.gaps[-1] == 40 / 2 + 1, "over the link, and an iteration"
    assert set(apart.gaps[1:-1]) == {1.0}


def test_engines_take_requests_in_turn_and_each_has_a_link() -> None:
    jobs = [Job(0.0, 40, 2, 2)] * 2
    assert pools(by_token).apart(jobs, 2, 1).first == [40, 40]
    one = pools(by_token).apart(jobs, 1, 1)
    assert sorted(one.first) == [64, 80], "64 tokens an iteration"
    assert len(pools(by_token).apart([Job(0.0, 40, 1, 1)], 1, 1).gaps) == 0, "its only token is the first"


@pytest.mark.parametrize(
    ("first", "gaps", "within"),
    [
        ([1.0] * 9 + [5.0], [0.1] * 99 + [5.0], True),
        ([1.0] * 8 + [5.0] * 2, [0.1], False),
        ([1.0], [0.1] * 90 + [5.0] * 10, False),
        ([1.0], [], True),
    ],
)
def test_nine_in_ten_first_tokens_and_99_in_100_gaps_are_within_the_limits(
    first: list[float], gaps: list[float], within: bool
) -> None:
    assert Seen(first, gaps).within(Limits(first=1.4, between=0.2)) == within


def test_apart_wins_where_prompts_are_long_and_limits_between_tokens_short() -> None:
    """An iteration takes a second and what its prompt tokens take."""

    def cost(shape: IterationShape) -> float:
        return 1.0 + 0.1 * (sum(shape.input_lengths) - len(shape.input_lengths))

    jobs = [Job(float(i), 60, 20, 20) for i in range(40)]
    quick = replace(pools(cost, prefill_tokens=40), bandwidth=1e3)
    found = goodputs(quick, jobs, Limits(first=30.0, between=2.0), start=0.05)
    assert all(rate * n <= 40 / 150 for rate, n in zip(found.values(), (1, 1, 3, 2, 3, 6), strict=True))
    assert found["apart, 1 + 1"] > 1.5 * max(found["together, whole prompts"], found["together, chunks"])


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_trace_keeps_its_lengths_and_pattern(name: str) -> None:
    jobs = jobs_of(TRACES / name, 50, 131_072)
    assert len(jobs) == 50 and jobs[0].arrival == 0 and jobs[-1].arrival == pytest.approx(50)
    assert len({job.n_input for job in jobs}) > 10 and jobs == sorted(jobs, key=lambda job: job.arrival)
    short = jobs_of(TRACES / name, 50, 5000)
    assert all(job.n_input + job.n_output <= 5000 for job in short)
    assert len(short) == sum(job.n_input + job.n_output <= 5000 for job in jobs) > 2
    with pytest.raises(ConfigError, match="fewer than two requests"):
        jobs_of(TRACES / name, 50, 8)


def test_the_command_says_that_it_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(TRACES / DEFAULTS[1])
    main(["--trace", trace, "--requests", "6", "--model", "llama-3.1-8b", "--tensor-parallel", "1"])
    shown = capsys.readouterr().out
    assert f"simulated: {DEFAULTS[1]}, 6 requests" in shown
    figures = json.loads(shown.splitlines()[-1])
    assert figures["simulated"] and figures["goodput"][DEFAULTS[1]]["apart, 1 + 1"] > 0
    with pytest.raises(SystemExit):
        main(["--between", "0"])
