"""Forbidden sequences of tokens against their definition, and their cost."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.grammar.constraint import BadWords, ConstraintRules, History
from orca_jax.grammar.token_mask import n_words, words_of

token = st.integers(0, 3)
tokens = st.lists(token, max_size=8)
words = st.lists(st.lists(token, min_size=1, max_size=5), max_size=12)


def plainly(history: list[int], sequences: list[list[int]]) -> set[int]:
    """The definition: compare each sequence with the end of the tokens."""
    return {
        last
        for *before, last in sequences
        if len(before) <= len(history) and history[len(history) - len(before) :] == before
    }


@given(prompt=tokens, output=st.lists(token, max_size=300), sequences=words, more=st.integers(0, 3))
def test_a_token_is_forbidden_exactly_where_it_completes_a_sequence(
    prompt: list[int], output: list[int], sequences: list[list[int]], more: int
) -> None:
    """The output has grown by a token, by several, or not at all since the last check."""
    bad = BadWords(sequences)
    history = History(prompt, bad.longest)
    for n in range(0, len(output) + 1, 1 + more):
        for _ in range(2):
            history.follow(output[:n])
            assert bad.completed_by(history) == plainly([*prompt, *output[:n]], sequences)
    assert len(history.tokens) <= 8 * (bad.longest + 64) + 4 * (1 + more)


@pytest.mark.parametrize("sequences", [[[5]], [[1, 2, 3]], [[*range(100), 7], [99, 8]]])
def test_a_long_outputs_history_stays_short(sequences: list[list[int]]) -> None:
    bad = BadWords(sequences)
    history, output = History([0, 1], bad.longest), list[int]()
    rng = random.Random(0)
    while len(output) < 5000:
        output += rng.choice([[*range(100)], [1, 2], [99], [3] * 10])
        history.follow(output)
        assert bad.completed_by(history) == plainly([0, 1, *output], sequences)
        assert len(history.tokens) <= 8 * (bad.longest + 64) + 400


def test_large_ids_are_compared_as_whole_tokens() -> None:
    """Equal bytes that do not begin where a token begins are no match."""
    bad = BadWords([[0x01020304, 7], [1 << 24, 1 << 16, 8]])
    for history in ([0x04010203, 0x01020304], [0x01020304, 5], [1 << 24, 1 << 16], [1 << 16]):
        assert bad.completed_by(History(history, bad.longest)) == plainly(
            history, [[0x01020304, 7], [1 << 24, 1 << 16, 8]]
        )


def test_an_output_with_bad_words_keeps_few_bytes() -> None:
    """All outputs of a request share the sequences."""
    bad = BadWords([[i, *range(30), i] for i in range(512)])
    assert bad.n_bytes < 200_000
    rules = ConstraintRules(vocab_size=1000, bad_words=bad)
    one, other = rules.begin(), rules.begin()
    assert one is not None and other is not None
    assert one._rules is other._rules
    into = words_of(None, 1000)
    one.allowed(range(900), [5, *range(30)], into)
    assert into.shape == (n_words(1000),)
    assert not int(into[0]) >> 5 & 1
    other.allowed(range(900), [6, *range(29)], into)
    assert int(into[0]) >> 6 & 1
