"""A suffix automaton of a growing sequence: every subsequence of it, in memory proportional to its length.

A state stands for subsequences that end at the same places, and knows one of these places. The construction
is Blumer et al.'s (1985): a token adds one or two states, and takes constant time on average.
"""

from array import array

_NEWEST = 16  # states to which a new occurrence is noted: those of its longest suffixes
# Bytes of a state in the arrays, and of the dict of a state with several successors, with its entries.
_STATE_BYTES, _DICT_BYTES, _ENTRY_BYTES = 20, 280, 32


class SuffixAutomaton:
    """The subsequences of `ids`, which `append` extends. State 0 is the empty sequence, -1 is none.

    A state's successor by the token that follows its first place is in an array, and a state with others has
    a dict of those: most have none.
    """

    def __init__(self) -> None:
        self.ids = array("i")
        self.newest = 0  # the state of the whole sequence
        self.matched = 0  # tokens of its longest suffix that it has at an earlier place too
        self.after = 0  # the index after that place: the newest one, or an older one
        self.length = array("i", [0])  # by state: tokens of its longest subsequence
        self.link = array("i", [-1])  # by state: the state of its longest suffix that ends at more places
        self.end = array("i", [0])  # by state: the index after its newest place, or an older one
        self._first = array("i", [0])  # by state: the index after its first place
        self._next = array("i", [-1])  # by state: the successor by `ids[_first]`
        self._others: dict[int, dict[int, int]] = {}
        self._n_entries = 0

    @property
    def n_bytes(self) -> int:
        """An estimate of the memory in bytes."""
        n_states, n_dicts = len(self.length), len(self._others)
        return (
            4 * len(self.ids)
            + _STATE_BYTES * n_states
            + _DICT_BYTES * n_dicts
            + _ENTRY_BYTES * self._n_entries
        )

    def successor(self, state: int, token_id: int) -> int:
        """The state of the sequences of `state` followed by the token; -1 if they never were."""
        first = self._first[state]
        if first < len(self.ids) and self.ids[first] == token_id:
            return self._next[state]
        others = self._others.get(state)
        return -1 if others is None else others.get(token_id, -1)

    def append(self, token_id: int) -> None:
        """Extend the sequence."""
        ids, length, link, first, following = self.ids, self.length, self.link, self._first, self._next
        state = self.newest
        n = len(ids) + 1
        new = self._new_state(n, n)
        ids.append(token_id)
        following[state] = new  # the whole sequence ended at its first place
        state = link[state]
        to = -1
        while state >= 0 and (to := self.successor(state, token_id)) < 0:
            self._add(state, token_id, new)
            state = link[state]
        if state < 0:
            link[new] = 0
        elif length[to] == length[state] + 1:
            link[new] = to
        else:  # only the shorter subsequences of `to` end here too: they get a state of their own
            copy = self._new_state(length[state] + 1, first[to])
            self.end[copy] = self.end[to]
            link[copy], following[copy] = link[to], following[to]
            others = self._others.get(to)
            if others is not None:
                self._others[copy] = others.copy()
                self._n_entries += len(others)
            link[to] = link[new] = copy
            while state >= 0 and self.successor(state, token_id) == to:
                self._set(state, token_id, copy)
                state = link[state]
        self.newest = new
        state = link[new]
        self.matched, self.after = length[state], self.end[state]
        for _ in range(_NEWEST):
            if state <= 0:
                break
            self.end[state] = n
            state = link[state]

    def step(self, state: int, matched: int, token_id: int) -> tuple[int, int]:
        """Follow another text by a token: the state and length of its longest suffix that this one has.

        `state` and `matched` are those before the token.
        """
        length, link = self.length, self.link
        while state and length[link[state]] >= matched:  # `append` has split the state
            state = link[state]
        while (to := self.successor(state, token_id)) < 0:
            state = link[state]
            if state < 0:
                return 0, 0
            matched = length[state]
        return to, matched + 1

    def _new_state(self, length: int, first: int) -> int:
        self.length.append(length)
        self.link.append(-1)
        self.end.append(first)
        self._first.append(first)
        self._next.append(-1)
        return len(self.length) - 1

    def _set(self, state: int, token_id: int, to: int) -> None:
        if self.ids[self._first[state]] == token_id:
            self._next[state] = to
        else:
            self._others[state][token_id] = to

    def _add(self, state: int, token_id: int, to: int) -> None:
        self._others.setdefault(state, {})[token_id] = to
        self._n_entries += 1
