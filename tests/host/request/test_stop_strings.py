"""The automaton of stop strings against a search at every position, and its cost."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.stop_strings import StopSearch, StopStrings
from orca_jax.service.prepared_params import RuleMaker
from tests.gpt_config import gpt_config
from tests.host.engines import LETTERS

MODEL = gpt_config(vocab_size=300, n_positions=64, hidden_size=8, n_layers=1, n_heads=1, ffn_size=8)
few = st.text("abé", min_size=1, max_size=7)


def plainly(text: str, stops: list[str]) -> tuple[int, int] | None:
    """The definition: the first end of any stop string, and the longest that ends there."""
    for end in range(1, len(text) + 1):
        longest = max((len(stop) for stop in stops if text[:end].endswith(stop)), default=0)
        if longest:
            return end, longest
    return None


@given(st.text("abé\ud800", max_size=60), st.lists(few | st.text(max_size=3).filter(len), max_size=16))
def test_the_first_match_and_of_those_the_longest(text: str, stops: list[str]) -> None:
    assert StopSearch(StopStrings(stops)).feed(text) == plainly(text, stops)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=2, max_size=5), max_size=3))
@example("aab", ["aabb", "ab"])
@example("abab", ["ababb", "ba", "bab"])
def test_one_inside_the_beginning_of_another_is_found(text: str, stops: list[str]) -> None:
    assert StopSearch(StopStrings(stops)).feed(text) == plainly(text, stops)


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=16))
def test_what_is_held_back_is_the_longest_beginning_of_any(text: str, stops: list[str]) -> None:
    search = StopSearch(StopStrings(stops))
    for end, character in enumerate(text, 1):
        if search.feed(character) is not None:
            return
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
        assert search.n_open == max(len(one) for one in beginnings if text[:end].endswith(one))


class Counting(StopStrings):
    """Counts the automaton's steps for a text, in place of a clock."""

    n = 0

    @property
    def _fallbacks(self) -> "Counting":
        return self

    @_fallbacks.setter
    def _fallbacks(self, value: object) -> None:
        self._real = value

    def __getitem__(self, state: int) -> int:
        self.n += 1
        return self._real[state]  # type: ignore[index]

    def __setitem__(self, state: int, to: int) -> None:
        self._real[state] = to  # type: ignore[index]


@pytest.mark.parametrize(
    "stops",
    [["a" * (1024 - i) + "b" for i in range(16)], [f"{'a' * 1000}{i:02}" for i in range(16)], ["a" * 1024]],
    ids=["ending in b", "one beginning", "one"],
)
def test_sixteen_long_strings_cost_a_character_no_more_than_one(stops: list[str]) -> None:
    """Each step back undoes a step forward, so there are no more of them than characters."""
    counting = Counting(stops)
    counting.n = 0
    text = "".join(random.Random(0).choices("ac", [99, 1], k=20_000))
    assert counting.feed(0, text)[1:] in [(0, 0), plainly(text, stops)]
    assert counting.n <= len(text)


def test_all_outputs_of_a_request_share_what_is_looked_for() -> None:
    made = 0
    make = StopStrings.__init__

    def counted(self: StopStrings, stops: Sequence[str]) -> None:
        nonlocal made
        made += 1
        make(self, stops)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopStrings, "__init__", counted)
        rules = RuleMaker(MODEL, LETTERS).rules(SamplingParams(n=128, stop=("xy", "z")))
        streams = [one.text_stream() for one in rules.choices()]
    assert made == 1
    first, second = streams[:2]
    assert first is not None and second is not None
    letter = {text: LETTERS.encode(text)[0] for text in "xyz"}
    assert not first.push(letter["x"]) and not second.push(letter["y"])
    assert first.push(letter["y"]) and not second.push(letter["y"])
