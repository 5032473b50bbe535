"""Sequences of tokens that an output must not have."""

from collections.abc import Iterable, Sequence

import numpy as np


class BadWords:
    """The sequences, kept so that each iteration can ask quickly; made once for a request, never changed.

    The last token of one may not follow the others, be they of the prompt or of the output, as Hugging Face
    has it. Four bytes a token; only those are compared whose token before the last is the newest one.
    """

    def __init__(self, sequences: Iterable[Sequence[int]] = ()) -> None:
        self._always = set[int]()  # those of one token
        self._after: dict[int, list[tuple[bytes, int]]] = {}  # what must stand before, and the last one
        self.longest = 0  # tokens of history that it takes to tell
        for sequence in dict.fromkeys(map(tuple, sequences)):
            *before, last = sequence
            if not before:
                self._always.add(last)
                continue
            self._after.setdefault(before[-1], []).append((_as_bytes(before), last))
            self.longest = max(self.longest, len(before))

    def __bool__(self) -> bool:
        return bool(self._always or self._after)

    @property
    def n_bytes(self) -> int:
        """About what the sequences take."""
        return sum(128 + len(before) for group in self._after.values() for before, _ in group)

    def completed_by(self, history: "History") -> set[int]:
        """The tokens that would complete one."""
        group = self._after.get(history.newest)
        if not group:
            return self._always
        ends_with = history.tokens.endswith
        return self._always.union([last for before, last in group if ends_with(before)])


class History:
    """The newest `n_kept` tokens of a prompt and its output, or some more, as bytes."""

    def __init__(self, prompt_ids: Sequence[int], n_kept: int) -> None:
        self.tokens = bytearray(_as_bytes(prompt_ids[max(0, len(prompt_ids) - n_kept) :]))
        self.newest = prompt_ids[-1] if prompt_ids else -1
        self._n_kept = max(n_kept, 1)
        self._n_output = 0

    def follow(self, output_ids: Sequence[int]) -> None:
        """Take the tokens of the output that came since the last call."""
        if len(output_ids) == self._n_output:
            return
        self.tokens += _as_bytes(output_ids[self._n_output :])
        self.newest = output_ids[-1]
        self._n_output = len(output_ids)
        if len(self.tokens) > 8 * (self._n_kept + 64):
            del self.tokens[: -4 * self._n_kept]


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, np.int32).tobytes()
