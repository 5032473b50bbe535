"""The blocks of beam searches.

A search has a row of the block table for each beam; the row that its request was admitted to names it. Beams
share full blocks. Each beam writes to a last block that it shares with none. Where two beams continue the
same one, the second takes the row of a beam that ends, and a copy of the last block unless that is empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orca_jax.scheduling.blocks import Blocks


def most_blocks(n_before: int, n_slots: int, n_beams: int, block_size: int) -> int:
    """The most blocks that beams of `n_slots` slots take if they share the first `n_before` slots."""
    n_shared = n_before // block_size
    return n_shared + n_beams * (-(-n_slots // block_size) - n_shared)


@dataclass(slots=True)
class _Beams:
    """The rows of a beam search: `rows` of its beams in order, and `idle` ones, which hold no blocks.

    All beams hold the first `n_common` blocks from the first step to the end. `n_promised` counts free blocks
    that no other request may take; None if the search grows on demand and is promised nothing.
    """

    rows: list[int]
    idle: list[int]
    n_promised: int | None
    n_common: int = 0


class BeamBlocks:
    """The rows and blocks that the beams of each search hold. A search returns all of them when it ends."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._of: dict[int, _Beams] = {}  # by the request's row
        # [n_blocks] int32: the number of beams that hold each block, without the common blocks of a search.
        self._n_beams: npt.NDArray[np.int32] = np.zeros(blocks.n_blocks, np.int32)

    def __bool__(self) -> bool:
        """Whether any admitted request is a beam search."""
        return bool(self._of)

    def __contains__(self, row: int) -> bool:
        return row in self._of

    def begin(self, row: int, n_beams: int, n_most: int | None = None) -> None:
        """Begin a search of up to `n_beams` beams in `row`. It has one beam at first, but all its rows.

        `n_most` blocks, including those that the row holds, are reserved for it; None: it grows on demand.
        """
        n_promised = None if n_most is None else n_most - len(self._blocks.blocks_of(row))
        assert (n_promised or 0) <= self._blocks.n_free_blocks, f"{n_promised} blocks promised"
        self._blocks.n_promised += n_promised or 0
        idle = [self._blocks.start_row() for _ in range(n_beams - 1)]
        self._blocks.encoder_blocks[idle] = self._blocks.encoder_blocks[row]
        self._of[row] = _Beams([row], idle, n_promised)

    def rows_of(self, row: int) -> Sequence[int]:
        """The rows of the request admitted to `row`: its beams' rows in order, or only `row`."""
        beams = self._of.get(row)
        return [row] if beams is None else beams.rows

    def n_to_grow(self, row: int, n_beams: int, n_slots: int) -> int:
        """The most free blocks that the next `proceed` takes."""
        beams = self._of[row]
        if beams.n_promised is not None:
            return 0
        if n_slots >= self._blocks.slots_of[beams.rows[0]]:
            return n_beams
        return max(0, n_beams - len(beams.rows))

    def proceed(self, row: int, parents: Sequence[int], n_slots: int) -> list[tuple[int, int]]:
        """Let new beam i continue the old beam `parents[i]`, with room for a token after `n_slots` slots.

        Returns the blocks to copy first, as pairs (from, to).
        """
        beams, old = self._of[row], self._of[row].rows
        n_full, n_in_last = divmod(n_slots, self._blocks.block_size)
        n_full += int(self._blocks.encoder_blocks[row])
        if len(old) == 1 < len(parents):
            beams.n_common = n_full
            self._n_beams[self._blocks.blocks_of(old[0])[n_full:]] = 1
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
            self._share_full(beams, rows[-1], source, n_full)
            if n_in_last:
                table = self._blocks.block_table
                copies.append((int(table[source, n_full]), int(table[rows[-1], n_full])))
        for one in left:
            if self._blocks.slots_of[one]:
                self._lose(beams, self._blocks.blocks_of(one)[beams.n_common :])
                self._blocks.blocks_of(one)[:] = 0
                self._blocks.slots_of[one] = 0
        beams.rows, beams.idle = rows, left
        for one in rows:
            self._grow_beam(beams, one, n_slots + 1)
        return copies

    def _share_full(self, beams: _Beams, row: int, source: int, n_full: int) -> None:
        """Let `row` begin with the first `n_full` blocks of `source`, and give it a last block of its own."""
        table, common = self._blocks.block_table, beams.n_common
        self._n_beams[table[source, common:n_full]] += 1
        if self._blocks.slots_of[row]:
            self._lose(beams, table[row, common:n_full])
        else:
            self._blocks.slots_of[row] = (
                n_full - int(self._blocks.encoder_blocks[row])
            ) * self._blocks.block_size
        table[row, :n_full] = table[source, :n_full]
        self._grow_beam(beams, row, self._blocks.slots_of[source])

    def _grow_beam(self, beams: _Beams, row: int, n_slots: int) -> None:
        n_new = self._blocks.n_blocks_for(n_slots) - self._blocks.slots_of[row] // self._blocks.block_size
        if n_new <= 0:
            return
        if beams.n_promised is not None:
            beams.n_promised -= n_new
            self._blocks.n_promised -= n_new
            assert beams.n_promised >= 0, "the beams take more blocks than they can need"
        self._blocks.grow(row, n_slots)
        self._n_beams[self._blocks.blocks_of(row)[-n_new:]] = 1

    def _lose(self, beams: _Beams, blocks: npt.NDArray[np.int32]) -> None:
        """Let one beam release these blocks, which are all different, and free those that no beam holds."""
        self._n_beams[blocks] -= 1
        unused = blocks[self._n_beams[blocks] == 0]
        self._blocks.free(unused)
        if beams.n_promised is not None:
            beams.n_promised += len(unused)
            self._blocks.n_promised += len(unused)

    def release(self, row: int) -> int:
        """End the search; returns how many blocks no request holds any more."""
        held, beams = self.held(row), self._of.pop(row)
        self._blocks.n_promised -= beams.n_promised or 0
        self._n_beams[held] = 0
        n_released = self._blocks.free(held) + (beams.n_promised or 0)
        for one in (*beams.rows, *beams.idle):
            self._blocks.end_row(one)
        return n_released

    def held(self, row: int) -> npt.NDArray[np.int32]:
        """The blocks of a row, or of all beams of a search without duplicates."""
        beams = self._of.get(row)
        if beams is None or len(beams.rows) == 1:
            return self._blocks.blocks_of(row if beams is None else beams.rows[0])
        parted = [self._blocks.blocks_of(one)[beams.n_common :] for one in beams.rows]
        common = self._blocks.block_table[beams.rows[0], : beams.n_common]
        return np.concatenate([common, np.unique(np.concatenate(parted))])

    def promised(self, row: int) -> int:
        """The free blocks that are promised to the search in `row`."""
        return self._of[row].n_promised or 0 if row in self._of else 0
