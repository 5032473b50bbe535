"""One iteration's attention as an array of records: each core's list of items.

The host makes it once per iteration from `row_start` and `kv_length`, and every layer with the same window
uses it. Records are per token, not per head: with H tile heads (N over the heads packed in a tile), tile i of
tile head h is item i * H + h; entry i of key/value head h is item i * K + h.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orca_jax.pallas.work_list.balance import UNCUT, Cut, Ints, share_out
from orca_jax.pallas.work_list.bounds import MOST_TILE_PARTS, N_COLUMNS, STEP, Plan


class Item(NamedTuple):
    """The columns of a tile or an entry."""

    row: int = 0
    token: int = 1  # index of the first query
    n_queries: int = 2  # tokens
    position: int = 3  # the first query's position in its request
    begin: int = 4  # the first key, a multiple of the plan's granule
    end: int = 5  # the key after the last
    part: int = 6  # an entry's number among all pieces if its row is split at fixed positions; else -1


class Merge(NamedTuple):
    """The columns of a merge: one result to combine from its parts."""

    token: int = 0  # index of the first query; T or more if the record is unused
    head: int = 1  # a tile's tile head, or a row's key/value head
    n_queries: int = 2  # tokens
    part: int = 3  # the first part
    following: int = 4  # the second part; part i > 0 is following + (i - 1) * stride
    stride: int = 5
    n_parts: int = 6


ITEM, MERGE = Item(), Merge()
_UNCUT_TILE = 512  # keys; shorter tiles are never split, because merging a tile costs more than merging a row


def work_items(
    row_start: npt.NDArray[np.int32], kv_length: npt.NDArray[np.int32], plan: Plan
) -> npt.NDArray[np.int32]:
    """The list [plan.list_shape] int32 for `row_start` [R + 1] and `kv_length` [R], both int32.

    Its sections: each core's range of tiles, then each core's range of entries (columns `balance.CORE`); the
    tiles, then the entries, longest first (ITEM); the merges of rows, then the merges of tiles (MERGE).
    """
    work = np.zeros(plan.list_shape, np.int32)
    work[plan.first_merge :, MERGE.token] = plan.n_tokens + np.arange(len(work) - plan.first_merge)
    start = row_start[:-1].astype(np.int64)
    n_input = row_start[1:] - start  # [R]

    load = np.zeros(plan.n_cores, np.int64)
    tiles = None if plan.by_token else _tiles(row_start, n_input, kv_length, plan)
    if tiles is not None and len(tiles):
        keys = _tile_keys(tiles)
        order = keys.argsort(kind="stable")[::-1]
        tiles, keys = tiles[order], keys[order]
        most = MOST_TILE_PARTS if plan.cuts_tiles and keys[0] > _UNCUT_TILE else 1
        shares = share_out(keys, plan.n_tile_heads, STEP, load, most_parts=most)
        load = shares.load
        work[: plan.n_cores] = shares.records
        work[plan.first_tile : plan.first_tile + len(tiles)] = tiles
        if shares.cut:
            cut = _merges(shares.cut, tiles, plan.n_tile_heads)
            work[plan.first_tile_merge : plan.first_tile_merge + len(cut)] = cut

    row, token, keys = (_tokens if plan.by_token else _decodes)(row_start, n_input, kv_length, plan)
    if len(row):
        if plan.fixed_keys:
            entries, merges = _pieces(row, token, keys, plan)
        else:
            begin = _first_key(keys - 1, plan)
            entries, merges = _entries(row, token, keys, begin, keys, -1), None
        padded = -(-(entries[:, ITEM.end] - entries[:, ITEM.begin]) // plan.granule) * plan.granule
        padded = np.maximum(padded, plan.granule)  # an entry without keys still writes zeros
        order = padded.argsort(kind="stable")[::-1]
        entries = entries[order]
        most = 1 if plan.fixed_keys else plan.most_parts
        shares = share_out(padded[order], plan.n_kv_heads, plan.granule, load, most_parts=most)
        work[plan.n_cores : plan.first_tile] = shares.records
        work[plan.first_entry : plan.first_entry + len(entries)] = entries
        if shares.cut:
            merges = _merges(shares.cut, entries, plan.n_kv_heads)
        if merges is not None:
            work[plan.first_merge : plan.first_merge + len(merges)] = merges
    return work


def never_cut(max_keys: int) -> bool:
    """Whether items are never split in batches whose rows have at most `max_keys` keys."""
    return max_keys <= UNCUT


def _decodes(
    row_start: npt.NDArray[np.int32], n_input: Ints, kv_length: npt.NDArray[np.int32], plan: Plan
) -> tuple[Ints, Ints, Ints]:
    """Rows with one token: the row, its token, and the number of its keys."""
    single = np.flatnonzero(n_input == 1)
    return single, row_start[single].astype(np.int64), kv_length[single].astype(np.int64)


def _tokens(
    row_start: npt.NDArray[np.int32], n_input: Ints, kv_length: npt.NDArray[np.int32], plan: Plan
) -> tuple[Ints, Ints, Ints]:
    """Every token, those of padding too: its row, its index, and the number of keys that it sees."""
    token = np.arange(plan.n_tokens)
    row, n_real = np.zeros(plan.n_tokens, np.int64), int(row_start[-1])
    row[:n_real] = np.repeat(np.arange(len(n_input)), n_input)
    keys = kv_length.astype(np.int64)[row] - row_start[row + 1] + token + 1
    return row, token, np.where(token < n_real, keys, 0)


def _tiles(
    row_start: npt.NDArray[np.int32], n_input: Ints, kv_length: npt.NDArray[np.int32], plan: Plan
) -> Ints:
    """Tiles of rows with several tokens, and tiles of padding, which have no keys and give zeros."""
    rows = np.flatnonzero(n_input > 1)
    length = np.append(n_input[rows], plan.n_tokens - row_start[-1])
    if not length.any():
        return np.zeros((0, N_COLUMNS), np.int64)
    n_keys = np.append(kv_length[rows], length[-1])  # padding's first position is 0
    owner, which = _spread(-(-length // plan.tile_tokens))
    first = which * plan.tile_tokens
    tiles = np.zeros((len(owner), N_COLUMNS), np.int64)
    tiles[:, ITEM.row] = np.append(rows, 0)[owner]
    tiles[:, ITEM.token] = np.append(row_start[rows], row_start[-1])[owner] + first
    tiles[:, ITEM.n_queries] = np.minimum(length[owner] - first, plan.tile_tokens)
    tiles[:, ITEM.position] = (n_keys - length)[owner] + first
    padding = owner == len(rows)
    tiles[:, ITEM.begin] = np.where(padding, 0, _first_key(tiles[:, ITEM.position], plan))
    tiles[:, ITEM.end] = np.where(padding, 0, tiles[:, ITEM.position] + tiles[:, ITEM.n_queries])
    tiles[:, ITEM.part] = -1
    return tiles


def _tile_keys(tiles: Ints) -> Ints:
    """Keys that a tile's loop covers. A tile without keys counts as one step: it still writes zeros."""
    return np.maximum(-(-(tiles[:, ITEM.end] - tiles[:, ITEM.begin]) // STEP), 1) * STEP


def _first_key(position: Ints, plan: Plan) -> Ints:
    """The first key to read for queries from `position` on: the granule of the window's first key."""
    if plan.window is None:
        return np.zeros_like(position)
    return np.maximum(position - plan.window + 1, 0) // plan.granule * plan.granule


def _entries(row: Ints, token: Ints, n_keys: Ints, begin: Ints | int, end: Ints, part: Ints | int) -> Ints:
    entries = np.ones((len(row), N_COLUMNS), np.int64)
    for column, value in (
        (ITEM.row, row),
        (ITEM.token, token),
        (ITEM.position, n_keys - 1),
        (ITEM.begin, begin),
        (ITEM.end, end),
        (ITEM.part, part),
    ):
        entries[:, column] = value
    return entries


def _pieces(rows: Ints, tokens: Ints, n_keys: Ints, plan: Plan) -> tuple[Ints, Ints]:
    """Split rows at multiples of `fixed_keys`: the pieces, and for each head the merges of split rows.

    `rows` may name a row several times, for several `tokens`.
    """
    row_begin = _first_key(n_keys - 1, plan)  # [rows]
    first_piece = row_begin // plan.fixed_keys
    n_pieces = np.maximum(-(-n_keys // plan.fixed_keys) - first_piece, 1)
    owner, which = _spread(n_pieces)
    piece_begin = (first_piece[owner] + which) * plan.fixed_keys
    begin = np.maximum(piece_begin, row_begin[owner])
    part = np.where(n_pieces[owner] > 1, np.arange(len(owner)), -1)
    end = np.minimum(piece_begin + plan.fixed_keys, n_keys[owner])
    entries = _entries(rows[owner], tokens[owner], n_keys[owner], begin, end, part)

    heads = np.arange(plan.n_kv_heads)
    cut = np.flatnonzero(n_pieces > 1)
    first = ((n_pieces.cumsum() - n_pieces)[cut, None] * plan.n_kv_heads + heads).ravel()
    merges = np.zeros((len(first), N_COLUMNS), np.int64)
    merges[:, MERGE.token] = np.repeat(tokens[cut], plan.n_kv_heads)
    merges[:, MERGE.head] = np.tile(heads, len(cut))
    merges[:, MERGE.n_queries] = 1
    merges[:, MERGE.part] = first
    merges[:, MERGE.following] = first + plan.n_kv_heads
    merges[:, MERGE.stride] = plan.n_kv_heads
    merges[:, MERGE.n_parts] = np.repeat(n_pieces[cut], plan.n_kv_heads)
    return entries, merges


def _merges(cut: Cut, items: Ints, n_heads: int) -> Ints:
    """The merges of one kind's split items, in the order of the items."""
    which, head = np.divmod(cut.item, n_heads)
    merges = np.zeros((len(which), N_COLUMNS), np.int64)
    for column, value in (
        (MERGE.token, items[which, ITEM.token]),
        (MERGE.head, head),
        (MERGE.n_queries, items[which, ITEM.n_queries]),
        (MERGE.part, cut.part),
        (MERGE.following, cut.following),
        (MERGE.stride, 2),
        (MERGE.n_parts, cut.n_parts),
    ):
        merges[:, column] = value
    return merges


def _spread(count: Ints) -> tuple[Ints, Ints]:
    """Each unit's row, and its index in that row, if rows have `count` [R] units laid end to end."""
    row = np.repeat(np.arange(len(count)), count)
    return row, np.arange(len(row)) - (count.cumsum() - count)[row]
