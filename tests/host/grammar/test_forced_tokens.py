"""Tokens that a model's configuration forces at an index of the output."""

import numpy as np

from orca_jax.grammar.constraint import BadWords, Constraint, ConstraintRules


def allowed(constraint: Constraint, output_ids: list[int]) -> list[int]:
    words = np.zeros(2, np.int32)
    constraint.allowed((), output_ids, words)
    return [t for t in range(40) if words[t // 32] >> (t % 32) & 1]


def test_only_a_forced_token_is_allowed_at_its_index() -> None:
    rules = ConstraintRules(
        vocab_size=40,
        end_token_ids=frozenset({2}),
        min_tokens=2,
        bad_words=BadWords([[9]]),
        forced={0: 9, 3: 2},
    )
    constraint = rules.begin()
    assert constraint is not None
    assert allowed(constraint, []) == [9]  # although it is a bad word
    assert allowed(constraint, [9]) == [t for t in range(40) if t not in (2, 9)]
    assert allowed(constraint, [9, 1, 1]) == [2]
    assert not any(constraint.accept(t) for t in (9, 1, 1, 2))


def test_it_acts_at_forced_indices_alone() -> None:
    constraint = ConstraintRules(vocab_size=40, forced={0: 9, 3: 2}).begin()
    assert constraint is not None
    assert [constraint.acts(n) for n in range(5)] == [True, False, False, True, False]
    assert ConstraintRules(vocab_size=40).begin() is None
