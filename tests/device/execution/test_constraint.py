"""Token masks against Hugging Face's logits processors, and against a naive check of every token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.grammar.constraint import BadWords, ConstraintRules
from orca_jax.grammar.token_mask import n_words, words_of
from tests.device.model.golden_processors import VOCABULARIES, load_golden_rows

VOCAB = 40


def allowed_by(rules: ConstraintRules, prompt: tuple[int, ...], output: tuple[int, ...]) -> list[bool]:
    constraint = rules.begin()
    words = np.full(n_words(rules.vocab_size), 0x5555, np.int32)  # what was there does not matter
    if constraint is None or not constraint.acts(len(output)):
        return [True] * rules.vocab_size
    constraint.allowed(prompt, output, words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[rules.vocab_size :].any(), "no id beyond the vocabulary"
    return bits[: rules.vocab_size].astype(bool).tolist()


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_allowed_tokens_equal_hugging_face_s(vocab: int) -> None:
    n_acting = 0
    for row in load_golden_rows(vocab):
        rules = ConstraintRules(
            vocab_size=vocab,
            end_token_ids=frozenset({*row.eos_ids, *row.stop_ids}),
            min_tokens=row.min_tokens,
            bad_words=BadWords(row.bad_words),
            allowed_token_ids=row.allowed_token_ids or None,
        )
        assert allowed_by(rules, row.prompt, row.output) == row.allowed.tolist()
        n_acting += not row.allowed.all()
    assert n_acting > 20


token = st.integers(0, 5)  # few, so that words are met
tokens = st.lists(token, max_size=6).map(tuple)


@given(
    prompt=tokens,
    output=tokens,
    bad_words=st.lists(st.lists(token, min_size=1, max_size=4).map(tuple), max_size=4),
    min_tokens=st.integers(0, 6),
    allowed=st.none() | st.sets(token, min_size=1),
)
def test_the_mask_equals_a_check_of_each_token(
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    bad_words: list[tuple[int, ...]],
    min_tokens: int,
    allowed: set[int] | None,
) -> None:
    ends = frozenset({2, 4})
    rules = ConstraintRules(
        vocab_size=VOCAB,
        end_token_ids=ends,
        min_tokens=min_tokens,
        bad_words=BadWords(bad_words),
        allowed_token_ids=None if allowed is None else tuple(allowed),
    )

    def completes(token: int) -> bool:
        known = (*prompt, *output, token)
        return any(known[len(known) - len(word) :] == word for word in bad_words)

    within = set(range(VOCAB)) if allowed is None else allowed
    left = {t for t in within if not completes(t) and not (t in ends and len(output) < min_tokens)}
    expected = left or within
    assert allowed_by(rules, prompt, output) == [t in expected for t in range(VOCAB)]


def test_an_unconstrained_output_has_no_state() -> None:
    assert ConstraintRules(vocab_size=VOCAB).begin() is None
    assert ConstraintRules(vocab_size=VOCAB, min_tokens=3).begin() is None, "nothing could end it"
    early = ConstraintRules(vocab_size=VOCAB, min_tokens=3, end_token_ids=frozenset({1})).begin()
    assert early is not None
    assert [early.acts(n) for n in range(5)] == [True, True, True, False, False]
    assert early.failure is None and not early.accept(1)


def test_words_are_bits() -> None:
    assert words_of([0, 33, 63], 70).tolist() == [1, 2 - (1 << 31), 0]
    assert words_of(None, 33).tolist() == [-1, 1]
    assert words_of([], 1).tolist() == [0]
