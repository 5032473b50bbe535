"""Drafts under a constraint: cut where it forbids one, forced where it allows one text; masks after each."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.grammar.constraint import Constraint
from orca_jax.grammar.token_mask import has, n_words
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.service.prepared_params import RuleMaker
from tests.host.engines import EOS, LETTERS, MODEL

RULES = RuleMaker(MODEL, LETTERS)
PROMPT = tuple(b"say a or b: ")
# Grammars and words whose outputs, of these letters, often go on and often end.
ASKED = [
    {"guided_regex": "(ab|ba|c)*d?"},
    {"guided_regex": "a{2,7}b{3}(c|dd)", "bad_words": ("aaaa", "c")},
    {"guided_json": {"enum": ["aabb", "aabc", "dd"]}},
    {"bad_words": ("ab", "b", "cc a"), "min_tokens": 3},
    {"allowed_token_ids": tuple(b"abc"), "bad_words": ("aa",)},
    {"min_tokens": 4},
]


def constraint(asked: dict[str, object]) -> Constraint:
    made = RULES.rules(SamplingParams(**asked)).constraint()  # pyright: ignore[reportArgumentType]
    assert made is not None
    return made


def mask(one: Constraint, output_ids: Sequence[int]) -> np.ndarray:
    words = np.zeros(n_words(MODEL.vocab_size), np.int32)
    one.allowed(PROMPT, output_ids, words)
    return words


def grown(asked: dict[str, object], choices: Sequence[int]) -> tuple[Constraint, list[int]] | None:
    """A constraint that has accepted allowed tokens, one for each choice; None if the output ended."""
    one, output_ids = constraint(asked), list[int]()
    for choice in choices:
        words = mask(one, output_ids)
        allowed = [i for i in (*b'abcd" ', EOS) if has(words, i)] or [int(np.flatnonzero(words)[0]) * 32]
        output_ids.append(allowed[choice % len(allowed)])
        if one.accept(output_ids[-1]) or output_ids[-1] == EOS or one.failure:
            return None
    return one, output_ids


choices = st.lists(st.integers(0, 20), max_size=6)
drafts_of_letters = st.lists(st.sampled_from(b"aaabbbccd "), max_size=6)


def compare(asked: dict[str, object], choices: list[int], wanted: list[int], n: int) -> tuple[int, bool]:
    """Compare with a constraint that accepts the drafts: the number of drafts, and whether some were cut."""
    made = grown(asked, choices)
    if made is None:
        return 0, False
    one, output_ids = made
    before = mask(one, output_ids)
    drafts = list(one.drafts(PROMPT, output_ids, wanted, n))
    assert len(drafts) <= n
    is_forced = drafts != wanted[: len(drafts)]
    assert not is_forced or "guided_regex" in asked or "guided_json" in asked
    ahead = np.zeros((len(drafts), n_words(MODEL.vocab_size)), np.int32)
    one.allowed_after(PROMPT, output_ids, drafts, ahead)
    assert one.n_followed == len(drafts)
    assert mask(one, output_ids).tolist() == before.tolist(), "drafts leave no trace"
    other, plain = grown(asked, choices) or (one, output_ids)
    for i, draft in enumerate(drafts):
        assert has(mask(other, plain), draft), "a forbidden draft"
        assert not other.accept(draft), "nothing follows the last token"
        plain = [*plain, draft]
        assert ahead[i].tolist() == mask(other, plain).tolist()
    if is_forced or len(drafts) >= len(wanted[:n]):
        return len(drafts), False
    cut = wanted[len(drafts)]
    assert not has(mask(other, plain), cut) or other.accept(cut) or cut == EOS, "cut for nothing"
    return len(drafts), True


@pytest.mark.parametrize("asked", ASKED)
def test_masks_after_drafts_are_those_after_the_same_output(asked: dict[str, object]) -> None:
    @settings(max_examples=40, deadline=None)
    @given(choices=choices, wanted=drafts_of_letters, n=st.integers(1, 6))
    def masks_are_equal(choices: list[int], wanted: list[int], n: int) -> None:
        compare(asked, choices, wanted, n)

    masks_are_equal()


@pytest.mark.parametrize(
    ("asked", "choices", "kept", "cut"),
    [
        (ASKED[0], [], b"ab", b"abc"),
        (ASKED[1], [], b"aaabbb", b"aac"),
        (ASKED[2], [0], b"aabb", b"ab"),
        (ASKED[3], [], b"aaaacc", b"b"),
        (ASKED[4], [], b"abcaba", b"abd"),
    ],
)
def test_drafts_are_kept_until_one_is_forbidden(
    asked: dict[str, object], choices: list[int], kept: bytes, cut: bytes
) -> None:
    n_kept, is_cut = compare(asked, choices, list(kept), 6)
    assert n_kept >= len(kept) and not is_cut
    n_kept, is_cut = compare(asked, choices, list(cut), 6)
    assert n_kept == len(cut) - 1 and is_cut


def test_what_a_grammar_forces_is_drafted() -> None:
    one = constraint({"guided_regex": "the value is [0-9]+ dollars"})
    assert bytes(one.drafts(PROMPT, [], [], 5)) == b"the v"
    assert bytes(one.drafts(PROMPT, [], [*b"the value is 7 d"], 16)) == b"the value is 7 d"
    assert bytes(one.drafts(PROMPT, [], [*b"the x"], 8)) == b"the valu"
    output = b"the value is 12 "
    for token_id in output:
        assert not one.accept(token_id)
    assert bytes(one.drafts(PROMPT, [*output], [], 20)) == b"dollar", "the last letter ends the output"
