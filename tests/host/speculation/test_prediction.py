"""A predicted output: drafted where the output follows it, and found again after the output has left it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.config import SchedulingConfig
from orca_jax.iteration.rows.drafted import Drafted
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.service.prepared_params import RuleMaker
from orca_jax.speculation.drafter import Speculation
from orca_jax.speculation.prediction import PredictedOutput, Prediction
from tests.host.engines import CONFIG, LETTERS, MODEL, SOON, orca, simulated, writing

ABC = "abcdefghij"


def followed(predicted: str, output: str, n: int = 4) -> tuple[list[str], int, int]:
    """The drafts after each letter of the output, the first before it; accepted and rejected letters."""
    one = PredictedOutput(Prediction(predicted.encode()))
    drafts = [bytes(one.draft(output[:i].encode(), n)).decode() for i in range(len(output) + 1)]
    return drafts, one.n_accepted, one.n_rejected


@pytest.mark.parametrize(
    "output, drafts, n_accepted",
    [
        ("abcdefghij", "abcd bcde cdef defg efgh fghi ghij hij ij j ", 10),
        ("abcdXfghij", "abcd bcde cdef defg efgh    ij j ", 9),  # a letter replaced
        ("abcXYdefghij", "abcd bcde cdef defg     ghij hij ij j ", 10),  # two inserted
        ("abfghij", "abcd bcde cdef   ij j ", 7),  # three left out: an output that leaves it at once
        ("fghijabc", "abcd   ij j    ", 5),  # never back
        ("xyz", "abcd   ", 0),
    ],
)
def test_an_output_that_leaves_its_prediction(output: str, drafts: str, n_accepted: int) -> None:
    assert followed(ABC, output) == (drafts.split(" "), n_accepted, 10 - n_accepted)


def test_the_nearest_place_is_taken_where_several_agree() -> None:
    drafts, _, _ = followed("abc1abc2abc3", "Xabc2Yabc", 1)
    assert drafts == ["a", "", "", "", "1", "a", "", "", "", "3"], "the output has passed the first two"


@given(st.text("ab", max_size=14), st.text("ab", max_size=14), st.lists(st.integers(1, 3), max_size=9))
def test_it_depends_on_the_output_alone_and_not_on_its_pieces(
    predicted: str, output: str, pieces: list[int]
) -> None:
    one, n = PredictedOutput(Prediction(predicted.encode())), 0
    for piece in pieces:
        n = min(n + piece, len(output))
        drafts = bytes(one.draft(output[:n].encode(), 4)).decode()
        whole, n_accepted, n_rejected = followed(predicted, output[:n])
        assert (drafts, one.n_accepted, one.n_rejected) == (whole[-1], n_accepted, n_rejected)
        assert n_accepted <= n and n_rejected >= 0 and drafts in predicted


class Nothing:
    def __init__(self, prompt_ids: Sequence[int]) -> None: ...

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        return ()


def test_a_request_s_prediction_is_drafted_before_the_engine_s_drafter_is_asked() -> None:
    scheduling = SchedulingConfig(speculative=f"{__name__}:Nothing")
    engine, config = simulated(writing(ABC)), replace(CONFIG, scheduling=scheduling)
    with orca(engine, config=config, tokenizer=LETTERS) as service:
        made = service.speculation
        assert made is not None
        for prediction, counts, n_drafted in ((ABC, (10, 0), 6), ("ab!!efghij", (8, 2), 5), (None, None, 0)):
            before = made.n_drafted
            generation = service.submit([1], params(prediction))
            assert bytes(generation.result(SOON).token_ids).decode() == ABC
            assert (generation.predicted, made.n_drafted - before) == (counts, n_drafted)


def params(prediction: str | None) -> SamplingParams:
    return SamplingParams(max_tokens=10, ignore_eos=True, prediction=prediction)


def test_a_request_may_have_no_drafts() -> None:
    speculation = Speculation(lambda prompt_ids, _: Nothing(prompt_ids), 4, MODEL.vocab_size)
    maker = RuleMaker(MODEL, LETTERS, speculation=speculation)
    for asked, is_drafted in ((params("abc"), True), (replace(params("abc"), speculative="off"), False)):
        rules = maker.rules(asked)
        assert isinstance(rules.kind(), Drafted) is is_drafted
        assert (rules.prediction is not None) is is_drafted
