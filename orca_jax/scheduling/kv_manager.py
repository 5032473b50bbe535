"""The Attention K/V manager: which blocks of slots, and which row, each request holds (ORCA 4.2, 5).

A slot is room for one token's key and value in every layer. A block is `block_size` contiguous slots, the
unit of allocation. In Algorithm 1 a request gets all blocks for its `max_tokens` when it is admitted. With
reservation on demand it gets those of its prompt, and grows. With a prefix cache it may share its first
blocks with other requests. When it ends it returns all of them at once.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from orca_jax.scheduling.prefix_cache import PrefixCache


def round_up(n_tokens: int, block_size: int) -> int:
    """Tokens rounded up to whole blocks, so that every reservation can be allocated."""
    return -(-n_tokens // block_size) * block_size


class KVManager:
    """Allocates blocks and rows. All methods cost O(blocks concerned).

    `block_table` is int32 `[n_rows, max_blocks_per_row]`: the blocks of each row in token order, padded with
    0. The blocks of a request need not be contiguous. Free blocks and rows are stacks: the last released is
    the first reused, while it may still be in a cache. `n_reserved` `[n_rows]` counts the reservations of
    each row, which distinguishes successive requests in the same row. `slots_of` has the number of slots that
    each row holds, 0 if it is free.

    With an encoder, a row begins with `encoder_blocks` blocks for the keys and values that cross attention
    reads, at most `max_encoder_blocks` beside those of its tokens; `slots_of` does not count them.

    With `prefix_caching`, `prefixes` finds full blocks by their contents. They stay in the cache after the
    request that computed them, until their room is needed. Blocks of different `namespace`s, such as models,
    never have the same hash.
    """

    def __init__(
        self,
        *,
        n_blocks: int,
        block_size: int,
        n_rows: int,
        max_blocks_per_row: int,
        max_encoder_blocks: int = 0,
        prefix_caching: bool = False,
        namespace: str = "",
    ) -> None:
        assert min(n_blocks, block_size, n_rows, max_blocks_per_row) >= 1
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.n_rows = n_rows
        self.namespace = namespace
        self.max_encoder_blocks = max_encoder_blocks
        n_places = max_blocks_per_row + max_encoder_blocks
        self.block_table: npt.NDArray[np.int32] = np.zeros((n_rows, n_places), np.int32)
        self.n_reserved: npt.NDArray[np.int64] = np.zeros(n_rows, np.int64)
        self.slots_of = [0] * n_rows
        self.encoder_blocks: npt.NDArray[np.int32] = np.zeros(n_rows, np.int32)
        self.prefixes = PrefixCache() if prefix_caching else None
        # A stack: the first `_n_free_blocks` entries are free. Block 0 starts on top and is allocated first.
        self._free_blocks: npt.NDArray[np.int32] = np.arange(n_blocks - 1, -1, -1, dtype=np.int32)
        self._n_free_blocks = n_blocks
        self._free_rows = list(range(n_rows - 1, -1, -1))
        self._n_users = [0] * n_blocks if prefix_caching else []  # rows that hold the block

    @property
    def n_free_blocks(self) -> int:
        """Blocks that can be allocated: no row holds them."""
        prefixes = self.prefixes
        return self._n_free_blocks if prefixes is None else self._n_free_blocks + prefixes.n_idle

    @property
    def n_free_rows(self) -> int:
        return len(self._free_rows)

    def n_blocks_for(self, n_tokens: int) -> int:
        """The number of blocks that `n_tokens` take."""
        return -(-n_tokens // self.block_size)

    def blocks_of(self, row: int) -> npt.NDArray[np.int32]:
        """All blocks of `row`, the encoder's first: a view, `[n]` int32."""
        n = int(self.encoder_blocks[row]) + self.slots_of[row] // self.block_size
        return self.block_table[row, :n]

    def n_released(self, rows: Sequence[int]) -> int:
        """How many blocks would be free after the release of these rows: those that no other row holds."""
        if self.prefixes is None:
            return sum(len(self.blocks_of(row)) for row in rows)
        holds = Counter(block for row in rows for block in self.blocks_of(row).tolist())
        return sum(self._n_users[block] == n for block, n in holds.items())

    def n_idle(self, blocks: Sequence[int]) -> int:
        """How many of these cached blocks no row holds."""
        return sum(self._n_users[block] == 0 for block in blocks)

    def reserve(self, max_tokens: int, n_encoder: int = 0) -> int:
        """Allocate a row and blocks for `max_tokens` tokens and `n_encoder` of an encoder; returns the row.

        The scheduler has checked that they are free (Algorithm 1, line 25).
        """
        self._check(0, self.n_blocks_for(max_tokens))
        row = self._start_row()
        if n_encoder:
            self._begin_with_encoder(row, n_encoder)
        self.grow(row, max_tokens)
        return row

    def reserve_sharing(self, wanted: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
        """Like `reserve`, for several requests: the tokens of each, and the cached blocks it begins with.

        Every cached block is held before anything is allocated, which may evict others.
        """
        rows = [self._start_row() for _ in wanted]
        for row, (_, shared) in zip(rows, wanted, strict=True):
            if shared:
                self._share(row, shared)
        for row, (n_tokens, _) in zip(rows, wanted, strict=True):
            self.grow(row, n_tokens)
        return rows

    def grow(self, row: int, n_tokens: int) -> None:
        """Allocate blocks until `row` has room for `n_tokens` tokens."""
        n_held = self.slots_of[row] // self.block_size
        n = self.n_blocks_for(n_tokens)
        if n <= n_held:
            return
        self._check(n_held, n)
        first = int(self.encoder_blocks[row])
        self._allocate(row, first + n_held, first + n)
        self.slots_of[row] = n * self.block_size

    def release(self, row: int) -> int:
        """Free the row and its blocks, for reuse at once (Algorithm 1, line 14).

        Returns how many blocks no row holds any more. Those in the prefix cache stay there until their room
        is needed, the last blocks of a request less long than its first.
        """
        assert 0 <= row < self.n_rows and self.slots_of[row], f"row {row} is not reserved"
        blocks = self.blocks_of(row)[::-1]
        n = n_released = len(blocks)
        if self.prefixes is None:
            top = self._n_free_blocks
            self._free_blocks[top : top + n] = blocks
            self._n_free_blocks = top + n
        else:
            n_released = sum(self._give_up(block, self.prefixes) for block in blocks.tolist())
        self.block_table[row, :n] = 0
        self.slots_of[row] = self.encoder_blocks[row] = 0
        self._free_rows.append(row)
        return n_released

    def forget(self) -> None:
        """Empty the prefix cache: the contents of all blocks are lost."""
        if self.prefixes is not None:
            for block in self.prefixes.clear():
                self._push(block)

    def _check(self, n_held: int, n: int) -> None:
        """Whether a row of `n_held` blocks may grow to `n` blocks."""
        assert n_held < n, f"{n} blocks requested, {n_held} held"
        assert n - n_held <= self.n_free_blocks, f"{n - n_held} blocks requested, {self.n_free_blocks} free"
        most = self.block_table.shape[1] - self.max_encoder_blocks
        assert n <= most, f"{n} blocks requested, a row has {most}"

    def _start_row(self) -> int:
        assert self._free_rows, "no free row"
        row = self._free_rows.pop()
        self.n_reserved[row] += 1
        return row

    def _begin_with_encoder(self, row: int, n_tokens: int) -> None:
        n = self.n_blocks_for(n_tokens)
        assert n <= self.max_encoder_blocks, f"{n} blocks for an encoder, of {self.max_encoder_blocks}"
        self._allocate(row, 0, n)
        self.encoder_blocks[row] = n

    def _allocate(self, row: int, first: int, end: int) -> None:
        """Blocks for the places `first` to `end` of a row's table."""
        n_new = end - first
        while self._n_free_blocks < n_new:
            assert self.prefixes is not None
            self._push(self.prefixes.evict())
        top = self._n_free_blocks
        new = self._free_blocks[top - n_new : top][::-1]
        self.block_table[row, first:end] = new
        self._n_free_blocks = top - n_new
        if self.prefixes is not None:
            for block in new.tolist():
                self._n_users[block] = 1

    def _share(self, row: int, blocks: Sequence[int]) -> None:
        """Begin `row` with these cached blocks."""
        assert self.prefixes is not None
        for block in blocks:
            if self._n_users[block] == 0:
                self.prefixes.hold(block)
            self._n_users[block] += 1
        self.block_table[row, : len(blocks)] = blocks
        self.slots_of[row] = len(blocks) * self.block_size

    def _give_up(self, block: int, prefixes: PrefixCache) -> bool:
        """One row less holds the block; whether it was the last."""
        self._n_users[block] -= 1
        if self._n_users[block]:
            return False
        if not prefixes.release(block):
            self._push(block)
        return True

    def _push(self, block: int) -> None:
        self._free_blocks[self._n_free_blocks] = block
        self._n_free_blocks += 1
