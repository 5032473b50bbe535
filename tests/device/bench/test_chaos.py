"""`bench.server.chaos` judges an answer by the request run alone, with the weights that the answer names."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from bench.server.chaos import Chaos, Report, Sent, Spans, judge
from bench.server.chaos_requests import Answer, ChaosRequest, Weights, drawn_requests, write_changed
from orca_jax.checkpoint.safetensors_reader import read_header
from tests.device.checkpoint.tiny_checkpoint import GPT2, gpt2_tensors, write_checkpoint

REQUEST = ChaosRequest("In", max_tokens=4, seed=5, stop=(), logprobs=0)
ALONE = Answer("abcd", [1, 2, 3, 4], [-0.5] * 4)
OTHERS = Answer("abyz", [1, 2, 8, 9], [-0.5] * 4)


class KnownWeights(Weights):
    """Weights whose outputs are given, of which the first `sure` tokens are sure."""

    def __init__(self, answer: Answer, sure: int = 4) -> None:
        super().__init__(Path())
        self._answer, self._sure = answer, sure

    def alone(self, request: ChaosRequest) -> Answer:
        return self._answer

    def n_sure(self, request: ChaosRequest, prompt: Sequence[int]) -> int:
        return self._sure


def judged(
    answer: Answer, *, request: ChaosRequest = REQUEST, sure: int = 4, continuing: bool = False
) -> Report:
    """The judgement of an answer, with version 1 for other weights than version 0."""
    report = Report()
    weights = [KnownWeights(ALONE, sure), KnownWeights(OTHERS, sure)]
    chaos = Chaos(cast(Any, None), weights, [request], random.Random(0), report, print)
    chaos.weights_of[1] = weights[1]
    began = Spans.now()
    if continuing:
        with chaos.spans.under_way("continuing"):
            pass
    chaos.sent.append(Sent(request, answer, began, Spans.now()))
    judge(chaos, report, {request: (7,)})
    return report


@pytest.mark.parametrize(
    "answer", [ALONE, replace(OTHERS, version=1), replace(ALONE, logprobs=[-0.5002] * 4)]
)
def test_the_output_of_the_request_alone_is_equal(answer: Answer):
    report = judged(answer)
    assert report.passed and report.verdicts == {"equal": 1}


@pytest.mark.parametrize(
    "answer",
    [
        OTHERS,
        replace(ALONE, version=1),
        replace(ALONE, token_ids=[1, 2, 3]),
        replace(ALONE, token_ids=[1, 2, 3, 4, 5]),
        replace(ALONE, text="abc"),
        replace(ALONE, logprobs=[-0.5, -0.5, -0.6, -0.5]),
        replace(ALONE, logprobs=[]),
    ],
)
def test_any_other_output_is_a_mismatch(answer: Answer):
    report = judged(answer)
    assert not report.passed and len(report.mismatches) == 1 and not report.verdicts


def test_tokens_of_a_stop_text_may_lack_log_probabilities():
    answer = replace(ALONE, logprobs=[-0.5] * 2)
    assert judged(answer, request=replace(REQUEST, stop=("c",))).passed
    assert not judged(answer).passed


@pytest.mark.parametrize(("sure", "near_tie"), [(2, True), (3, False)])
def test_tokens_may_differ_from_the_first_that_is_not_sure(sure: int, near_tie: bool):
    report = judged(replace(ALONE, token_ids=[1, 2, 5, 5]), sure=sure)
    assert report.passed == near_tie and report.verdicts["near tie"] == near_tie


def test_what_a_seed_drew_while_weights_changed_is_not_judged():
    report = judged(replace(ALONE, token_ids=[1, 2, 8, 5]), continuing=True)
    assert report.passed and report.verdicts == {"mixed, not judged": 1}


def test_other_lengths_are_no_near_ties():
    assert not judged(replace(ALONE, token_ids=[1, 2, 3, 4, 5]), sure=0).passed


def test_requests_are_of_all_kinds_and_the_same_again():
    requests = drawn_requests(60, 50, random.Random(1))
    assert requests == drawn_requests(60, 50, random.Random(1)) and len(set(requests)) == 60
    assert {len(one.stop) for one in requests} == {0, 1, 2}
    for given in ([one.seed for one in requests], [one.logprobs for one in requests]):
        assert None in given and len(set(given)) > 3
    assert all(1 <= one.max_tokens <= 50 for one in requests)


def test_changed_weights_are_of_the_same_model(tmp_path: Path):
    directory = write_checkpoint(tmp_path / "model", GPT2, gpt2_tensors(GPT2))
    write_changed(directory, tmp_path / "other", seed=0)
    (before,), (after,) = (list(one.glob("*.safetensors")) for one in (directory, tmp_path / "other"))
    old, new = read_header(before), read_header(after)
    assert {name: (one.dtype, one.shape) for name, one in old.items()} == {
        name: (one.dtype, one.shape) for name, one in new.items()
    }
    assert before.read_bytes() != after.read_bytes()
    assert np.isfinite(np.fromfile(after, "<f4", count=100, offset=next(iter(new.values())).offset)).all()
    assert (tmp_path / "other" / "config.json").read_bytes() == (directory / "config.json").read_bytes()
