"""The Attention K/V manager: which blocks of slots, and which row, belong to which request (ORCA 4.2, 5).

A slot is room for one token's key and value in every layer; a block is `block_size` slots side by side,
the unit that is handed out. A request gets all its blocks at once when it is admitted, for as many tokens
as it may ever have (`max_tokens`), and gives all of them back at once when it ends.
"""

import numpy as np
import numpy.typing as npt


def round_up(n_tokens: int, block_size: int) -> int:
    """Tokens rounded up to whole blocks, so that what is reserved can always be allocated."""
    return -(-n_tokens // block_size) * block_size


class KVManager:
    """Hands out blocks and rows; both calls cost O(blocks of the request), whatever else is held.

    `block_table` is int32 `[n_rows, max_blocks_per_row]`: the blocks of a row's tokens in their order, and 0
    where there is none. Blocks of one request need not be neighbours. Free blocks and rows are stacks: what
    came back last goes out first, while it may still be in a cache. `n_reserved` `[n_rows]` counts how often
    each row was reserved, which tells the requests that had it apart.
    """

    def __init__(self, *, n_blocks: int, block_size: int, n_rows: int, max_blocks_per_row: int) -> None:
        assert min(n_blocks, block_size, n_rows, max_blocks_per_row) >= 1
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.n_rows = n_rows
        self.block_table: npt.NDArray[np.int32] = np.zeros((n_rows, max_blocks_per_row), np.int32)
        self.n_reserved: npt.NDArray[np.int64] = np.zeros(n_rows, np.int64)
        # The free ones stand below the top; the lowest number on top, so that a fresh table counts up.
        self._free_blocks: npt.NDArray[np.int32] = np.arange(n_blocks - 1, -1, -1, dtype=np.int32)
        self._n_free_blocks = n_blocks
        self._free_rows = list(range(n_rows - 1, -1, -1))
        self._n_blocks_of = [0] * n_rows  # 0: nobody has this row

    @property
    def n_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._n_free_blocks

    @property
    def n_free_rows(self) -> int:
        """Rows that nobody holds."""
        return len(self._free_rows)

    def blocks_of(self, row: int) -> npt.NDArray[np.int32]:
        """The blocks that `row` holds, in the order of its tokens: a view, `[n]` int32."""
        return self.block_table[row, : self._n_blocks_of[row]]

    def reserve(self, max_tokens: int) -> int:
        """Take a row and blocks for `max_tokens` tokens; returns the row.

        The scheduler has made sure that they are there (Algorithm 1, line 25).
        """
        n = -(-max_tokens // self.block_size)
        top = self._n_free_blocks
        assert 1 <= n <= top, f"{n} blocks asked for, {top} free"
        assert n <= self.block_table.shape[1], f"{n} blocks in a row of {self.block_table.shape[1]}"
        assert self._free_rows, "no free row"
        row = self._free_rows.pop()
        self.block_table[row, :n] = self._free_blocks[top - n : top][::-1]
        self._n_free_blocks = top - n
        self._n_blocks_of[row] = n
        self.n_reserved[row] += 1
        return row

    def release(self, row: int) -> None:
        """Give the row and all its blocks back; they can be reserved again at once (Algorithm 1, line 14)."""
        n = self._n_blocks_of[row] if 0 <= row < self.n_rows else 0
        assert n > 0, f"nobody has row {row}"
        top = self._n_free_blocks
        self._free_blocks[top : top + n] = self.block_table[row, :n][::-1]
        self.block_table[row, :n] = 0
        self._n_free_blocks = top + n
        self._n_blocks_of[row] = 0
        self._free_rows.append(row)
