"""Drafts from a text that the client expects the output to follow: OpenAI's predicted outputs."""

from bisect import bisect_left
from collections.abc import Sequence

_N = 3  # tokens after which an output that has left the prediction follows it again
MOST_PREDICTED = 1 << 14  # tokens, which bounds the time and memory of the index


class Prediction:
    """A predicted output in tokens, for any number of outputs."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = tuple(ids[:MOST_PREDICTED])
        self._places = dict[tuple[int, ...], list[int]]()  # where each `_N` tokens begin, ascending
        for i in range(len(self.ids) - _N + 1):
            self._places.setdefault(self.ids[i : i + _N], []).append(i)

    def after(self, last_ids: Sequence[int], start: int) -> int | None:
        """The index after the first place of the last `_N` tokens that begins at `start` or later."""
        places = self._places.get(tuple(last_ids[-_N:]), [])
        i = bisect_left(places, start)
        return places[i] + _N if i < len(places) else None


class PredictedOutput:
    """A Drafter of one output, which may leave its prediction and follow it again further on."""

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction
        self._n_read = 0
        self._next = 0  # the index of the predicted token that comes next, or of the first not yet passed
        self._n_astray = 0  # output tokens since the output left the prediction
        self.n_accepted = 0  # predicted tokens that are in the output, in this order

    @property
    def n_rejected(self) -> int:
        """Predicted tokens that are not in the output."""
        return len(self._prediction.ids) - self.n_accepted

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        self.read(output_ids)
        return () if self._n_astray else self._prediction.ids[self._next : self._next + n]

    def read(self, output_ids: Sequence[int]) -> None:
        """Follow the output, which begins with what was read before."""
        ids = self._prediction.ids
        for i in range(self._n_read, len(output_ids)):
            if not self._n_astray and ids[self._next : self._next + 1] == (output_ids[i],):
                self._next += 1
                self.n_accepted += 1
                continue
            self._n_astray += 1
            found = self._prediction.after(output_ids[max(0, i + 1 - _N) : i + 1], self._next)
            if found is not None:
                self.n_accepted += min(_N, self._n_astray)
                self._next, self._n_astray = found, 0
        self._n_read = len(output_ids)
