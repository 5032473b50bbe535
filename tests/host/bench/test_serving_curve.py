"""Figures of a run, the reasons for them, and values read off curves; worked by hand."""

import json
from array import array
from dataclasses import replace

import pytest

from bench.paper.request_level import RowsRecord, RowWork
from bench.paper.serving_curve import Reasons, Served, best_of, served, throughput_at
from bench.paper.serving_records import ServingRecords, as_json
from orca_jax.request.request import FinishReason
from orca_jax.scheduling.timeline import IterationRecord, RequestRecord

GENERATING, FED, DONE = RowWork


def request(name: str, *times: float) -> RequestRecord:
    """A request of three input tokens: arrival, first iteration, tokens."""
    arrived, scheduled, *tokens = times
    return RequestRecord(name, 3, arrived, scheduled, array("d", tokens), tokens[-1], FinishReason.LENGTH)


def iteration(number: int, names: str, first: str = "") -> IterationRecord:
    """One second, from `number` on; those of `first` are in their initiation phase."""
    initiation = tuple(name in first for name in names)
    lengths = tuple(3 if name in first else 1 for name in names)
    return IterationRecord(number, number, tuple(names), initiation, lengths, sum(lengths), number + 1)


def test_orca_s_late_joining_and_early_finished_requests():
    """A runs in iterations 0 to 3, B joins in 1 and leaves after 2, and C comes alone at 4."""
    records = ServingRecords(
        requests=[
            request("B", 0.5, 1.0, 2.0, 3.0),
            request("A", 0.0, 0.0, 1.0, 2.0, 3.0, 4.0),
            request("C", 4.0, 4.0, 5.0),
        ],
        iterations=[
            iteration(0, "A", "A"), iteration(1, "AB", "B"), iteration(2, "AB"), iteration(3, "A"),
            iteration(4, "C", "C"),
        ],
    )  # fmt: skip
    figures = served(records)
    assert figures.reasons == Reasons(
        iterations=5, late_joining=1, early_finished=1, rows=7, fed_rows=0, done_rows=0,
        waited_for_batch=0.0, waited_to_begin=0.5,
    )  # fmt: skip
    assert (figures.n_requests, figures.seconds, figures.req_s, figures.tokens_s) == (3, 5.0, 0.6, 1.4)
    # Normalized: A 4 / 4, B 2.5 / 2, C 1 / 1. Not normalized: 4, 2.5, 1.
    assert figures.normalized_median == 1.0
    assert figures.normalized_p90 == pytest.approx(1.0 + 0.8 * 0.25)  # between the second and the third
    assert figures.normalized_p99 == pytest.approx(1.0 + 0.98 * 0.25)
    assert figures.latency_median == 2.5


def test_the_baseline_s_rows_for_nothing_and_its_waiting():
    """A and B are one batch of four iterations: A done after two, B's input fed in two. C waits for them."""
    rows = [(GENERATING, FED), (GENERATING, FED), (DONE, GENERATING), (DONE, GENERATING), (GENERATING,)]
    records = ServingRecords(
        requests=[
            request("A", 0.0, 0.0, 4.0, 4.0), request("B", 0.0, 0.0, 4.0, 4.0), request("C", 1.5, 4.0, 5.0)
        ],
        iterations=[
            iteration(0, "AB", "AB"), *(iteration(i, "AB") for i in (1, 2, 3)), iteration(4, "C", "C")
        ],
        rows=[RowsRecord(i, i // 4, row) for i, row in enumerate(rows)],
    )  # fmt: skip
    assert served(records).reasons == Reasons(
        iterations=5, late_joining=0, early_finished=0, rows=9, fed_rows=2, done_rows=2,
        waited_for_batch=2.0, waited_to_begin=2.5,
    )  # fmt: skip
    decoded = json.loads(json.dumps(as_json(records)))
    assert [one["rows"] for one in decoded["iterations"]] == ["gf", "gf", "dg", "dg", "g"]
    assert decoded["iterations"][0] == {
        "issued": 0, "returned": 1, "requests": "A B", "input_lengths": [3, 3], "bucket": 6, "rows": "gf"
    }  # fmt: skip
    assert decoded["requests"][2] == {
        "id": "C", "n_input": 3, "n_output": 1, "arrived": 1.5, "scheduled": 4.0, "first_token": 5.0,
        "finished": 5.0,
    }  # fmt: skip


NOTHING = Reasons(0, 0, 0, 0, 0, 0, 0.0, 0.0)
POINT = Served(1, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, NOTHING)


def curve(*points: tuple[float, float]) -> list[Served]:
    """Points of (throughput, median normalized latency) at ascending loads."""
    return [replace(POINT, req_s=req_s, normalized_median=latency) for req_s, latency in points]


def test_throughput_at_a_latency_is_interpolated():
    ours = curve((1.0, 0.1), (2.0, 0.2), (3.0, 0.6))
    assert throughput_at(ours, 0.1) == 1.0
    assert throughput_at(ours, 0.15) == pytest.approx(1.5)
    assert throughput_at(ours, 0.3) == pytest.approx(2.25)
    assert throughput_at(ours, 0.6) == 3.0


def test_beyond_the_curve_there_is_no_value():
    ours = curve((1.0, 0.1), (2.0, 0.2))
    assert throughput_at(ours, 0.05) is None and throughput_at(ours, 0.25) is None
    assert throughput_at(curve((1.0, 0.1)), 0.1) is None
    assert throughput_at([], 0.1) is None


def test_where_a_curve_passes_more_than_once_the_most_counts():
    """Fuller batches may be faster per request, until the queue grows."""
    assert throughput_at(curve((1.0, 0.4), (2.0, 0.2), (3.0, 0.4)), 0.3) == pytest.approx(2.5)
    assert throughput_at(curve((1.0, 0.3), (2.0, 0.3)), 0.3) == 2.0


def test_the_best_of_several_at_one_latency():
    curves = {"1/1": curve((1.0, 0.1), (1.5, 0.9)), "8/8": curve((0.5, 0.1), (4.0, 0.9)), "none": []}
    assert best_of(curves, 0.1) == ("1/1", 1.0)
    assert best_of(curves, 0.9) == ("8/8", 4.0)
    assert best_of(curves, 2.0) is None
