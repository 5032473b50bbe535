"""The tiles of rows that groups have: a table, made on the device, that the kernel's thread blocks read."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from orca_jax.pallas.work_list.product_shape import ALIGNED, COLUMNS, ProductShape


def tile_table(sizes: jax.Array, shape: ProductShape) -> jax.Array:
    """[1 + max tiles, 8] int32: the number of items, then a record for each tile of groups of `sizes` [X].

    An item is a tile of rows and of columns. A group's tiles begin at the last multiple of 8 up to its first
    row, and may so have rows of other groups. A record has its group, that group's first tile, its number of
    tiles, its first row and the row after its last.
    """
    row_end = jnp.cumsum(sizes)
    row = row_end - sizes
    n_covered = row_end - row // ALIGNED * ALIGNED
    tiles = jnp.where(sizes > 0, -(-n_covered // shape.tile_rows), 0)
    tile_end = jnp.cumsum(tiles)
    tile = jnp.arange(shape.max_tiles)
    group = jnp.minimum((tile[:, None] >= tile_end).sum(axis=1), shape.n_experts - 1)
    columns = (group, *(each[group] for each in (tile_end - tiles, tiles, row, row_end)))
    records = jnp.pad(jnp.stack(columns, axis=1), ((1, 0), (0, 3)))
    return records.at[0, 0].set(tile_end[-1] * shape.column_tiles).astype(jnp.int32)


class Item(NamedTuple):
    """A tile of rows and of columns; all values are traced."""

    expert: Any
    row: Any  # the first of the tile, a multiple of 8
    first: Any  # the first that is the expert's, counted from the tile's
    n_rows: Any  # that are the expert's
    column: Any  # the first


def item_at(table: Any, i: Any, shape: ProductShape) -> Item:
    """Item i. An expert's follow each other, column by column: what runs at the same time shares weights."""
    record = 1 + lax.div(i, shape.column_tiles)
    expert, first_tile, n_tiles, begin, end = (table[record, column] for column in range(5))
    inside = i - first_tile * shape.column_tiles
    column = lax.div(inside, n_tiles)
    row = lax.div(begin, ALIGNED) * ALIGNED + (inside - column * n_tiles) * shape.tile_rows
    first = jnp.maximum(begin, row)
    n_rows = jnp.minimum(end, row + shape.tile_rows) - first
    return Item(expert, row, first - row, n_rows, column * (2 * COLUMNS))
