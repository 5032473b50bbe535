"""The suffix drafter against a plain search of the whole text, and what it remembers for whom."""

import random

from hypothesis import given
from hypothesis import strategies as st

from orca_jax.speculation.suffix import SuffixMemory
from orca_jax.speculation.suffix_automaton import SuffixAutomaton

TOKENS = st.lists(st.integers(0, 2), max_size=16)


def longest(ids: list[int], text: list[int], last: int) -> tuple[int, int]:
    """The length of the longest suffix of `ids` in `text[:last]`, and the index after its newest place."""
    for n in range(min(len(ids), last), 0, -1):
        ends = [end for end in range(n, last + 1) if text[end - n : end] == ids[-n:]]
        if ends:
            return n, ends[-1]
    return 0, 0


@given(TOKENS)
def test_the_automaton_finds_the_longest_suffix_at_its_newest_earlier_place(ids: list[int]) -> None:
    automaton = SuffixAutomaton()
    for i, token_id in enumerate(ids):
        automaton.append(token_id)
        found = automaton.matched, automaton.after if automaton.matched else 0
        assert found == longest(ids[: i + 1], ids, i)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=40))
def test_a_match_in_a_text_that_grows_meanwhile(steps: list[tuple[bool, int]]) -> None:
    """The match is the longest of what the text had when each token was read."""
    automaton, text, ids, state, matched = SuffixAutomaton(), list[int](), list[int](), 0, 0
    for grows, token_id in steps:
        if grows:
            automaton.append(token_id)
            text.append(token_id)
        else:
            ids.append(token_id)
            most = matched + 1
            state, matched = automaton.step(state, matched, token_id)
            assert matched == longest(ids[len(ids) - most :], text, len(text))[0]
            end = automaton.end[state]
            assert text[end - matched : end] == ids[len(ids) - matched :]


@given(TOKENS, TOKENS, st.lists(st.integers(1, 3), max_size=8), st.integers(1, 6))
def test_it_drafts_what_followed_as_many_tokens_as_agree(
    prompt: list[int], output: list[int], pieces: list[int], n: int
) -> None:
    drafter, n_output = SuffixMemory()(prompt, ()), 0
    for piece in pieces:  # the output grows by as many tokens as were accepted
        n_output = min(n_output + piece, len(output))
        ids = prompt + output[:n_output]
        matched, after = longest(ids, ids, len(ids) - 1)
        copied = list(ids)
        while matched >= 2 and len(copied) < len(ids) + min(n, matched):
            copied.append(copied[after + len(copied) - len(ids)])
        assert list(drafter.draft(output[:n_output], n)) == copied[len(ids) :]


def learnt(memory: SuffixMemory, salt: str, prompt: list[int], output: list[int]) -> None:
    memory(prompt, (salt,)).end(output)
    memory.take_in(len(prompt) + len(output) + 1)


def test_it_remembers_outputs_of_the_same_salt_alone() -> None:
    memory = SuffixMemory()
    learnt(memory, "ours", [1, 2], [50, 51, 52, 53, 54, 55])
    learnt(memory, "ours", [1, 2], [60, 61, 52, 53, 90])
    for salt, drafts in {"ours": [53, 54], "theirs": []}.items():
        drafter = memory([7, 51], (salt,))
        assert list(drafter.draft([52], 4)) == drafts, "the longer match wins over the newer one"
    drafter = memory([9, 52], ("ours",))
    assert list(drafter.draft([53], 4)) == [90], "an output's end ends the drafts"
    # The own text wins where it agrees as far, and an output begins as the last one after the same tokens.
    assert list(memory([52, 53, 70, 52], ("ours",)).draft([53], 1)) == [70]
    assert list(memory([8, 1, 2], ("ours",)).draft([60], 4)) == [61, 52, 53]


def test_a_draft_takes_in_only_some_tokens() -> None:
    memory = SuffixMemory()
    drafter = memory(list(range(600)) * 2, ())
    assert [list(drafter.draft([0] * i, 2)) for i in (1, 2)] == [[], []], "1,200 tokens enter 512 at a time"
    assert list(drafter.draft([0, 0, 0], 2)) == [0, 0]
    drafter.end([5] * 100)
    sizes = list[int]()
    for i in range(3, 6):
        drafter.draft([0] * i, 2)
        sizes.append(sum(len(text.ids) for text in memory.texts(())))
    assert sizes == [16, 32, 48]


def test_what_is_remembered_is_bounded_and_oldest_forgotten() -> None:
    rng = random.Random(1)
    memory = SuffixMemory(100_000)
    outputs = [[rng.randrange(1000) for _ in range(40)] for _ in range(60)]
    for i, output in enumerate(outputs):
        learnt(memory, "first" if i < 3 else str(i % 3), [], output)
        assert memory.n_bytes <= 100_000

    def is_known(i: int, salt: str) -> bool:
        return list(memory(outputs[i][:10], (salt,)).draft([outputs[i][10]], 3)) == outputs[i][11:14]

    assert is_known(59, "2") and not memory.texts(("first",))
    for i in range(60):
        learnt(memory, "2", [], outputs[i])
    known = [is_known(i, "2") for i in range(60)]
    assert all(known[-10:]) and not any(known[:20]), "one salt has all the room, and forgets its oldest"
    assert 50_000 < memory.n_bytes <= 100_000
    for _ in range(4):
        memory.remember(("2",), [1] * (1 << 17))
    assert memory.n_bytes < 100_000 + 4 * (1 << 18), "no more wait than fit"
