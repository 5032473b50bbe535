"""Sequences of tokens that an output must not contain."""

from collections.abc import Iterable, Sequence

import numpy as np


class BadWords:
    """The sequences of a request, indexed so that each iteration can check quickly; immutable.

    The last token of a sequence must not follow the others, whether those are in the prompt or the output, as
    in Hugging Face. Takes four bytes per token; compares only sequences whose second last token is the
    newest.
    """

    def __init__(self, sequences: Iterable[Sequence[int]] = ()) -> None:
        self._always = set[int]()  # sequences of one token
        # By second last token: the tokens before the last, and the last.
        self._after: dict[int, list[tuple[bytes, int]]] = {}
        self.longest = 0  # tokens of history that the comparison needs
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
        """Approximate memory of the sequences."""
        return sum(128 + len(before) for group in self._after.values() for before, _ in group)

    def completed_by(self, history: "History") -> set[int]:
        """The tokens that would complete a sequence."""
        group = self._after.get(history.newest)
        if not group:
            return self._always
        ends_with = history.tokens.endswith
        return self._always.union([last for before, last in group if ends_with(before)])


class History:
    """At least the newest `n_kept` tokens of a prompt and its output, as bytes."""

    def __init__(self, prompt_ids: Sequence[int], n_kept: int) -> None:
        self.tokens = bytearray(_as_bytes(prompt_ids[max(0, len(prompt_ids) - n_kept) :]))
        self.newest = prompt_ids[-1] if prompt_ids else -1
        self._n_kept = max(n_kept, 1)
        self._n_output = 0

    def follow(self, output_ids: Sequence[int]) -> None:
        """Add the output tokens since the last call."""
        if len(output_ids) == self._n_output:
            return
        self.tokens += _as_bytes(output_ids[self._n_output :])
        self.newest = output_ids[-1]
        self._n_output = len(output_ids)
        if len(self.tokens) > 8 * (self._n_kept + 64):
            del self.tokens[: -4 * self._n_kept]


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, np.int32).tobytes()
