"""What there is to do in one iteration, as one array of records: for each core its own list of items.

Made once per iteration on the host, from `row_start` and `kv_length` alone, and used by every layer. Heads
are not in it: tile i of head h is item i * N + h, entry i of key/value head h is item i * K + h. numpy.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orca_jax.pallas.work_list.balance import UNCUT, Cut, Ints, share_out
from orca_jax.pallas.work_list.bounds import N_COLUMNS, STEP, TILE, Plan


class Item(NamedTuple):
    """The columns of a tile or an entry."""

    row: int = 0
    token: int = 1  # the first query's index
    n_queries: int = 2
    position: int = 3  # the first query's position within its request
    begin: int = 4  # the first key
    end: int = 5  # the key after the last
    part: int = 6  # of an entry that is a piece of a row, which of all parts it is for each head; else -1


class Merge(NamedTuple):
    """The columns of a merge: a result that has to be put together from parts."""

    token: int = 0  # the first query's index; T or more where there is nothing to merge
    head: int = 1  # of a tile the query head, of a row the key/value head
    n_queries: int = 2
    part: int = 3  # its first part
    following: int = 4  # its second; part i > 0 is following + (i - 1) * stride
    stride: int = 5
    n_parts: int = 6


ITEM, MERGE = Item(), Merge()
_UNCUT_TILE = 512  # keys of a tile that is never cut: to merge a tile costs more than to merge a row


def work_items(
    row_start: npt.NDArray[np.int32], kv_length: npt.NDArray[np.int32], plan: Plan
) -> npt.NDArray[np.int32]:
    """`row_start` [R + 1], `kv_length` [R] int32: [plan.list_shape] int32.

    First for each core what tiles it has, then what entries (`balance.CORE`), then the tiles and the entries,
    the longest first (ITEM), then the merges of rows and those of tiles (MERGE).
    """
    work = np.zeros(plan.list_shape, np.int32)
    work[plan.first_merge :, MERGE.token] = plan.n_tokens + np.arange(len(work) - plan.first_merge)
    start = row_start[:-1].astype(np.int64)
    n_input = row_start[1:] - start  # [R]

    load = np.zeros(plan.n_cores, np.int64)
    tiles = _tiles(row_start, n_input, kv_length, plan)
    if len(tiles):
        keys = np.maximum(-(-tiles[:, ITEM.end] // STEP), 1) * STEP
        most = plan.most_tile_parts if plan.cuts_tiles and keys[0] > _UNCUT_TILE else 1
        shares = share_out(keys, plan.n_heads, STEP, load, most_parts=most)
        load = shares.load
        work[: plan.n_cores] = shares.records
        work[plan.first_tile : plan.first_tile + len(tiles)] = tiles
        if shares.cut:
            cut = _merges(shares.cut, tiles, plan.n_heads)
            work[plan.first_tile_merge : plan.first_tile_merge + len(cut)] = cut

    single = np.flatnonzero(n_input == 1)
    if len(single):
        keys = kv_length[single].astype(np.int64)
        if plan.fixed_keys:
            entries, merges = _pieces(single, start, keys, plan)
        else:
            entries, merges = _entries(single, start[single], keys, 0, keys, -1), None
        padded = -(-(entries[:, ITEM.end] - entries[:, ITEM.begin]) // plan.granule) * plan.granule
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
    """Whether nothing is ever cut where no row has more keys."""
    return max_keys <= UNCUT


def _tiles(
    row_start: npt.NDArray[np.int32], n_input: Ints, kv_length: npt.NDArray[np.int32], plan: Plan
) -> Ints:
    """Those of rows with several tokens, and those of padding, which see no key and so get zeros."""
    rows = np.flatnonzero(n_input > 1)
    length = np.append(n_input[rows], plan.n_tokens - row_start[-1])
    if not length.any():
        return np.zeros((0, N_COLUMNS), np.int64)
    n_keys = np.append(kv_length[rows], length[-1])  # so that padding's first position is 0
    owner, which = _spread(-(-length // TILE))
    first = which * TILE
    tiles = np.zeros((len(owner), N_COLUMNS), np.int64)
    tiles[:, ITEM.row] = np.append(rows, 0)[owner]
    tiles[:, ITEM.token] = np.append(row_start[rows], row_start[-1])[owner] + first
    tiles[:, ITEM.n_queries] = np.minimum(length[owner] - first, TILE)
    tiles[:, ITEM.position] = (n_keys - length)[owner] + first
    padding = owner == len(rows)
    tiles[:, ITEM.end] = np.where(padding, 0, tiles[:, ITEM.position] + tiles[:, ITEM.n_queries])
    tiles[:, ITEM.part] = -1
    return tiles[tiles[:, ITEM.end].argsort(kind="stable")[::-1]]


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


def _pieces(rows: Ints, start: Ints, n_keys: Ints, plan: Plan) -> tuple[Ints, Ints]:
    """Rows cut at multiples of `fixed_keys`: the pieces, and for each head of a row of several its merge."""
    n_pieces = -(-n_keys // plan.fixed_keys)  # [rows]
    owner, which = _spread(n_pieces)
    begin = which * plan.fixed_keys
    part = np.where(n_pieces[owner] > 1, np.arange(len(owner)), -1)
    end = np.minimum(begin + plan.fixed_keys, n_keys[owner])
    entries = _entries(rows[owner], start[rows[owner]], n_keys[owner], begin, end, part)

    heads = np.arange(plan.n_kv_heads)
    cut = np.flatnonzero(n_pieces > 1)
    first = ((n_pieces.cumsum() - n_pieces)[cut, None] * plan.n_kv_heads + heads).ravel()
    merges = np.zeros((len(first), N_COLUMNS), np.int64)
    merges[:, MERGE.token] = np.repeat(start[rows[cut]], plan.n_kv_heads)
    merges[:, MERGE.head] = np.tile(heads, len(cut))
    merges[:, MERGE.n_queries] = 1
    merges[:, MERGE.part] = first
    merges[:, MERGE.following] = first + plan.n_kv_heads
    merges[:, MERGE.stride] = plan.n_kv_heads
    merges[:, MERGE.n_parts] = np.repeat(n_pieces[cut], plan.n_kv_heads)
    return entries, merges


def _merges(cut: Cut, items: Ints, n_heads: int) -> Ints:
    """Of what was cut among the items of one kind, in their order."""
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
    """count [R] units of each row, side by side: of each unit its row, and which of the row's it is."""
    row = np.repeat(np.arange(len(count)), count)
    return row, np.arange(len(row)) - (count.cumsum() - count)[row]
