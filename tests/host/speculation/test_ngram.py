"""The n-gram drafter against a plain search of the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from orca_jax.speculation.ngram import NgramDrafter

TOKENS = st.lists(st.integers(0, 2), max_size=24)


def searched(ids: list[int], n: int) -> list[int]:
    """Find the newest earlier place of the last three tokens, and copy from there token by token."""
    for end in range(len(ids) - 1, 2, -1):
        if ids[end - 3 : end] == ids[-3:]:
            copied = list(ids)
            for i in range(n):
                copied.append(copied[end + i])
            return copied[len(ids) :]
    return []


@given(TOKENS, TOKENS, st.lists(st.integers(1, 3), max_size=12), st.integers(1, 6))
def test_it_copies_from_the_newest_place_with_the_same_three_tokens(
    prompt: list[int], output: list[int], pieces: list[int], n: int
) -> None:
    drafter, n_output = NgramDrafter(prompt), 0
    for piece in pieces:  # the output grows by as many tokens as were accepted
        n_output = min(n_output + piece, len(output))
        assert list(drafter.draft(output[:n_output], n)) == searched(prompt + output[:n_output], n)
