"""Drafts from the request's own text: what followed its last tokens where they stood before.

Good for outputs that repeat their input: edits, summaries, answers from a passage, code. The idea is prompt
lookup decoding (Saxena, 2023).
"""

from collections.abc import Sequence

_N = 3  # tokens that must agree; shorter sequences recur by chance
_INDEXED = 1 << 14  # the last tokens of a prompt, which bounds the time and memory of the index


class NgramDrafter:
    """A Drafter that copies from the newest earlier place with the same last `_N` tokens.

    The index of these places grows by one entry for each output token, so a draft costs the same however long
    the request is.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        ids = self._ids = list(prompt_ids[-_INDEXED:])
        self._n_output = 0
        # The place after the last occurrence of each `_N` tokens that have a successor.
        self._after = dict(zip(zip(ids, ids[1:], ids[2:], strict=False), range(_N, len(ids)), strict=False))

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        ids = self._ids
        for token_id in output_ids[self._n_output :]:
            if len(ids) >= _N:
                self._after[ids[-3], ids[-2], ids[-1]] = len(ids)
            ids.append(token_id)
        self._n_output = len(output_ids)
        start = self._after.get((ids[-3], ids[-2], ids[-1])) if len(ids) >= _N else None
        if start is None:
            return ()
        # Past the end the copy goes on with what it has copied: a text that repeats itself keeps doing so.
        period = len(ids) - start
        return ids[start : start + n] if n <= period else [ids[start + i % period] for i in range(n)]
