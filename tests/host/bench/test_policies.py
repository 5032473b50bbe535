"""The comparison of policies: its traces, its arithmetic, and a short play of every policy."""

import itertools
import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.policies.cases import Case, file_case, real_cases, simulated_cases
from bench.policies.comparison import compare
from bench.policies.figures import Figures, quantile
from bench.policies.limits import Limits
from bench.policies.picture import picture
from bench.policies.policies import BASELINE, POLICIES
from bench.policies.search import highest_rate
from bench.policies.simulated import SimulatedMachine
from bench.policies.study import FOLDER, TRACES, play, table
from bench.policies.table import HEADER, cells, markdown_table, text_table
from bench.policies.traces import (
    Conversation,
    Turn,
    as_requests,
    conversations,
    longest,
    single,
    with_flood,
    with_long_prompts,
)
from orca_jax.families.presets import PRESETS
from orca_jax.planning.known_devices import GPUS
from server.load.workload import Load, Requests

GPT2 = SimulatedMachine(PRESETS["gpt2"], GPUS["h100"])
LIMITS = Limits(n_positions=512, max_batch_size=8)
FIGURES = Figures(
    n_requests=1,
    tokens_s=1.0,
    latency_mean=1.5,
    latency_p99=2.5,
    normalized_p50=0.1,
    normalized_p90=0.2,
    normalized_p99=0.3,
    first_p50=0.4,
    first_p99=0.5,
    between_p50=0.01,
    between_p99=0.02,
    between_most=0.03,
    slots_in_use=0.5,
    n_recomputed=7,
    cached_share=0.25,
    n_preemptions=1,
    n_iterations=3,
)


# Traces.


def test_a_trace_is_the_same_at_every_rate_but_for_its_arrivals() -> None:
    slow, fast = single(20, 1.0), single(20, 4.0)
    assert [one.turns for one in slow] == [one.turns for one in fast]
    assert [one.arrival for one in slow] == pytest.approx([4 * one.arrival for one in fast])


def test_limits_are_a_multiple_of_the_outputs() -> None:
    trace = single(20, 1.0, n_output=(1, 9), limit_factor=4)
    assert all(turn.limit == 4 * turn.n_output for one in trace for turn in one.turns)


def test_conversations_begin_alike_and_differ_after_that() -> None:
    trace = conversations(5, 1.0, n_system=30, n_question=(4, 8), n_output=(2, 3), think=1.0)
    assert all(len(one.turns) == 8 for one in trace)
    assert len({one.turns[0].new_ids[:30] for one in trace}) == 1
    assert len({one.turns[0].new_ids[30:] for one in trace}) == 5
    assert [one.turns[0].think for one in trace] == [0.0] * 5


def test_merged_traces_are_in_order_and_only_the_first_counts() -> None:
    short = single(30, 5.0)
    merged = with_long_prompts(short, every=2.0, n_input=100, n_output=1)
    assert all(a.arrival <= b.arrival for a, b in itertools.pairwise(merged))
    long = [one for one in merged if not one.counts]
    assert [one.arrival for one in long] == [1.0 + 2.0 * i for i in range(int(short[-1].arrival / 2))]
    flooded = with_flood(short, single(60, 9.0, owner="flood"))
    assert sum(one.counts for one in flooded) == 30


def test_the_longest_request_includes_the_turns_before() -> None:
    turns = (Turn((1, 2), n_output=3, limit=30), Turn((4,), n_output=2, limit=5))
    assert longest((Conversation(0.0, turns),)) == 32
    assert longest((Conversation(0.0, (turns[1], turns[0])),)) == 1 + 2 + 2 + 30


@pytest.mark.parametrize("cases", [simulated_cases(0.05), real_cases()])
def test_every_request_of_a_case_fits_its_engine(cases: dict[str, Case]) -> None:
    for name, case in cases.items():
        assert longest(case.make(case.rate)) <= case.limits.n_positions, name


