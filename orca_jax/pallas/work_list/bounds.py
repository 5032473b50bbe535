"""The static bounds of the list of work of one compiled kernel: what each of its arrays has room for.

A core is a streaming multiprocessor, and the one thread block that it runs. A part is the result of one core
for some of an item's keys.
"""

from dataclasses import dataclass, replace

TILE = 128  # query tokens of a tile
STEP = 128  # keys: where a tile may be cut
N_COLUMNS = 8  # of each record
_FIXED_KEYS = 256  # of a piece at least, where rows are cut at fixed places
_PIECES = 31  # of a row at most, there
_MERGED_PARTS = 4400  # that `merge` looks at, at most: 33 results of 133 parts
_TILE_PARTS = 4  # of one tile


@dataclass(frozen=True, slots=True)
class Plan:
    """The bounds for T tokens, R rows, K key/value heads, G query heads of each, K/V blocks of B slots.

    Work is cut where the batch at hand asks for it, or rows always at multiples of `fixed_keys`, so that how
    a row is cut does not depend on other rows; see `fixed`.
    """

    n_tokens: int
    n_rows: int
    n_kv_heads: int
    group: int
    block_size: int = 16
    n_cores: int = 132
    fixed_keys: int = 0

    def fixed(self, max_keys: int) -> "Plan":
        """The same with rows cut at fixed places, as short as `max_keys` keys of each row allow."""
        keys = -(-max_keys // (self._most_pieces * STEP)) * STEP
        return replace(self, fixed_keys=max(_FIXED_KEYS, keys))

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.n_kv_heads * self.group

    @property
    def granule(self) -> int:
        """Keys: a piece begins at a multiple of it. Copies bring so many at a time."""
        return min(self.block_size, 64)

    @property
    def max_tiles(self) -> int:
        """Tiles at most: full ones, and one that is not for each row of two tokens or more, and padding."""
        return -(-self.n_tokens // TILE) + min(self.n_rows, self.n_tokens // 2) + 1

    @property
    def cuts_tiles(self) -> bool:
        """Whether tiles may be cut: only where a prompt's are few, since a tile's part is large."""
        return not self.fixed_keys and self.n_tokens > TILE and self.n_heads <= 16

    @property
    def max_entries(self) -> int:
        """Entries at most: one for a row of the increment phase, more where rows are cut at fixed places."""
        return self.n_rows + (self._spare if self.fixed_keys else 0)

    @property
    def n_parts(self) -> int:
        """Parts of rows at most: two of each core, for its first item and its last."""
        return self.max_entries * self.n_kv_heads if self.fixed_keys else 2 * self.n_cores

    @property
    def n_tile_parts(self) -> int:
        """Parts of tiles at most."""
        return 2 * self.n_cores if self.cuts_tiles else 0

    @property
    def n_merges(self) -> int:
        """Results that are put together from parts at most."""
        each = self.n_rows * self.n_kv_heads
        return each if self.fixed_keys else min(self.n_cores, each)

    @property
    def n_tile_merges(self) -> int:
        """The same of tiles."""
        return self.n_cores if self.cuts_tiles else 0

    @property
    def most_parts(self) -> int:
        """Parts of one result at most."""
        if self.fixed_keys:
            return self._most_pieces
        return min(self.n_cores // self.n_kv_heads + 3, max(2, _MERGED_PARTS // self.n_merges))

    @property
    def most_tile_parts(self) -> int:
        """The same of a tile."""
        return _TILE_PARTS

    @property
    def first_tile(self) -> int:
        """The record of the first tile; before it are each core's records, of tiles and of entries."""
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
        """Records of the list, and their columns, all int32."""
        return self.first_tile_merge + self.n_tile_merges, N_COLUMNS

    @property
    def _most_pieces(self) -> int:
        return min(_PIECES, 1 + self._spare // self.n_rows)

    @property
    def _spare(self) -> int:
        return max(4, -(-8 * self.n_cores // self.n_kv_heads))
