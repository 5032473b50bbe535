"""Blocks of slots, and the rows of the block table that hold them: the unit of allocation (ORCA 4.2, 5)."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from orca_jax.scheduling.draft_states import DraftStates
from orca_jax.scheduling.host_tier import HostTier
from orca_jax.scheduling.prefix_cache import PrefixCache
from orca_jax.scheduling.snapshots import Snapshots


def round_up(n_tokens: int, block_size: int) -> int:
    """Tokens rounded up to whole blocks, so that every reservation can be allocated."""
    return -(-n_tokens // block_size) * block_size


class Blocks:
    """Allocates blocks and rows. All methods cost O(blocks concerned).

    `block_table` is int32 `[n_rows, max_blocks_per_row]`: the blocks of each row in token order, padded with
    0. The blocks of a request need not be contiguous. Free blocks and rows are stacks: the last released is
    the first reused, while it may still be in a cache. `n_reserved` `[n_rows]` counts the reservations of
    each row, which distinguishes successive requests in the same row. `slots_of` has the number of slots that
    each row holds, 0 for a free one. Its extra last entry is always 0: requests that wait have row -1.

    A row begins with `encoder_blocks` fixed blocks, at most `max_encoder_blocks`, in addition to its tokens'
    blocks; `slots_of` does not count them. Now they hold what cross attention reads of an encoder.

    With `prefix_caching`, `prefixes` keeps full blocks after the request that computed them has ended, until
    they are evicted. For a model with recurrent layers it has `n_snapshots` of their states, one every
    `snapshot_blocks` blocks of a prompt. `draft_states` keeps `n_draft_states` states of drafted rows.
    `host` keeps up to `n_host_blocks` evicted blocks, and `host_states` up to `n_host_states` evicted
    snapshots. `n_promised` counts free blocks that are promised to running beam searches.
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
        n_snapshots: int = 0,
        n_draft_states: int = 0,
        snapshot_blocks: int = 64,
        n_host_blocks: int = 0,
        n_host_states: int = 0,
    ) -> None:
        assert min(n_blocks, block_size, n_rows, max_blocks_per_row) >= 1
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.n_rows = n_rows
        self.max_encoder_blocks = max_encoder_blocks
        self._most_blocks = max_blocks_per_row
        n_places = max_blocks_per_row + max_encoder_blocks
        self.block_table: npt.NDArray[np.int32] = np.zeros((n_rows, n_places), np.int32)
        self.n_reserved: npt.NDArray[np.int64] = np.zeros(n_rows, np.int64)
        self.slots_of = [0] * (n_rows + 1)
        self.encoder_blocks: npt.NDArray[np.int32] = np.zeros(n_rows, np.int32)
        self.host: HostTier | None = None
        self.host_states: HostTier | None = None
        if n_host_blocks:
            assert prefix_caching, "the host tier is a part of the prefix cache"
            assert (n_host_states > 0) == (n_snapshots > 0), (
                "a recurrent layer goes on from blocks and a state"
            )
            self.host = HostTier(n_host_blocks)
            self.host_states = HostTier(n_host_states) if n_host_states else None
        self.snapshots: Snapshots | None = None
        if n_snapshots:
            assert prefix_caching, "snapshots are a part of the prefix cache"
            self.snapshots = Snapshots(
                n_snapshots,
                n_rows=n_rows,
                block_size=block_size,
                every=snapshot_blocks,
                host=self.host_states,
            )
        self.draft_states: DraftStates | None = None  # None: no drafts, or no recurrent layers
        if n_draft_states:
            self.draft_states = DraftStates(n_draft_states, first=n_rows + n_snapshots)
        self.prefixes = PrefixCache(self.snapshots, self.host) if prefix_caching else None
        self.n_promised = 0
        # A stack. Block 0 starts on top and is allocated first.
        self._free_blocks = list(range(n_blocks - 1, -1, -1))
        self._free_rows = list(range(n_rows - 1, -1, -1))
        self._n_users = [0] * n_blocks if prefix_caching else []  # requests that hold the block

    @property
    def n_free_blocks(self) -> int:
        """Blocks that can be allocated: no row holds them, and none is promised to a beam search."""
        n, prefixes = len(self._free_blocks) - self.n_promised, self.prefixes
        return n if prefixes is None else n + prefixes.n_idle

    @property
    def n_free_rows(self) -> int:
        return len(self._free_rows)

    def n_blocks_for(self, n_tokens: int) -> int:
        """The number of blocks that hold `n_tokens` tokens."""
        return -(-n_tokens // self.block_size)

    def blocks_of(self, row: int) -> npt.NDArray[np.int32]:
        """All blocks of `row`, the encoder's first: a view, `[n]` int32."""
        n = int(self.encoder_blocks[row]) + self.slots_of[row] // self.block_size
        return self.block_table[row, :n]

    def n_idle(self, blocks: Sequence[int]) -> int:
        """The number of these cached blocks that no row holds."""
        return sum(self._n_users[block] == 0 for block in blocks)

    def n_freed(self, n_holders: Mapping[int, int]) -> int:
        """The number of these blocks that are free once `n_holders[block]` requests have released each."""
        if self.prefixes is None:
            return len(n_holders)
        return sum(self._n_users[block] == n for block, n in n_holders.items())

    def grow(self, row: int, n_tokens: int) -> None:
        """Allocate blocks until `row` has room for `n_tokens` tokens."""
        n_held, n = self.slots_of[row] // self.block_size, self.n_blocks_for(n_tokens)
        if n <= n_held:
            return
        self.check(n_held, n)
        first = int(self.encoder_blocks[row]) if self.max_encoder_blocks else 0
        self.allocate(row, first + n_held, first + n)
        self.slots_of[row] = n * self.block_size

    def start_row(self) -> int:
        assert self._free_rows, "no free row"
        row = self._free_rows.pop()
        self.n_reserved[row] += 1
        return row

    def end_row(self, row: int) -> None:
        self.block_table[row, : len(self.blocks_of(row))] = 0
        self.slots_of[row] = self.encoder_blocks[row] = 0
        if self.snapshots is not None:
            self.snapshots.release(row)
        if self.draft_states is not None:
            self.draft_states.release(row)
        self._free_rows.append(row)

    def allocate(self, row: int, first: int, end: int) -> None:
        """Allocate blocks for the entries `first` to `end` of a row's table."""
        free, n_new = self._free_blocks, end - first
        while len(free) < n_new:
            assert self.prefixes is not None
            free.append(self.prefixes.evict())
        if n_new == 1:  # as a decode grows
            new = [free.pop()]
            self.block_table[row, first] = new[0]
        else:
            new = free[: -n_new - 1 : -1]
            del free[-n_new:]
            self.block_table[row, first:end] = new
        if self.prefixes is not None:
            for block in new:
                self._n_users[block] = 1

    def share(self, row: int, blocks: Sequence[int]) -> None:
        """Begin `row` with these cached blocks."""
        assert self.prefixes is not None
        for block in blocks:
            if self._n_users[block] == 0:
                self.prefixes.hold(block)
            self._n_users[block] += 1
        self.block_table[row, : len(blocks)] = blocks
        self.slots_of[row] = len(blocks) * self.block_size

    def free(self, blocks: npt.NDArray[np.int32]) -> int:
        """Let one request release these blocks; returns how many no request holds any more."""
        last_first = blocks[::-1].tolist()
        if self.prefixes is None:
            self._free_blocks += last_first
            return len(last_first)
        unused: list[int] = []
        for block in last_first:
            self._n_users[block] -= 1
            if not self._n_users[block]:
                unused.append(block)
        self._free_blocks += self.prefixes.release(unused)
        return len(unused)

    def forget(self) -> None:
        """Empty the prefix cache and its host tier: the contents of all blocks are lost."""
        if self.draft_states is not None:
            self.draft_states.clear()
        if self.prefixes is not None:
            self._free_blocks += self.prefixes.clear()

    def check(self, n_held: int, n: int) -> None:
        """Assert that a row of `n_held` blocks may grow to `n` blocks."""
        assert n_held < n, f"{n} blocks requested, {n_held} held"
        assert n - n_held <= self.n_free_blocks, f"{n - n_held} blocks requested, {self.n_free_blocks} free"
        assert n <= self._most_blocks, f"{n} blocks requested, a row has {self._most_blocks}"
