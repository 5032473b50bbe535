"""The sizes and the work list of one compiled grouped product, and the products that it supports.

Weights are the matrix instruction's first operand and rows its second one, which may be as short as 8: with
few rows per expert, little of a tile is padding. The list is made on the device, where the sizes of
the groups are.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

COLUMNS = 64  # result columns (rows of a weight) in a warp group's tile: the height of the instruction
STEP = 64  # elements of a row that one step multiplies: 128 bytes, the widest swizzle
ALIGNED = 8  # rows that are swizzled together; copies of tiles begin at a multiple of it
_NARROWEST = 16  # elements of a row in the narrowest swizzle
DTYPES = ("bfloat16", "float16")
_MOST_ROWS = 128
_SHARED_BYTES = 226 * 1024  # a Hopper block has 227 KiB, and the barriers need some
_MOST_SLOTS = 12


def unsupported(n_out: int, n_in: int, x_dtype: str, weight_dtype: str) -> str | None:
    """Why the kernel cannot multiply by weights [out, in] of these sizes, as a clause; None if it can."""
    if x_dtype not in DTYPES or weight_dtype != x_dtype:
        return f"rows are {x_dtype} and weights {weight_dtype}; both must be one of {', '.join(DTYPES)}"
    # Copies of results write all columns of a warp group's tile, so the result must have them all.
    if n_out % COLUMNS or n_in % _NARROWEST or not n_out or not n_in:
        multiples = f"multiples of {COLUMNS} and {_NARROWEST}, and not 0"
        return f"an expert's weight is {n_out} x {n_in}; they must be {multiples}"
    return None


@dataclass(frozen=True, slots=True)
class ProductShape:
    """The static sizes of one compiled kernel: x [N, in], N a multiple of 8, and weight [X, out, in]."""

    n_rows: int
    n_experts: int
    n_out: int
    n_in: int
    n_cores: int
    interpret: bool

    @property
    def tile_rows(self) -> int:
        """Rows of a tile: a power of two, at least 8, twice as many as an expert has on average.

        Empty rows of a tile cost operations; another tile costs another read of the weight, from the cache or
        from memory.
        """
        rows = ALIGNED
        while rows < _MOST_ROWS and rows * self.n_experts < 2 * self.n_rows:
            rows *= 2
        return rows

    @property
    def max_tiles(self) -> int:
        """The most tiles of rows, when each group's first tile may begin up to 7 rows before the group."""
        hit = min(self.n_rows, self.n_experts)
        return hit + (self.n_rows + (ALIGNED - 2) * hit) // self.tile_rows

    @property
    def column_tiles(self) -> int:
        """Tiles of a result's columns; two warp groups share each."""
        return -(-self.n_out // (2 * COLUMNS))

    @property
    def swizzled(self) -> int:
        """Elements of a row that are swizzled together: the most, up to a step's, that divide the row."""
        return next(n for n in (STEP, STEP // 2, _NARROWEST) if self.n_in % n == 0)

    @property
    def n_steps(self) -> int:
        """Steps of a product; copies fill in zeros after the end of a row."""
        return -(-self.n_in // STEP)

    @property
    def n_slots(self) -> int:
        """Slots of the ring in shared memory, each with one step of a weight's tile and of the rows'."""
        slot = (2 * COLUMNS + self.tile_rows) * STEP * 2
        results = 2 * self.tile_rows * COLUMNS * 2
        return min(3 if self.interpret else _MOST_SLOTS, (_SHARED_BYTES - results) // slot)


def tile_table(sizes: jax.Array, shape: ProductShape) -> jax.Array:
    """The work list [1 + max_tiles, 8] int32 for groups of `sizes` [X] rows.

    The first record has the number of tiles of rows; an item is one of them and a tile of columns. Then comes
    a record for each tile of rows: its group, and that group's first tile, number of tiles, first row and
    end. A group's tiles begin at the last multiple of 8 at or before its first row, so they may include rows
    of other groups.
    """
    row_end = cumulative(sizes)
    row = row_end - sizes
    n_covered = row_end - row // ALIGNED * ALIGNED
    tiles = jnp.where(sizes > 0, -(-n_covered // shape.tile_rows), 0)
    # Both sums are one launch, and `tiles`, which nothing else reads, is none.
    tile_end, first_tile = cumulative(tiles), cumulative(tiles, before=True)
    # [records, columns, X]. A sum over X is one launch for all columns; gathers are several. The first record
    # sums all groups' tiles.
    record, group = jnp.arange(1 + shape.max_tiles)[:, None, None], jnp.arange(len(sizes))
    is_count = record == 0
    of_group = is_count | ((record > first_tile) & (record <= tile_end))
    n_tiles = tile_end - first_tile
    column, value = jnp.arange(8)[:, None], jnp.zeros_like(group)
    for i, each in enumerate((group, first_tile, n_tiles, row, row_end)):
        value = jnp.where(column == i, each, value)
    value = jnp.where(is_count, n_tiles, value)
    return jnp.where(of_group, value, 0).sum(axis=2, dtype=jnp.int32)


def cumulative(sizes: jax.Array, *, before: bool = False) -> jax.Array:
    """The cumulative sum, or of what comes `before` each; as one kernel. XLA makes several of jnp.cumsum."""
    index = jnp.arange(len(sizes))
    summed = index < index[:, None] if before else index <= index[:, None]
    return jnp.where(summed, sizes, 0).sum(axis=-1, dtype=sizes.dtype)


class Item(NamedTuple):
    """A tile of rows and of columns; all values are traced."""

    expert: Any
    row: Any  # the tile's first row, a multiple of 8
    first: Any  # the expert's first row, counted from the tile's
    n_rows: Any  # number of rows of the expert
    column: Any  # the tile's first column


def item_at(table: Any, i: Any, shape: ProductShape) -> Item:
    """Item i. An expert's items are adjacent, column by column: items that run together share weights."""
    record = 1 + lax.div(i, shape.column_tiles)
    expert, first_tile, n_tiles, begin, end = (table[record, column] for column in range(5))
    inside = i - first_tile * shape.column_tiles
    column = lax.div(inside, n_tiles)
    row = lax.div(begin, ALIGNED) * ALIGNED + (inside - column * n_tiles) * shape.tile_rows
    first = jnp.maximum(begin, row)
    n_rows = jnp.minimum(end, row + shape.tile_rows) - first
    return Item(expert, row, first - row, n_rows, column * (2 * COLUMNS))
