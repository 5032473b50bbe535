"""Recurrent layers' states after each token of a drafted row, so that a rejected draft can be undone.

A drafted row computes a request's newest token and drafts after it. The state after its last token replaces
the one at the request's row, and the states after the others are kept at places of their own until it is
known which drafts were right. If all were, the row's state is the right one. Otherwise the state after the
last right draft is copied to the row before the next iteration.
"""


class DraftStates:
    """`n` places for states, as states from `first` on.

    Iterations run in the order of issue. So a place is free again as soon as the answer is there: the copy
    from it comes with the next issued iteration, before that one writes to any place.
    """

    def __init__(self, n: int, *, first: int) -> None:
        self.n = n
        # Of the next issued iteration: the states to copy before it, (place, row), and the places that keep
        # the states after a row's first tokens, (row, place) in the order of the tokens.
        self.undone: list[tuple[int, int]] = []
        self.kept: list[tuple[int, int]] = []
        self._free = list(range(first + n - 1, first - 1, -1))  # a stack
        # Of rows with drafts in flight: the tokens before the row, and its places.
        self._held: dict[int, tuple[int, list[int]]] = {}
        self._undo: dict[int, int] = {}  # by row, the place that has its state

    @property
    def n_free(self) -> int:
        """The number of drafts whose states can be kept."""
        return len(self._free)

    def begin(self) -> None:
        """Begin the next issued iteration: what is undone is undone in it."""
        self.undone = [(place, row) for row, place in self._undo.items()]
        self._undo.clear()
        self.kept = []

    def keep(self, row: int, n_computed: int, n_tokens: int) -> list[int]:
        """Keep the states after the first `n_tokens` - 1 tokens of a row that has `n_computed` before them.

        Returns their places.
        """
        assert row not in self._held, f"row {row} has drafts in flight"
        places = [self._free.pop() for _ in range(n_tokens - 1)]
        self._held[row] = n_computed, places
        self.kept += [(row, place) for place in places]
        return places

    def settle(self, row: int, n_computed: int) -> bool:
        """Take note that of the row's tokens `n_computed` are right; whether it had drafts in flight."""
        held = self._held.pop(row, None)
        if held is None:
            return False
        before, places = held
        self._free += places
        n_right = n_computed - before
        assert n_right > 0, "a row's first token is no draft"
        if n_right <= len(places):
            self._undo[row] = places[n_right - 1]
        return True

    def release(self, row: int) -> None:
        """End a row, perhaps with drafts that nobody waits for."""
        self._undo.pop(row, None)
        held = self._held.pop(row, None)
        if held is not None:
            self._free += held[1]

    def clear(self) -> None:
        """Forget all, because the contents are lost."""
        for row in [*self._held]:
            self.release(row)
        self._undo.clear()
        self.begin()
