"""Beam search against a plain one like Hugging Face's, over whole vocabularies with masks."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.errors import InvalidSamplingParameter
from orca_jax.request.beam_search import BeamSearch, Hypothesis, check_beams
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.sampling_params import SamplingParams
from tests.plain_beam_search import plain_search


class Model:
    """Log-probabilities that depend on the whole output; with `ties` many are equal."""

    def __init__(self, seed: int, vocab_size: int, *, ties: bool) -> None:
        self.vocab_size, self._seed, self._ties = vocab_size, seed, ties

    def __call__(self, output: Sequence[int]) -> np.ndarray:
        rng = np.random.default_rng([self._seed, *output])
        logits = (
            rng.integers(0, 3, self.vocab_size) if self._ties else 3 * rng.standard_normal(self.vocab_size)
        )
        return logits - np.log(np.exp(logits).sum())


def search(model: Model, search: BeamSearch) -> list[Hypothesis]:
    outputs: list[tuple[int, ...]] = [()]
    while not search.done:
        rows: list[TokenLogprobs] = []
        for output in outputs:
            logprobs = model(output)
            top = np.argsort(-logprobs, kind="stable")[: search.n_candidates].tolist()
            rows.append(TokenLogprobs(0, 0.0, tuple((i, float(logprobs[i])) for i in top)))
        search.step(rows)
        if not search.done:
            last = search.last_ids
            outputs = [(*outputs[i], token) for i, token in zip(search.parents, last, strict=True)]
            assert search.n_tokens == len(outputs[0])
    return search.finished


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_it_finds_what_the_plain_search_finds(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 5))
    end_token_ids = frozenset(data.draw(st.sets(st.integers(0, 5), max_size=3)))
    vocab_size = data.draw(st.integers(width + len(end_token_ids), 24))
    vocab_size = max(vocab_size, 2 * width, 6)  # the plain search needs twice as many tokens as beams
    rules = {
        "max_tokens": data.draw(st.integers(1, 8)),
        "length_penalty": data.draw(st.sampled_from((-1.0, 0.0, 0.6, 1.0, 2.0))),
        "early_stopping": data.draw(st.sampled_from((False, True, "never"))),
        "end_token_ids": end_token_ids,
    }
    model = Model(data.draw(st.integers(0, 1 << 20)), vocab_size, ties=data.draw(st.booleans()))
    expected = plain_search(model, vocab_size, width, **rules)
    found = search(model, BeamSearch(width, **rules))
    assert [one.token_ids for one in found] == [token_ids for token_ids, _ in expected]
    np.testing.assert_allclose([one.score for one in found], [score for _, score in expected], rtol=1e-9)
    for one in found:
        assert one.stopped == (one.token_ids[-1] in end_token_ids)


def test_a_search_by_hand() -> None:
    """Two beams, token 0 ends an output. After step 1: beams [1], [2]. After step 2, [1, 0] is complete."""
    beams = BeamSearch(2, max_tokens=3, length_penalty=1.0, end_token_ids=frozenset({0}))
    beams.step([TokenLogprobs(1, 0, ((1, -0.5), (2, -1.0), (0, -3.0)))])
    assert (beams.last_ids, beams.parents, beams.finished) == ([1, 2], [0, 0], [])  # 0 is third: not complete
    beams.step(
        [
            TokenLogprobs(0, 0, ((0, -0.25), (3, -2.0), (1, -2.5))),
            TokenLogprobs(0, 0, ((3, -0.5), (4, -3.0), (1, -4.0))),
        ]
    )
    assert beams.finished == [((1, 0), -0.75 / 2, True)]
    assert (beams.last_ids, beams.parents) == ([3, 3], [1, 0])  # totals -1.5 and -2.5
    beams.step([TokenLogprobs(0, 0, ((4, -0.3),)), TokenLogprobs(0, 0, ((4, -0.1), (0, -0.2)))])
    assert beams.done
    assert [one.token_ids for one in beams.finished] == [(1, 0), (2, 3, 4)]
    assert beams.finished[1].score == pytest.approx(-1.8 / 3)
    beams.restart()
    assert (beams.done, beams.finished, beams.parents, beams.n_tokens) == (False, [], [0], 0)


def test_a_step_without_any_candidate_ends_it() -> None:
    beams = BeamSearch(2, max_tokens=3)
    beams.step([TokenLogprobs(0, 0.0, ())])
    assert beams.done and not beams.finished


@pytest.mark.parametrize(
    "vocab_size, max_batch_size, most, why",
    [(100, 3, 3, "max_batch_size"), (5, 32, 4, "vocabulary"), (100, 32, None, "")],
)
def test_more_beams_than_an_engine_can_run(
    vocab_size: int, max_batch_size: int, most: int | None, why: str
) -> None:
    ends = frozenset({0})
    for width in (1, 3, 4, 5, 16):
        sampling = SamplingParams(use_beam_search=True, best_of=width)
        if most is None or width <= most:
            check_beams(sampling, ends, vocab_size=vocab_size, max_batch_size=max_batch_size)
            continue
        with pytest.raises(
            InvalidSamplingParameter, match=f"best_of is {width}.*allows {most} beams: .*{why}"
        ):
            check_beams(sampling, ends, vocab_size=vocab_size, max_batch_size=max_batch_size)


def test_end_tokens_take_places_among_the_candidates() -> None:
    sampling = SamplingParams(use_beam_search=True, best_of=16)
    check_beams(sampling, frozenset(range(4)), vocab_size=100, max_batch_size=32)
    with pytest.raises(InvalidSamplingParameter, match="of which 5 may end"):
        check_beams(sampling, frozenset(range(5)), vocab_size=100, max_batch_size=32)
