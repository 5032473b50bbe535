"""What there is to do in one iteration, as one array of records that the kernel's thread blocks take in turn.

Made once per iteration, from `row_start` and `kv_length` alone, and used by every layer. Heads are not in it:
tile i of head h is item i * N + h, entry i of key/value head h is piece i * K + h.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

_TILE = 128  # query tokens of a tile
_CHUNK = 64  # keys of a slot; ranges of keys begin at multiples of it
HEADER = 1  # records before the first tile


class Record(NamedTuple):
    """The columns of a record, all int32."""

    row: int = 0
    token: int = 1  # the first query's index
    n_queries: int = 2
    position: int = 3  # the first query's position within its request
    begin: int = 4  # the first key
    end: int = 5  # the key after the last
    slot: int = 6  # where the result of a piece waits to be merged; -1 where it is the whole
    n_pieces: int = 7  # of the row, in its first entry


ENTRY = Record()


@dataclass(frozen=True, slots=True)
class Plan:
    """The static bounds of the list: T tokens, R rows, K key/value heads, G query heads of each."""

    n_tokens: int
    n_rows: int
    n_kv_heads: int
    group: int
    n_cores: int = 132

    @property
    def max_tiles(self) -> int:
        """Tiles at most: full ones, and one that is not for each row of two tokens or more, and padding."""
        return -(-self.n_tokens // _TILE) + min(self.n_rows, self.n_tokens // 2) + 1

    @property
    def max_pieces(self) -> int:
        """Pieces of one row at most: enough that few rows fill the cores' warp groups four times over."""
        return max(4, min(32, -(-8 * self.n_cores // (self.n_rows * self.n_kv_heads))))

    @property
    def max_entries(self) -> int:
        """(row, range of keys) at most."""
        return self.n_rows + self._spare

    @property
    def _spare(self) -> int:
        return max(4, -(-8 * self.n_cores // self.n_kv_heads))

    @property
    def padded_group(self) -> int:
        """Query heads read for a piece: whole eights."""
        return -(-self.group // 8) * 8


def work_items(row_start: jax.Array, kv_length: jax.Array, plan: Plan) -> jax.Array:
    """`row_start` [R + 1], `kv_length` [R] int32: [1 + max_tiles + max_entries, 8] int32.

    The first record holds the number of tiles and of entries. Then come the tiles, those of the last tokens
    first (in a long row they have the most keys), then the entries, a row's pieces side by side.
    """
    n_rows = plan.n_rows
    input_length = jnp.diff(row_start)
    single = input_length == 1

    # Tiles: those of rows with several tokens, and those of padding, which see no key and so get zeros.
    length = jnp.append(jnp.where(single, 0, input_length), plan.n_tokens - row_start[-1])  # [R + 1]
    start = row_start
    n_keys = jnp.append(kv_length, 0)
    tiles_of_row = -(-length // _TILE)
    n_tiles = tiles_of_row.sum(dtype=jnp.int32)
    before = jnp.cumsum(tiles_of_row) - tiles_of_row
    index = n_tiles - 1 - jnp.arange(plan.max_tiles, dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(before + tiles_of_row, index, side="right"), 0, n_rows).astype(jnp.int32)
    first = (index - before[row]) * _TILE
    n_queries = jnp.minimum(length[row] - first, _TILE)
    position = jnp.where(row == n_rows, 0, n_keys[row] - length[row] + first)
    end = jnp.where(row == n_rows, 0, position + n_queries)
    zero = jnp.zeros_like(row)
    tiles = jnp.stack(
        [jnp.minimum(row, n_rows - 1), start[row] + first, n_queries, position, zero, end, zero, zero], 1
    )

    # Entries: as many pieces as the rest of the list allows, of one length for all rows.
    chunks = jnp.where(single, -(-kv_length // _CHUNK), 0)  # [R]
    n_single = single.sum(dtype=jnp.int32)
    spare = plan.max_entries - n_single
    least = jnp.maximum(-(-chunks.max() // plan.max_pieces), 4)
    length = jnp.maximum(-(-chunks.sum(dtype=jnp.int32) // jnp.maximum(spare, 1)), least)  # chunks of a piece
    pieces = -(-chunks // length)  # [R]
    n_entries = pieces.sum(dtype=jnp.int32)
    before = jnp.cumsum(pieces) - pieces
    index = jnp.arange(plan.max_entries, dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(before + pieces, index, side="right"), 0, n_rows - 1).astype(jnp.int32)
    which = index - before[row]
    begin = which * length * _CHUNK
    end = jnp.minimum(begin + length * _CHUNK, kv_length[row])
    one = jnp.ones_like(row)
    slot = jnp.where(pieces[row] > 1, index, -1)
    entries = jnp.stack([row, row_start[row], one, kv_length[row] - 1, begin, end, slot, pieces[row]], 1)

    header = jnp.zeros((HEADER, 8), jnp.int32).at[0, 0].set(n_tiles).at[0, 1].set(n_entries)
    return jnp.concatenate([header, tiles.astype(jnp.int32), entries.astype(jnp.int32)])


def merge(
    out: jax.Array, part: jax.Array, part_top: jax.Array, work: jax.Array, row_start: jax.Array, plan: Plan
) -> jax.Array:
    """Put the rows that were split into pieces together, in `out` [T, N, D].

    part [2, max_entries * K, G, D]: each piece's result and what its rounding took away; part_top
    [max_entries * K, padded G] float32: the logarithm to base 2 of each piece's weight.
    """
    entries = work[HEADER + plan.max_tiles :]
    row, slot = entries[:, ENTRY.row], entries[:, ENTRY.slot]
    there = (jnp.arange(plan.max_entries) < work[0, 1]) & (slot >= 0)
    where = jnp.where(there, row, plan.n_rows)
    n_kv, group, head_size = plan.n_kv_heads, plan.group, out.shape[-1]
    weight = part_top.reshape(plan.max_entries, n_kv, -1)[..., :group]  # [E, K, G]
    weight = jnp.where(there[:, None, None], weight, -jnp.inf)
    top = jax.ops.segment_max(weight, where, plan.n_rows + 1)  # [R + 1, K, G]
    weight = jnp.where(there[:, None, None], jnp.exp2(weight - top[where]), 0)
    attended = part.astype(jnp.float32).sum(axis=0).reshape(plan.max_entries, n_kv, group, head_size)
    attended = jnp.where(there[:, None, None, None], attended * weight[..., None], 0)
    sums = jax.ops.segment_sum(attended, where, plan.n_rows)
    total = jax.ops.segment_sum(weight, where, plan.n_rows)
    merged = (sums / jnp.maximum(total, 1e-30)[..., None]).reshape(plan.n_rows, -1, head_size)
    split = jax.ops.segment_max(there.astype(jnp.int32), where, plan.n_rows) > 0
    return out.at[jnp.where(split, row_start[:-1], plan.n_tokens)].set(merged.astype(out.dtype), mode="drop")
