"""The n-gram drafter against a plain search of the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from orca_jax.speculation.ngram import NgramDrafter

TOKENS = st.lists(st.integers(0, 2), max_size=24)


def newest_place(ids: list[int]) -> int | None:
    """The place after the last earlier occurrence of the last three tokens."""
    return next((end for end in range(len(ids) - 1, 2, -1) if ids[end - 3 : end] == ids[-3:]), None)


def copied(ids: list[int], place: int | None, n: int) -> list[int]:
    """Copy from the place token by token."""
    copy = list(ids)
    for i in range(n if place is not None else 0):
        assert place is not None
        copy.append(copy[place + i])
    return copy[len(ids) :]


@given(TOKENS, TOKENS, st.lists(st.integers(1, 3), max_size=12), st.integers(1, 6))
def test_it_copies_on_while_the_output_follows_and_else_from_the_newest_place(
    prompt: list[int], output: list[int], pieces: list[int], n: int
) -> None:
    drafter, n_output, place = NgramDrafter(prompt), 0, None
    for piece in pieces:  # the output grows by as many tokens as were accepted
        ids, before = prompt + output[:n_output], n_output
        n_output = min(n_output + piece, len(output))
        grown, n_new = prompt + output[:n_output], n_output - before
        follows = place is not None and copied(ids, place, n_new) == output[before:n_output]
        place = place + n_new if follows and place is not None else newest_place(grown)
        assert list(drafter.draft(output[:n_output], n)) == copied(grown, place, n)
