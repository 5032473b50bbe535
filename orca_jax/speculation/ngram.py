"""Drafts from the request's own text: what followed its last tokens where they stood before.

Good for outputs that repeat their input: edits, summaries, answers from a passage, code. The idea is prompt
lookup decoding (Saxena, 2023).
"""

from collections.abc import Sequence

_N = 3  # tokens that must agree; shorter sequences recur by chance
_BITS = 22  # of a token id; the last `_N` ids are one number, which takes less time to find than a tuple
_LAST = (1 << _N * _BITS) - 1  # the bits of `_N` ids; and the number before a text begins
_INDEXED = 1 << 14  # the last tokens of a prompt, which bounds the time and memory of the index


class NgramDrafter:
    """A Drafter that copies on from where it copied last, or from the newest place with the same last tokens.

    It copies on while the output follows the copy, and else looks for an earlier place with the same last
    `_N` tokens. The index of these places grows by an entry for each token, but only when it is needed, so
    that drafts which are right cost the least; a draft costs the same however long the request is.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._ids = list(prompt_ids[-_INDEXED:])
        self._n_output = 0
        self._next = -1  # the place of the copy's next token; -1 without a copy
        self._n_indexed = 0
        self._last = _LAST  # the last `_N` of these ids
        self._after = dict[int, int]()  # the place after the last occurrence of each `_N` ids

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        ids, start = self._ids, self._next
        new_ids = output_ids[self._n_output :]
        self._n_output = len(output_ids)
        ids += new_ids
        end = start + len(new_ids)
        # Past its end the copy goes on with what it has copied: a text that repeats itself keeps doing so.
        if start < 0 or ids[start:end] != new_ids:
            end = self._newest_place()
        self._next = end
        if end < 0:
            return ()
        period = len(ids) - end
        return ids[end : end + n] if n <= period else (ids[end:] * (n // period + 1))[:n]

    def _newest_place(self) -> int:
        """The place after the last earlier occurrence of the last `_N` ids; -1 if there is none."""
        ids, after, last = self._ids, self._after, self._last
        for place in range(self._n_indexed, len(ids)):
            after[last] = place
            last = (last << _BITS | ids[place]) & _LAST
        self._n_indexed, self._last = len(ids), last
        return after.get(last, -1)
