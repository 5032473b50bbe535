"""The Attention K/V manager: which blocks of slots, and which row, each request holds (ORCA 4.2, 5).

A slot is room for one token's key and value in every layer. A block is `block_size` contiguous slots, the
unit of allocation. When a request is admitted it gets all blocks for its `max_tokens` at once, and when it
ends it returns all of them at once.
"""

import numpy as np
import numpy.typing as npt


def round_up(n_tokens: int, block_size: int) -> int:
    """Tokens rounded up to whole blocks, so that every reservation can be allocated."""
    return -(-n_tokens // block_size) * block_size


class KVManager:
    """Allocates blocks and rows. `reserve` and `release` cost O(blocks of the request).

    `block_table` is int32 `[n_rows, max_blocks_per_row]`: the blocks of each row in token order, padded with
    0. The blocks of a request need not be contiguous. Free blocks and rows are stacks: the last released is
    the first reused, while it may still be in a cache. `n_reserved` `[n_rows]` counts the reservations of
    each row, which distinguishes successive requests in the same row.
    """

    def __init__(self, *, n_blocks: int, block_size: int, n_rows: int, max_blocks_per_row: int) -> None:
        assert min(n_blocks, block_size, n_rows, max_blocks_per_row) >= 1
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.n_rows = n_rows
        self.block_table: npt.NDArray[np.int32] = np.zeros((n_rows, max_blocks_per_row), np.int32)
        self.n_reserved: npt.NDArray[np.int64] = np.zeros(n_rows, np.int64)
        # A stack: the first `_n_free_blocks` entries are free. Block 0 starts on top and is allocated first.
        self._free_blocks: npt.NDArray[np.int32] = np.arange(n_blocks - 1, -1, -1, dtype=np.int32)
        self._n_free_blocks = n_blocks
        self._free_rows = list(range(n_rows - 1, -1, -1))
        self._n_blocks_of = [0] * n_rows  # 0: the row is free

    @property
    def n_free_blocks(self) -> int:
        return self._n_free_blocks

    @property
    def n_free_rows(self) -> int:
        return len(self._free_rows)

    def blocks_of(self, row: int) -> npt.NDArray[np.int32]:
        """The blocks of `row` in token order: a view, `[n]` int32."""
        return self.block_table[row, : self._n_blocks_of[row]]

    def reserve(self, max_tokens: int) -> int:
        """Allocate a row and blocks for `max_tokens` tokens; returns the row.

        The scheduler has checked that they are free (Algorithm 1, line 25).
        """
        n = -(-max_tokens // self.block_size)
        top = self._n_free_blocks
        assert 1 <= n <= top, f"{n} blocks requested, {top} free"
        assert n <= self.block_table.shape[1], f"{n} blocks requested, a row has {self.block_table.shape[1]}"
        assert self._free_rows, "no free row"
        row = self._free_rows.pop()
        self.block_table[row, :n] = self._free_blocks[top - n : top][::-1]
        self._n_free_blocks = top - n
        self._n_blocks_of[row] = n
        self.n_reserved[row] += 1
        return row

    def release(self, row: int) -> None:
        """Free the row and all its blocks, for reuse at once (Algorithm 1, line 14)."""
        n = self._n_blocks_of[row] if 0 <= row < self.n_rows else 0
        assert n > 0, f"row {row} is not reserved"
        top = self._n_free_blocks
        self._free_blocks[top : top + n] = self.block_table[row, :n][::-1]
        self.block_table[row, :n] = 0
        self._n_free_blocks = top + n
        self._n_blocks_of[row] = 0
        self._free_rows.append(row)