def test_a_file_is_played_as_orca_bench_sends_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines: list[dict[str, Any]] = [
        {"arrival": 0.5, "n_input": 20, "n_output": 4},
        {"arrival": 0.1, "n_input": 5, "n_output": 3, "after": 0},
        {"arrival": 0.2, "n_input": 6, "n_output": 2, "after": 0},  # another answer to the first turn
        {"arrival": 0.3, "n_input": 7, "n_output": 9, "after": 1},
        {"arrival": 1.5, "n_input": 30, "n_output": 8},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    requests = Requests(number=None, n_input=(1, 1), n_output=(1, 1), vocab_size=90, seed=2, file=path)
    case = file_case(requests, max_batch_size=4)
    trace = case.make(case.rate)
    assert as_requests(trace, 90) == requests.trace(Load(), 0)
    assert case.limits.n_positions == longest(trace) == 20 + 4 + 5 + 3 + 7 + 9
    figures = GPT2.play("all", replace(case.limits, n_positions=512), trace)
    assert figures.n_requests == 5
    spread = file_case(replace(requests), max_batch_size=4, rate=10.0).make(0)
    assert [len(each.turns) for each in spread] == [4, 1] and 0 < spread[1].arrival < 2


# Plays.


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_plays_conversations_to_their_ends(policy: str) -> None:
    trace = conversations(4, 50.0, n_turns=3, n_system=40, n_question=(5, 20), n_output=(4, 30), think=0.01)
    figures = GPT2.play(policy, LIMITS, trace)
    assert figures.n_requests == 12
    assert 0 < figures.slots_in_use <= 1
    assert figures.first_p50 <= figures.first_p99
    assert (figures.cached_share > 0.3) == POLICIES[policy].scheduling.prefix_caching
    assert not figures.n_preemptions


def test_without_room_requests_on_demand_are_preempted_and_computed_twice() -> None:
    trace = single(12, 1e4, n_input=(30, 60), n_output=(60, 120), limit_factor=4)
    tight = replace(LIMITS, n_positions=1024, n_slots=1024)
    on_demand = GPT2.play("orca + on-demand", tight, trace)
    full = GPT2.play("orca", tight, trace)
    assert on_demand.n_preemptions > 0
    assert on_demand.n_recomputed > 0
    assert full.n_preemptions == full.n_recomputed == 0
    assert full.slots_in_use < on_demand.slots_in_use


def test_figures_are_of_the_requests_that_count() -> None:
    short = single(10, 1e3, n_input=(5, 9), n_output=(5, 9))
    long = with_flood(short, single(10, 1e3, n_input=(300, 400), n_output=(100, 100), seed=1))
    figures = GPT2.play("orca + chunked", LIMITS, long)
    assert figures.n_requests == 20
    assert figures.normalized_p99 > 0
    alone = GPT2.play("orca + chunked", LIMITS, short)
    assert alone.first_p50 <= figures.first_p50


def test_the_baseline_does_not_wait_for_declared_limits() -> None:
    declared = single(4, 1e4, n_input=(20, 20), n_output=(10, 10), limit_factor=8)
    exact = single(4, 1e4, n_input=(20, 20), n_output=(10, 10))
    assert GPT2.play(BASELINE, LIMITS, declared) == GPT2.play(BASELINE, LIMITS, exact)


# Search and output.


@pytest.mark.parametrize("start", [1.0, 10.0, 80.0])
def test_the_search_finds_the_highest_rate_within_the_bound(start: float) -> None:
    found = highest_rate(lambda rate: replace(FIGURES, normalized_p50=rate), 20.0, start)
    assert found is not None
    assert 20.0 / 1.03 <= found[0] <= 20.0
    assert found[1].normalized_p50 == found[0]


def test_the_search_gives_up_far_below_its_start() -> None:
    assert highest_rate(lambda rate: FIGURES, 0.05, 10.0) is None


def test_quantiles_interpolate() -> None:
    assert quantile(array("d", [1.0, 2.0, 3.0]), 0.75) == 2.5
    assert quantile(array("d"), 0.5) == 0.0


def test_a_comparison_is_shown_as_tables_and_as_a_picture() -> None:
    case = Case(
        title="a < b",
        make=lambda rate: single(6, rate, n_input=(5, 20), n_output=(2, 9)),
        rate=1000.0,
        limits=LIMITS,
        bound=0.01,
        policies=(BASELINE, "orca", "all"),
        references=(("all, again", "all", lambda: single(6, 10.0, n_input=(5, 9), n_output=(2, 9))),),
    )
    rows = compare("tiny", case, GPT2)
    assert [row.policy for row in rows] == [BASELINE, "orca", "all", "all, again"]
    assert rows[1].highest is not None
    assert rows[1].rate == rows[1].highest[0]
    assert all(len(cells(row)) == len(HEADER) for row in rows)
    assert text_table("t", rows).count("\n") == 5
    assert markdown_table("t", rows).splitlines()[-1].startswith("| all, again | ")
    drawn = ElementTree.fromstring(picture(rows, {"tiny": case.title}))
    texts = [element.text for element in drawn.iter() if element.tag.endswith("text")]
    assert "a < b" in texts
    assert {row.policy for row in rows} <= set(texts)


def test_the_study_plays_its_traces_and_shows_seconds() -> None:
    assert all((FOLDER / each.file).exists() for each in TRACES)
    studied = replace(TRACES[1], requests=8)
    figures = [play((studied, policy)) for policy in ("all", "token deadline")]
    assert [each.n_requests for each in figures] == [8, 8]
    title, _, header, rule, *rows = table(studied, ("all", "token deadline"), figures).splitlines()
    assert title == "**Azure 2023, conversation**: 8 requests, 7 times as fast"
    assert len({line.count("|") for line in (header, rule, *rows)}) == 1
    assert f"| {figures[1].latency_mean:.2f} |" in rows[1]
