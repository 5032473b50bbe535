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
    """A Drafter that copies from the newest earlier place with the same last `_N` tokens.

    The index of these places grows by one entry for each output token, so a draft costs the same however long
    the request is.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._ids = list[int]()
        self._n_output = 0
        self._last = _LAST  # the last `_N` ids
        self._after = dict[int, int]()  # the place after the last occurrence of each `_N` ids
        self._read(prompt_ids[-_INDEXED:])

    def _read(self, new_ids: Sequence[int]) -> None:
        after, last = self._after, self._last
        for place, token_id in enumerate(new_ids, len(self._ids)):
            after[last] = place
            last = (last << _BITS | token_id) & _LAST
        self._last = last
        self._ids += new_ids

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        self._read(output_ids[self._n_output :])
        self._n_output = len(output_ids)
        ids, start = self._ids, self._after.get(self._last)
        if start is None:
            return ()
        # Past the end the copy goes on with what it has copied: a text that repeats itself keeps doing so.
        period = len(ids) - start
        return ids[start : start + n] if n <= period else (ids[start:] * (n // period + 1))[:n]
