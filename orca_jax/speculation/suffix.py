"""Drafts from where a text's longest suffix stands elsewhere: in the text itself, or in earlier outputs.

Good for what n-grams are good for, and for outputs that resemble earlier ones: agents that call the same
tools, several samples of a prompt, code about the same names. After SuffixDecoding (Oliaro et al., 2024),
with an automaton in place of the tree.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence

from orca_jax.speculation.suffix_automaton import SuffixAutomaton

MEMORY_BYTES = 64 << 20  # earlier outputs, of all tenants together

_LEAST = 2  # tokens that must agree; a single one recurs by chance
_INDEXED = 1 << 14  # the last tokens of a prompt, which bounds the time and memory of its automaton
# A token takes some 5 us to enter an automaton, so a draft lets only so many enter: of its own text, and of
# the outputs that are to be remembered.
_OWN_AT_ONCE, _REMEMBERED_AT_ONCE = 512, 16
_MOST_WAITING = 1 << 18  # tokens of outputs that are to be remembered; no more are while so many wait
_CONTEXT = 8  # tokens before an output that are remembered with it, so that its beginning is found
_LOOKED_BACK = 32  # tokens of a request's text that are looked for in a text that is new to it
_END = -1  # ends each remembered output


class SuffixMemory:
    """Makes an engine's suffix drafters, and remembers their outputs for later requests of the same salt.

    A salt has up to two texts, and a full one takes the place of the one before. With more than `most_bytes`
    in all, the salts that have not been used for the longest time are forgotten first.
    """

    def __init__(self, most_bytes: int = MEMORY_BYTES) -> None:
        self._most_bytes = most_bytes
        self._texts: OrderedDict[tuple[str, ...], tuple[SuffixAutomaton, ...]] = OrderedDict()
        self._waiting: deque[tuple[tuple[str, ...], array[int]]] = deque()
        self._n_taken = 0  # tokens of the first that waits
        self._n_waiting = 0
        self._n_text_bytes = 0

    @property
    def n_bytes(self) -> int:
        """An estimate of the memory in bytes."""
        return self._n_text_bytes + 4 * self._n_waiting

    def __call__(self, prompt_ids: Sequence[int], salt: tuple[str, ...]) -> "SuffixDrafter":
        return SuffixDrafter(prompt_ids, salt, self)

    def texts(self, salt: tuple[str, ...]) -> tuple[SuffixAutomaton, ...]:
        """The earlier outputs of this salt, newest first."""
        if salt not in self._texts:
            return ()
        self._texts.move_to_end(salt)
        return self._texts[salt]

    def remember(self, salt: tuple[str, ...], ids: Sequence[int]) -> None:
        """Let `ids` enter the salt's text, some at a time."""
        if self._n_waiting + len(ids) < _MOST_WAITING:
            self._waiting.append((salt, array("i", (*ids, _END))))
            self._n_waiting += len(ids) + 1

    def take_in(self, n: int) -> None:
        """Let the next `n` tokens enter that wait."""
        while n > 0 and self._waiting:
            salt, ids = self._waiting[0]
            some = ids[self._n_taken : self._n_taken + n]
            self._enter(salt, some)
            n -= len(some)
            self._n_waiting -= len(some)
            self._n_taken += len(some)
            if self._n_taken == len(ids):
                self._waiting.popleft()
                self._n_taken = 0

    def _enter(self, salt: tuple[str, ...], ids: Sequence[int]) -> None:
        texts = self.texts(salt) or (SuffixAutomaton(),)
        before = texts[0].n_bytes
        for token_id in ids:
            texts[0].append(token_id)
        self._n_text_bytes += texts[0].n_bytes - before
        if 2 * texts[0].n_bytes >= self._most_bytes:
            self._n_text_bytes -= sum(text.n_bytes for text in texts[1:])
            texts = (SuffixAutomaton(), texts[0])
        self._texts[salt] = texts
        while self._n_text_bytes > self._most_bytes and len(self._texts) > 1:
            _, forgotten = self._texts.popitem(last=False)
            self._n_text_bytes -= sum(text.n_bytes for text in forgotten)


class SuffixDrafter:
    """A Drafter of one request. The longer the suffix that has been found, the more tokens it drafts."""

    def __init__(self, prompt_ids: Sequence[int], salt: tuple[str, ...], memory: SuffixMemory) -> None:
        self._salt = salt
        self._memory = memory
        self._own = SuffixAutomaton()
        self._waiting = deque(prompt_ids[-_INDEXED:])
        self._context = prompt_ids[-_CONTEXT:]
        self._n_output = 0
        # For each text of the memory: the state there, the length of the match, and the tokens read so far.
        self._places: dict[SuffixAutomaton, tuple[int, int, int]] = {}

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        own, memory = self._own, self._memory
        memory.take_in(_REMEMBERED_AT_ONCE)
        self._waiting.extend(output_ids[self._n_output :])
        self._n_output = len(output_ids)
        for _ in range(min(len(self._waiting), _OWN_AT_ONCE)):
            own.append(self._waiting.popleft())
        if self._waiting:
            return ()
        found = [(own.matched, own, own.after)]
        places = self._places
        self._places = {}
        for text in memory.texts(self._salt):
            state, matched, n_read = places.get(text) or (0, 0, max(0, len(own.ids) - _LOOKED_BACK))
            for token_id in own.ids[n_read:]:
                state, matched = text.step(state, matched, token_id)
            self._places[text] = state, matched, len(own.ids)
            found.append((matched, text, text.end[state]))
        found.sort(key=lambda each: -each[0])  # of equal ones the request's own first
        for matched, text, start in found:
            drafts = _copied(text.ids, start, min(n, matched)) if matched >= _LEAST else ()
            if drafts:
                return drafts
        return ()

    def end(self, output_ids: Sequence[int]) -> None:
        self._memory.remember(self._salt, (*self._context, *output_ids))


def _copied(ids: Sequence[int], start: int, n: int) -> Sequence[int]:
    """Copy `n` ids from `start` on; past their end the copy goes on with what it has copied."""
    period = len(ids) - start
    if not period:
        return ()
    copied = ids[start : start + n] if n <= period else [ids[start + i % period] for i in range(n)]
    end = next((i for i, token_id in enumerate(copied) if token_id == _END), len(copied))
    return copied[:end]
