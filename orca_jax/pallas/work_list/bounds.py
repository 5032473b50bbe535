"""The sizes of one compiled kernel's work list: the number of records in each section.

A core is a streaming multiprocessor with the one thread block that it runs. A part is one core's result for
some of an item's keys.
"""

import math
from dataclasses import dataclass, replace

TILE = 128  # query rows of a tile: tokens times packed heads
STEP = 128  # keys; a tile may be split at multiples of this, counted from its first key
N_COLUMNS = 8  # of each record
_MOST_PACKED = 8  # heads in a tile; a copy of one head's queries then has at least 8 rows
_FIXED_KEYS = 256  # with rows split at fixed positions: the least keys of a piece,
_PIECES = 31  # and the most pieces of a row
_MERGED_PARTS = 4400  # the most parts that `merge` reads: 33 results of 133 parts
MOST_TILE_PARTS = 4  # the most parts of one tile's result


@dataclass(frozen=True, slots=True)
class Plan:
    """The bounds for T tokens, R rows, K key/value heads with G query heads each, and K/V blocks of B slots.

    Rows are split where the current batch needs it or, with `fixed_keys`, at multiples of that number, so
    that one row's splits do not depend on other rows; see `fixed`. With `window`, a query sees its own
    position and the `window - 1` positions before it. With `by_token` there are no tiles: every token is an
    entry, and one of padding has no keys.
    """

    n_tokens: int
    n_rows: int
    n_kv_heads: int
    group: int
    block_size: int = 16
    n_cores: int = 132
    fixed_keys: int = 0
    window: int | None = None
    by_token: bool = False

    def fixed(self, max_keys: int) -> "Plan":
        """Split rows at fixed positions, as finely as rows of up to `max_keys` keys allow."""
        keys = -(-max_keys // (self._most_pieces * STEP)) * STEP
        return replace(self, fixed_keys=max(_FIXED_KEYS, keys))

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.n_kv_heads * self.group

    @property
    def packed(self) -> int:
        """Query heads that share a tile and each read of its keys and values."""
        return math.gcd(self.group, _MOST_PACKED)

    @property
    def tile_tokens(self) -> int:
        """Tokens of a full tile."""
        return TILE // self.packed

    @property
    def n_tile_heads(self) -> int:
        """Tiles of the same tokens, for different heads."""
        return self.n_heads // self.packed

    @property
    def granule(self) -> int:
        """Keys in one copy. A piece begins at a multiple of this."""
        return min(self.block_size, 64)

    @property
    def max_tiles(self) -> int:
        """The most tiles: full ones, a partial one for each row of two or more tokens, one for padding."""
        if self.by_token:
            return 0
        return -(-self.n_tokens // self.tile_tokens) + min(self.n_rows, self.n_tokens // 2) + 1

    @property
    def cuts_tiles(self) -> bool:
        """Whether tiles may be split: only if a prompt has few tiles, because a tile's part is large."""
        return not (self.fixed_keys or self.by_token) and self.n_tokens > TILE and self.n_heads <= 16

    @property
    def cuts_rows(self) -> bool:
        """Whether rows may be split; at fixed positions, only if few enough rows leave room for pieces."""
        return not self.fixed_keys or self._most_pieces > 1

    @property
    def max_entries(self) -> int:
        """The most entries: one for each decode row, or more if rows are split at fixed positions."""
        return self._most_queries + (self._spare if self.fixed_keys else 0)

    @property
    def n_parts(self) -> int:
        """The most parts of rows: two for each core, from its first item and its last."""
        if not self.cuts_rows:
            return 1  # an array must not be empty
        return self.max_entries * self.n_kv_heads if self.fixed_keys else 2 * self.n_cores

    @property
    def n_tile_parts(self) -> int:
        """The most parts of tiles."""
        return 2 * self.n_cores if self.cuts_tiles else 0

    @property
    def n_merges(self) -> int:
        """The most results of rows that are merged from parts."""
        each = self._most_queries * self.n_kv_heads if self.cuts_rows else 0
        return each if self.fixed_keys else min(self.n_cores, each)

    @property
    def n_tile_merges(self) -> int:
        """The most results of tiles that are merged from parts."""
        return self.n_cores if self.cuts_tiles else 0

    @property
    def most_parts(self) -> int:
        """The most parts of one row's result."""
        if self.fixed_keys:
            return self._most_pieces
        return min(self.n_cores // self.n_kv_heads + 3, max(2, _MERGED_PARTS // self.n_merges))

    @property
    def first_tile(self) -> int:
        """The record of the first tile. Before it are two per core, for its tiles and its entries."""
        return 2 * self.n_cores

    @property
    def first_entry(self) -> int:
        """The record of the first entry."""
        return self.first_tile + self.max_tiles

    @property
    def first_merge(self) -> int:
        """The record of the first merge of rows."""
        return self.first_entry + self.max_entries

    @property
    def first_tile_merge(self) -> int:
        """The record of the first merge of tiles."""
        return self.first_merge + self.n_merges

    @property
    def list_shape(self) -> tuple[int, int]:
        """The shape of the list: records and columns. It is int32."""
        return self.first_tile_merge + self.n_tile_merges, N_COLUMNS

    @property
    def _most_pieces(self) -> int:
        return min(_PIECES, 1 + self._spare // self._most_queries)

    @property
    def _most_queries(self) -> int:
        """The most queries that are entries, before any is split."""
        return self.n_tokens if self.by_token else self.n_rows

    @property
    def _spare(self) -> int:
        return max(4, -(-8 * self.n_cores // self.n_kv_heads))
