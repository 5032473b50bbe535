"""Search for stop strings in text that arrives in pieces.

Uses the Aho-Corasick automaton: the cost per character does not depend on the number of strings or on the
text before it. That matters because the scheduler's thread processes the characters of every request.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence

_NONE = "\udfff"  # half of a surrogate pair, which decoded text never contains


class StopStrings:
    """The automaton of a request's stop strings, shared by all its outputs; immutable.

    A state represents a prefix of a string, state 0 the empty prefix. State s goes to s + 1 with the
    character `_next[s]`; the few other transitions are in a table. So 16 strings of 1,024 characters take a
    quarter of a megabyte.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        following, ends = [""], array("I", [0])
        self._branches: dict[tuple[int, str], int] = {}
        self._depths = array("I", [0])  # length of the prefix that a state represents
        self._ends = ends  # length of the longest string that ends at a state; 0 if none does
        for stop in stops:
            state = 0
            for depth, character in enumerate(stop, 1):
                if following[state] == character:
                    state += 1
                    continue
                to = self._branches.get((state, character))
                if to is None:
                    to = len(following)
                    if to == state + 1:
                        following[state] = character
                    else:
                        self._branches[state, character] = to
                    following.append("")
                    self._depths.append(depth)
                    ends.append(0)
                state = to
            ends[state] = len(stop)
        self._next = "".join(character or _NONE for character in following)
        self._first = frozenset(stop[0] for stop in stops)
        # The state of the longest proper suffix of a state's prefix that is a prefix of a string itself.
        self._fallbacks = array("I", bytes(ends.itemsize * len(ends)))
        for state, character, to in self._shortest_first(following):
            if state:
                self._fallbacks[to] = self.step(self._fallbacks[state], character)
            ends[to] = ends[to] or ends[self._fallbacks[to]]

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while True:
            if self._next[state] == character:
                return state + 1
            to = self._branches.get((state, character)) if self._branches else None
            if to is not None:
                return to
            if not state:
                return 0
            state = self._fallbacks[state]

    def depth(self, state: int) -> int:
        """The number of characters at the text's end that are a prefix of a string."""
        return self._depths[state]

    def feed(self, state: int, text: str) -> tuple[int, int, int]:
        """Consume `text` from `state`, and return the new state with the first complete stop string.

        That is its end in `text` and its length, or 0 and 0. After a match feed nothing more.
        """
        if not state and self._first.isdisjoint(text):
            return 0, 0, 0
        for end, character in enumerate(text, 1):
            state = self.step(state, character)
            if self._ends[state]:
                return state, end, self._ends[state]
        return state, 0, 0

    def _shortest_first(self, following: Sequence[str]) -> Iterator[tuple[int, str, int]]:
        """All transitions to a longer state, those from shorter states first."""
        branches: dict[int, list[tuple[str, int]]] = {}
        for (state, character), to in self._branches.items():
            branches.setdefault(state, []).append((character, to))
        todo = deque([0])
        while todo:
            state = todo.popleft()
            ways = branches.get(state, [])
            if following[state]:
                ways = [(following[state], state + 1), *ways]
            for character, to in ways:
                yield state, character, to
                todo.append(to)


class StopSearch:
    """The search in one text.

    The result does not depend on how the text is cut into pieces. It is the match that ends first, and the
    longest of those that end at the same place.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0

    @property
    def n_open(self) -> int:
        """The number of characters at the text's end that may be the beginning of a stop string."""
        return self._stops.depth(self._state)

    def feed(self, text: str) -> tuple[int, int] | None:
        """The end in `text` and the length of the first complete stop string. After a match feed nothing."""
        self._state, end, length = self._stops.feed(self._state, text)
        return (end, length) if length else None
