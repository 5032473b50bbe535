"""Distributes items over the cores so that all finish together, in a list for each core.

Items come in groups of equal length, one item for each head, longest first. If no core then gets much more
than its share, whole items are dealt like cards. Otherwise they are laid end to end and cut at each core's
share, and the parts of a cut item must be merged. NumPy; n cores, L groups.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orca_jax.pallas.work_list.bounds import N_COLUMNS

Ints = npt.NDArray[np.int64]

NO_END = 1 << 30
_WORTH_CUTTING = 0.94  # items are cut if the longest core's load then falls to this fraction or below
UNCUT = 255  # keys; items this short are never cut, because a merge would cost more
_LEAST_KEYS = 128  # the smallest share of a core, and the least saving that is worth cutting
_SNAP = 32  # a cut moves to an item's end if it is within 1 / _SNAP of the core's share from it


class CoreRecord(NamedTuple):
    """The columns of a core's record, all int32: its items are first (or back) + i * stride for i < n."""

    n: int = 0
    first: int = 1  # base of the items with even i
    back: int = 2  # base of the items with odd i
    stride: int = 3
    begin: int = 4  # keys of the first item to skip
    end: int = 5  # number of keys of the last item
    part: int = 6  # the first item's part; the last item's, if another item, is the next


CORE = CoreRecord()


@dataclass(frozen=True, slots=True)
class Cut:
    """The M cut items, in arrays [M]. Part i > 0 of an item is `following + (i - 1) * 2`."""

    item: Ints
    part: Ints  # the item's first part
    following: Ints  # the item's second part
    n_parts: Ints


@dataclass(frozen=True, slots=True)
class Shares:
    """Each core's share of the items of one kind."""

    records: Ints  # [n, N_COLUMNS], with the columns of CORE
    load: Ints  # [n] keys
    cut: Cut | None


def share_out(length: Ints, n_heads: int, unit: int, before: Ints, *, most_parts: int) -> Shares:
    """Distribute items: `length` [L] keys in descending order, multiples of `unit`, each for `n_heads` heads.

    `before` [n] is each core's load so far. Items are cut at multiples of `unit` into at most `most_parts`
    parts. Item i is head i % n_heads of group i // n_heads.
    """
    n = len(before)
    length = length[: np.count_nonzero(length)]
    order = before.argsort(kind="stable")  # the least loaded cores first
    before = before[order]
    columns, load = _dealt(length, n_heads, before)
    cut = None
    if most_parts > 1 and len(length) and length[0] > UNCUT:
        longest = int(load.max())
        worth = min(int(_WORTH_CUTTING * longest), longest - _LEAST_KEYS)
        total = int(length.sum()) * n_heads + int(before.sum())
        share = max(-(-total // n), _LEAST_KEYS)  # if a core has more already, the last cores get less
        if share <= worth and (line := _cut(length, n_heads, unit, before, share, most_parts, worth)):
            columns, load, cut = line
    records, loads = np.zeros((n, N_COLUMNS), np.int64), np.empty(n, np.int64)
    for i, column in enumerate(columns):
        records[order, i] = column
    loads[order] = load
    return Shares(records, loads, cut)


def _dealt(length: Ints, n_heads: int, before: Ints) -> tuple[tuple[Ints | int, ...], Ints]:
    """Deal whole items, back and forth: CORE's columns and the loads, in the order of `before`."""
    n = len(before)
    m = len(length) * n_heads
    rounds, rest = divmod(m, n)
    cards = np.zeros((rounds + (rest > 0), n), np.int64)
    cards.reshape(-1)[:m] = np.repeat(length, n_heads)
    load = cards[0::2].sum(0) + cards[1::2, ::-1].sum(0)
    lane = load.argsort(kind="stable")[::-1]  # the largest load goes to the least loaded core
    last = lane if rounds % 2 == 0 else n - 1 - lane
    return (rounds + (last < rest), lane, n - 1 - lane, n, 0, NO_END, 0), before + load[lane]


def _cut(
    length: Ints, n_heads: int, unit: int, before: Ints, share: int, most_parts: int, worth: int
) -> tuple[tuple[Ints | int, ...], Ints, Cut] | None:
    """Lay all items end to end and cut them into the cores' shares; None if that is not worth it."""
    n = len(before)
    share = max(share, int(before[0]) - (-int(length[0]) // (most_parts - 1)))
    of_group = length * n_heads
    ends = of_group.cumsum()
    total = int(ends[-1])
    room = np.maximum(-(-(share - before) // unit), 0) * unit
    at = np.zeros(n + 1, np.int64)
    np.minimum(room.cumsum(), total, out=at[1:])
    at[-1] = total
    group = np.minimum(ends.searchsorted(at, side="right"), len(length) - 1)
    start = (ends - of_group)[group]
    head, key = np.divmod(at - start, length[group])
    snap = share // _SNAP
    item = group * n_heads + head
    to_end = (key > 0) & (length[group] - key <= snap)
    item += to_end
    at = at - key
    key = np.where(to_end | (key <= snap), 0, key)
    at = at + np.where(to_end, length[group], key)
    load = before + np.diff(at)
    if load.max() > worth:
        return None

    inside = key > 0
    partial, new_item = inside[1:], np.diff(item)
    n_items = new_item + partial
    end = np.where(partial, key[1:], NO_END)
    columns = (n_items, item[:-1], item[:-1], 1, key[:-1], end, 2 * np.arange(n))

    # A cut item has a part on the core where it begins and on each core after it.
    first = 1 + np.flatnonzero(partial & ((new_item > 0) | ~inside[:-1]))
    n_parts = item.searchsorted(item[first], side="right") - first + 1
    if len(first) and n_parts.max() > most_parts:
        return None
    part = 2 * (first - 1) + (item[first - 1] != item[first])
    return columns, load, Cut(item[first], part, 2 * first, n_parts)
