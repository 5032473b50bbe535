"""What there is to do in one iteration, as one array of records that the kernel's thread blocks take in turn.

Made once per iteration, from `row_start` and `kv_length` alone, and used by every layer. Heads are not in it:
tile i of head h is item i * N + h, entry i of key/value head h is piece i * K + h.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array = TypeVar("Array", np.ndarray, jax.Array)

_TILE = 128  # query tokens of a tile
_CHUNK = 64  # keys of a slot; ranges of keys begin at multiples of it
_LEAST_CHUNKS = 4  # of a piece of a split row: less is not worth a merge
HEADER = 1  # records before the first tile


class Record(NamedTuple):
    """The columns of a record, all int32."""

    row: int = 0
    token: int = 1  # the first query's index; of a merge that of its result, T where there is none
    n_queries: int = 2
    position: int = 3  # the first query's position within its request
    begin: int = 4  # the first key
    end: int = 5  # the key after the last
    slot: int = 6  # where a piece's result waits, -1 where it is the whole; of a merge, its first piece's
    n_pieces: int = 7  # of the row


ENTRY = Record()


@dataclass(frozen=True, slots=True)
class Plan:
    """The static bounds of the list: T tokens, R rows, K key/value heads, G query heads of each.

    Pieces are as long as the batch at hand asks for, or always `fixed_keys` long, so that how a row is split
    does not depend on other rows; see `fixed`.
    """

    n_tokens: int
    n_rows: int
    n_kv_heads: int
    group: int
    n_cores: int = 132
    fixed_keys: int = 0

    def fixed(self, max_keys: int) -> "Plan":
        """The same with pieces of one length, the shortest with which `max_keys` keys of every row fit."""
        most = min(self.max_pieces, self.max_entries // self.n_rows)
        chunks = max(_LEAST_CHUNKS, -(-max_keys // (_CHUNK * most)))
        return replace(self, fixed_keys=chunks * _CHUNK)

    @property
    def max_tiles(self) -> int:
        """Tiles at most: full ones, and one that is not for each row of two tokens or more, and padding."""
        return -(-self.n_tokens // _TILE) + min(self.n_rows, self.n_tokens // 2) + 1

    @property
    def max_pieces(self) -> int:
        """Pieces of one row at most: enough that few rows fill the cores' warp groups four times over."""
        return max(4, min(31, -(-8 * self.n_cores // (self.n_rows * self.n_kv_heads))))

    @property
    def split_above(self) -> int:
        """Keys that a row has more of before it is split: fewer are one piece, whatever the batch."""
        return _LEAST_CHUNKS * _CHUNK

    @property
    def max_entries(self) -> int:
        """(row, range of keys) at most."""
        return self.n_rows + self._spare

    @property
    def first_entry(self) -> int:
        """The record of the first entry."""
        return HEADER + self.max_tiles

    @property
    def first_merge(self) -> int:
        """The record of the first row's merge."""
        return self.first_entry + self.max_entries

    @property
    def n_records(self) -> int:
        """Records of the list: the header, tiles, entries, and a merge for each row."""
        return self.first_merge + self.n_rows

    @property
    def _spare(self) -> int:
        return max(4, -(-8 * self.n_cores // self.n_kv_heads))

    @property
    def padded_group(self) -> int:
        """Query heads read for a piece: whole eights."""
        return -(-self.group // 8) * 8


def work_items(row_start: Array, kv_length: Array, plan: Plan) -> Array:
    """`row_start` [R + 1], `kv_length` [R] int32: [plan.n_records, 8] int32, numpy or JAX as `row_start` is.

    The first record holds the number of tiles and of entries. Then come the tiles, those of the last tokens
    first (in a long row they have the most keys), then the entries, a row's pieces side by side, and last for
    each row where to merge its pieces.
    """
    xp: Any = jnp if isinstance(row_start, jax.Array) else np
    start = row_start[:-1]
    input_length = row_start[1:] - start  # [R]
    single = input_length == 1

    # Tiles: those of rows with several tokens, and those of padding, which see no key and so get zeros.
    length = xp.append(input_length * ~single, plan.n_tokens - row_start[-1])  # [R + 1]
    n_keys = xp.append(kv_length, length[-1:])  # so that padding's first position is 0
    n_tiles, row, which = _spread(-(-length // _TILE), plan.max_tiles, xp, backward=True)
    first = which * _TILE
    n_queries = xp.minimum(length[row] - first, _TILE)
    position = (n_keys - length)[row] + first
    end = (position + n_queries) * (row < plan.n_rows)
    row_or_last = xp.minimum(row, plan.n_rows - 1)
    zero = xp.zeros(plan.max_tiles, int)
    tiles = xp.stack([row_or_last, row_start[row] + first, n_queries, position, zero, end, zero, zero], 1)

    # Entries: as many pieces as the rest of the list allows, of one length for all rows.
    chunks = -(-kv_length // _CHUNK) * single  # [R]
    spare = xp.maximum(plan.max_entries - single.sum(), 1)
    length = xp.maximum(-(-chunks.sum() // spare), -(-chunks.max() // plan.max_pieces))
    length = xp.maximum(length, _LEAST_CHUNKS)  # chunks of a piece
    if plan.fixed_keys:
        length = plan.fixed_keys // _CHUNK
    pieces = -(-chunks // length)  # [R]
    n_entries, row, which = _spread(pieces, plan.max_entries, xp)
    n_keys, n_pieces = kv_length[row], pieces[row]
    begin = which * (length * _CHUNK)
    end = xp.minimum(begin + length * _CHUNK, n_keys)
    slot = xp.where(n_pieces > 1, xp.arange(plan.max_entries), -1)
    entries = xp.stack(
        [row, start[row], xp.ones(plan.max_entries, int), n_keys - 1, begin, end, slot, n_pieces], 1
    )

    row, zero = xp.arange(plan.n_rows), xp.zeros(plan.n_rows, int)
    token = xp.where(pieces > 1, start, plan.n_tokens + row)  # each row's own
    merges = xp.stack([row, token, zero, zero, zero, zero, pieces.cumsum() - pieces, pieces], 1)

    header = xp.array([[n_tiles, n_entries, 0, 0, 0, 0, 0, 0]])
    return xp.concatenate([header, tiles, entries, merges], dtype=xp.int32)


def _spread(count: Array, n: int, xp: Any, *, backward: bool = False) -> tuple[Any, Array, Array]:
    """Count [R] units of each row in a list of n: how many there are, and of each its row and which it is."""
    end = count.cumsum()
    total = end[-1]
    index = total - 1 - xp.arange(n) if backward else xp.arange(n)
    row = xp.minimum(end.searchsorted(index, side="right"), len(count) - 1)
    return total, row, index - (end - count)[row]
