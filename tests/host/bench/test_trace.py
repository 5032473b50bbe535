"""The traces that engines are measured with."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from server.errors import TraceError
from server.load.trace import (
    TracedRequest,
    homogeneous_trace,
    mean_lengths,
    mean_rate,
    n_output_tokens,
    paper_trace,
    scaled,
    uniform_trace,
)
from server.load.trace_files import read_trace


def test_the_paper_s_trace_reaches_its_bounds_and_no_further() -> None:
    trace = paper_trace(20_000, vocab_size=7)
    inputs, outputs = {len(r.prompt_ids) for r in trace}, {r.n_output for r in trace}
    assert (min(inputs), max(inputs)) == (32, 512)
    assert (min(outputs), max(outputs)) == (1, 128)
    assert {token for r in trace[:100] for token in r.prompt_ids} == set(range(7))
    assert {r.arrival for r in trace} == {0.0}


def test_other_bounds_are_reached_as_well() -> None:
    trace = uniform_trace(5_000, n_input=(8, 11), n_output=(1, 2), vocab_size=7)
    assert {len(r.prompt_ids) for r in trace} == {8, 9, 10, 11}
    assert {r.n_output for r in trace} == {1, 2}


def test_a_seed_determines_the_whole_trace() -> None:
    assert paper_trace(48, vocab_size=50257, seed=3) == paper_trace(48, vocab_size=50257, seed=3)
    assert paper_trace(48, vocab_size=50257, seed=3) != paper_trace(48, vocab_size=50257, seed=4)


def test_traces_without_arrivals_are_unchanged() -> None:
    trace = paper_trace(48, vocab_size=50257)
    trace_bytes = repr([(r.prompt_ids, r.n_output) for r in trace]).encode()
    assert (
        hashlib.sha256(trace_bytes).hexdigest()
        == "36348918efab34067d4d970385a2295f97d8ec7c7fd68fd419b09c34b404219e"
    )


def test_equal_requests_have_one_size_and_different_prompts() -> None:
    trace = homogeneous_trace(32, n_input=32, n_output=5, vocab_size=50257)
    assert {(len(r.prompt_ids), r.n_output) for r in trace} == {(32, 5)}
    assert len({r.prompt_ids for r in trace}) == 32
    assert n_output_tokens(trace) == 160


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    n, rate = 20_000, 4.0
    arrivals = np.array(
        [r.arrival for r in homogeneous_trace(n, n_input=1, n_output=1, vocab_size=7, rate=rate)]
    )
    gaps = np.diff(arrivals, prepend=0.0)
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.03)
    # Exponential gaps: as many are above the mean as e says, and one says nothing of the next.
    assert (gaps > 1 / rate).mean() == pytest.approx(np.exp(-1), abs=0.02)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03


def test_the_rate_changes_when_requests_come_and_nothing_else() -> None:
    slow, fast = (paper_trace(50, vocab_size=99, seed=5, rate=rate) for rate in (1.0, 8.0))
    assert [r.arrival for r in fast] == pytest.approx([r.arrival / 8 for r in slow])
    at_once = paper_trace(50, vocab_size=99, seed=5)
    assert tuple(replace(r, arrival=0.0) for r in slow) == at_once


def test_a_trace_that_is_played_faster() -> None:
    trace = (TracedRequest((1, 2, 3), 4, 1.0), TracedRequest((4,), 6, 1.5), TracedRequest((5, 6), 5, 5.0))
    assert mean_rate(trace) == 0.5
    assert mean_lengths(trace) == (2, 5)
    fast = scaled(trace, 0.5)
    assert [r.arrival for r in fast] == [0.5, 0.75, 2.5] and mean_rate(fast) == 1.0
    assert [(r.prompt_ids, r.n_output) for r in fast] == [(r.prompt_ids, r.n_output) for r in trace]
    assert mean_rate(scaled(trace, 0)) == float("inf")


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_is_above_nothing(rate: float) -> None:
    with pytest.raises(ValueError, match="requests a second above 0"):
        paper_trace(1, vocab_size=7, rate=rate)


def test_recorded_arrivals_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival": 0, "prompt_ids": [3, 1], "n_output": 2}\n'
        "\n"
        '{"arrival": 0.5, "n_input": 4, "n_output": 1}\n'
        '{"arrival": 0.5, "n_input": 4, "n_output": 9}\n'
    )
    first, *others = read_trace(path, vocab_size=10, seed=1)
    assert first == TracedRequest((3, 1), 2, 0.0)
    assert [(len(r.prompt_ids), r.n_output, r.arrival) for r in others] == [(4, 1, 0.5), (4, 9, 0.5)]
    assert others[0].prompt_ids != others[1].prompt_ids
    assert read_trace(path, vocab_size=10, seed=1) == (first, *others)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "the line is not JSON"),
        ("[]", "the line is not a JSON object"),
        ('{"arrival": 1, "n_input": 1, "n_output": 1, "n": 2}', "'n' is not known"),
        ('{"n_input": 1, "n_output": 1}', "arrival is None"),
        ('{"arrival": -1, "n_input": 1, "n_output": 1}', "arrival is -1"),
        ('{"arrival": NaN, "n_input": 1, "n_output": 1}', "arrival is nan"),
        ('{"arrival": 0.5, "n_input": 1, "n_output": 1}', "arrival is 0.5, before that"),
        ('{"arrival": 1, "n_input": 0, "n_output": 1}', "n_input is 0"),
        ('{"arrival": 1, "n_input": 1, "n_output": 1, "after": 1}', "after is 1"),
        ('{"arrival": 1, "n_input": 1, "n_output": 1, "after": true}', "after is True"),
        ('{"arrival": 1, "n_input": 1, "n_output": true}', "n_output is True"),
        ('{"arrival": 1, "n_input": 1}', "n_output is None"),
        ('{"arrival": 1, "n_output": 1}', "n_input or prompt_ids must be there"),
        ('{"arrival": 1, "n_input": 1, "prompt_ids": [1], "n_output": 1}', "one of them alone"),
        ('{"arrival": 1, "prompt_ids": [], "n_output": 1}', "prompt_ids must be a list of token ids"),
        ('{"arrival": 1, "prompt_ids": "ab", "n_output": 1}', "prompt_ids must be a list of token ids"),
        ('{"arrival": 1, "prompt_ids": [7], "n_output": 1}', "prompt_ids has 7; the vocabulary has 0 to 6"),
    ],
)
def test_a_mistake_in_a_line_is_reported(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 1, "n_input": 1, "n_output": 1}\n' + line + "\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 2: ") as raised:
        read_trace(path, vocab_size=7)
    assert message in str(raised.value)


def test_a_file_without_requests_or_text_is_not_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n")
    with pytest.raises(TraceError, match="has no request"):
        read_trace(path, vocab_size=7)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="UTF-8"):
        read_trace(path, vocab_size=7)
