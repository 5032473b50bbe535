"""The Attention K/V manager: which blocks of slots, and which row, each request holds (ORCA 4.2, 5).

A slot is room for one token's key and value in every layer. A block is `block_size` contiguous slots, the
unit of allocation. In Algorithm 1 a request gets all blocks for its `max_tokens` when it is admitted. With
reservation on demand it gets those of its prompt, and grows. With a prefix cache it may share its first
blocks with other requests. When it ends it returns all of them at once.

A beam search has a row for each beam. They hold full blocks together, and each has a last one of its own, to
which it writes. Where two beams continue one, the second gets a row whose beam nothing continues, and a copy
of the last block if there is anything in it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orca_jax.scheduling.prefix_cache import PrefixCache


def round_up(n_tokens: int, block_size: int) -> int:
    """Tokens rounded up to whole blocks, so that every reservation can be allocated."""
    return -(-n_tokens // block_size) * block_size


def most_blocks(n_before: int, n_slots: int, n_beams: int, block_size: int) -> int:
    """The most blocks that beams of `n_slots` slots take if `n_before` were in use when they parted."""
    n_shared = n_before // block_size
    return n_shared + n_beams * (-(-n_slots // block_size) - n_shared)


@dataclass(slots=True)
class _Beams:
    """The rows of a beam search: of its beams in their order, and those without one, which hold no blocks.

    All beams hold the first `n_common` blocks from the first step to the end. `n_promised` counts free blocks
    that no other request may take; None: there are none, and it grows on demand.
    """

    rows: list[int]
    idle: list[int]
    n_promised: int | None
    n_common: int = 0


class KVManager:
    """Allocates blocks and rows. All methods cost O(blocks concerned).

    `block_table` is int32 `[n_rows, max_blocks_per_row]`: the blocks of each row in token order, padded with
    0. The blocks of a request need not be contiguous. Free blocks and rows are stacks: the last released is
    the first reused, while it may still be in a cache. `n_reserved` `[n_rows]` counts the reservations of
    each row, which distinguishes successive requests in the same row. `slots_of` has the number of slots that
    each row holds, 0 if it is free, and so its last entry, that of row -1.

    With an encoder, a row begins with `encoder_blocks` blocks for the keys and values that cross attention
    reads, at most `max_encoder_blocks` beside those of its tokens; `slots_of` does not count them.

    `copies` of blocks, (from, to), are to be made before the next iteration that is issued.

    With `prefix_caching`, `prefixes` finds full blocks by their contents. They stay in the cache after the
    request that computed them, until their room is needed. Blocks of different `namespace`s, such as models,
    never have the same hash, nor have those of engines with different `hash_seed`s.
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
        self.hash_seed = ""  # to be set before the first request
        self.max_encoder_blocks = max_encoder_blocks
        self._most_blocks = max_blocks_per_row
        n_places = max_blocks_per_row + max_encoder_blocks
        self.block_table: npt.NDArray[np.int32] = np.zeros((n_rows, n_places), np.int32)
        self.n_reserved: npt.NDArray[np.int64] = np.zeros(n_rows, np.int64)
        self.slots_of = [0] * (n_rows + 1)
        self.encoder_blocks: npt.NDArray[np.int32] = np.zeros(n_rows, np.int32)
        self.prefixes = PrefixCache() if prefix_caching else None
        # A stack. Block 0 starts on top and is allocated first.
        self._free_blocks = list(range(n_blocks - 1, -1, -1))
        self._free_rows = list(range(n_rows - 1, -1, -1))
        self._n_users = [0] * n_blocks if prefix_caching else []  # requests that hold the block
        self.copies: Sequence[tuple[int, int]] = ()
        self._beams: dict[int, _Beams] = {}  # of beam searches, by the request's row
        self._n_promised = 0
        # [n_blocks] int32: the beams that hold the block, if they do not all hold it from the first step on.
        self._n_beams: npt.NDArray[np.int32] = np.zeros(n_blocks, np.int32)

    @property
    def n_free_blocks(self) -> int:
        """Blocks that can be allocated: no row holds them, and none is promised to a beam search."""
        n, prefixes = len(self._free_blocks) - self._n_promised, self.prefixes
        return n if prefixes is None else n + prefixes.n_idle

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
        """How many blocks would be free after the release of these rows: those that no other request holds.

        A beam search is named by its request's row.
        """
        if self.prefixes is None and not self._beams:
            return sum(len(self.blocks_of(row)) for row in rows)
        n_promised = sum(self._beams[row].n_promised or 0 for row in rows if row in self._beams)
        holds = Counter(block for row in rows for block in self._held(row).tolist())
        if self.prefixes is None:
            return n_promised + len(holds)
        return n_promised + sum(self._n_users[block] == n for block, n in holds.items())

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
        n_held, n = self.slots_of[row] // self.block_size, -(-n_tokens // self.block_size)
        if n <= n_held:
            return
        self._check(n_held, n)
        first = int(self.encoder_blocks[row]) if self.max_encoder_blocks else 0
        self._allocate(row, first + n_held, first + n)
        self.slots_of[row] = n * self.block_size

    def release(self, row: int) -> int:
        """Free the row and its blocks, for reuse at once (Algorithm 1, line 14).

        Returns how many blocks no row holds any more. Those in the prefix cache stay there until their room
        is needed, the last blocks of a request less long than its first.
        """
        if row in self._beams:
            return self._release_beams(row)
        assert 0 <= row < self.n_rows and self.slots_of[row], f"row {row} is not reserved"
        n_released = self._free(self.blocks_of(row))
        self._end_row(row)
        return n_released

    def forget(self) -> None:
        """Empty the prefix cache: the contents of all blocks are lost."""
        if self.prefixes is not None:
            self._free_blocks += self.prefixes.clear()

    # Beam searches. They are named by the row that their request was admitted to.

    def begin_beams(self, row: int, n_beams: int, n_most: int | None = None) -> None:
        """Let the request in `row` have `n_beams` beams: one for now. It gets that many rows at once.

        `n_most` blocks, including those that the row holds, are reserved for it; None: it grows on demand.
        """
        n_promised = None if n_most is None else n_most - len(self.blocks_of(row))
        assert (n_promised or 0) <= self.n_free_blocks, f"{n_promised} blocks promised"
        self._n_promised += n_promised or 0
        idle = [self._start_row() for _ in range(n_beams - 1)]
        self.encoder_blocks[idle] = self.encoder_blocks[row]
        self._beams[row] = _Beams([row], idle, n_promised)

    @property
    def has_beams(self) -> bool:
        """Whether any admitted request is a beam search."""
        return bool(self._beams)

    def rows_of(self, row: int) -> Sequence[int]:
        """The rows of the request admitted to `row`: those of its beams in their order, or this one."""
        beams = self._beams.get(row)
        return [row] if beams is None else beams.rows

    def n_for_beams(self, row: int, n_beams: int, n_slots: int) -> int:
        """How many blocks `continue_beams` takes from those that are free, at most."""
        beams = self._beams[row]
        if beams.n_promised is not None:
            return 0
        if n_slots >= self.slots_of[beams.rows[0]]:
            return n_beams
        return max(0, n_beams - len(beams.rows))

    def continue_beams(self, row: int, parents: Sequence[int], n_slots: int) -> list[tuple[int, int]]:
        """Let beam i continue what was beam `parents[i]`, with room for a token after its `n_slots` slots.

        Returns the copies to make before that: pairs of blocks, from and to.
        """
        beams, old = self._beams[row], self._beams[row].rows
        n_full, n_in_last = divmod(n_slots, self.block_size)
        n_full += int(self.encoder_blocks[row])
        if len(old) == 1 < len(parents):
            beams.n_common = n_full
            self._n_beams[self.blocks_of(old[0])[n_full:]] = 1
        heirs = set(parents)
        left = beams.idle + [one for i, one in enumerate(old) if i not in heirs]
        rows: list[int] = []
        copies: list[tuple[int, int]] = []
        for parent in parents:
            source = old[parent]
            if source not in rows:
                rows.append(source)
                continue
            rows.append(left.pop())
            self._hold_too(beams, rows[-1], source, n_full)
            if n_in_last:
                table = self.block_table
                copies.append((int(table[source, n_full]), int(table[rows[-1], n_full])))
        for one in left:
            if self.slots_of[one]:
                self._lose(beams, self.blocks_of(one)[beams.n_common :])
                self.blocks_of(one)[:] = 0
                self.slots_of[one] = 0
        beams.rows, beams.idle = rows, left
        for one in rows:
            self._grow_beam(beams, one, n_slots + 1)
        return copies

    def _hold_too(self, beams: _Beams, row: int, source: int, n_full: int) -> None:
        """Let `row` begin with the first `n_full` blocks of `source`, and have a last one like it."""
        table, common = self.block_table, beams.n_common
        self._n_beams[table[source, common:n_full]] += 1
        if self.slots_of[row]:
            self._lose(beams, table[row, common:n_full])
        else:
            self.slots_of[row] = (n_full - int(self.encoder_blocks[row])) * self.block_size
        table[row, :n_full] = table[source, :n_full]
        self._grow_beam(beams, row, self.slots_of[source])

    def _grow_beam(self, beams: _Beams, row: int, n_slots: int) -> None:
        n_new = self.n_blocks_for(n_slots) - self.slots_of[row] // self.block_size
        if n_new <= 0:
            return
        if beams.n_promised is not None:
            beams.n_promised -= n_new
            self._n_promised -= n_new
            assert beams.n_promised >= 0, "the beams take more blocks than they can need"
        self.grow(row, n_slots)
        self._n_beams[self.blocks_of(row)[-n_new:]] = 1

    def _lose(self, beams: _Beams, blocks: npt.NDArray[np.int32]) -> None:
        """One beam less holds these blocks, which are all different; those of none are free."""
        self._n_beams[blocks] -= 1
        unused = blocks[self._n_beams[blocks] == 0]
        self._free(unused)
        if beams.n_promised is not None:
            beams.n_promised += len(unused)
            self._n_promised += len(unused)

    def _release_beams(self, row: int) -> int:
        held, beams = self._held(row), self._beams.pop(row)
        self._n_promised -= beams.n_promised or 0
        self._n_beams[held] = 0
        n_released = self._free(held) + (beams.n_promised or 0)
        for one in (*beams.rows, *beams.idle):
            self._end_row(one)
        return n_released

    def _held(self, row: int) -> npt.NDArray[np.int32]:
        """The blocks of a row, or of all beams of a search, each once."""
        beams = self._beams.get(row)
        if beams is None or len(beams.rows) == 1:
            return self.blocks_of(row if beams is None else beams.rows[0])
        own = np.unique(np.concatenate([self.blocks_of(one)[beams.n_common :] for one in beams.rows]))
        return np.concatenate([self.block_table[beams.rows[0], : beams.n_common], own])

    # Blocks.

    def _free(self, blocks: npt.NDArray[np.int32]) -> int:
        """One request less holds each of these blocks; returns how many no request holds any more."""
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

    def _end_row(self, row: int) -> None:
        self.block_table[row, : len(self.blocks_of(row))] = 0
        self.slots_of[row] = self.encoder_blocks[row] = 0
        self._free_rows.append(row)

    def _check(self, n_held: int, n: int) -> None:
        """Whether a row of `n_held` blocks may grow to `n` blocks."""
        assert n_held < n, f"{n} blocks requested, {n_held} held"
        assert n - n_held <= self.n_free_blocks, f"{n - n_held} blocks requested, {self.n_free_blocks} free"
        assert n <= self._most_blocks, f"{n} blocks requested, a row has {self._most_blocks}"

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

    def _share(self, row: int, blocks: Sequence[int]) -> None:
        """Begin `row` with these cached blocks."""
        assert self.prefixes is not None
        for block in blocks:
            if self._n_users[block] == 0:
                self.prefixes.hold(block)
            self._n_users[block] += 1
        self.block_table[row, : len(blocks)] = blocks
        self.slots_of[row] = len(blocks) * self.block_size
