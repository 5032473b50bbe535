"""A core's list of items as the kernel reads it: its tiles, and the entries of its decode rows."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from orca_jax.pallas.thread_block import ThreadBlock
from orca_jax.pallas.work_list.balance import CORE
from orca_jax.pallas.work_list.work_items import ITEM


class CoreItem(NamedTuple):
    """One item of a core's list; all values are traced."""

    record: Any  # its record in the work list
    head: Any  # a tile's tile head, an entry's key/value head
    begin: Any  # the first key
    end: Any  # the key after the last
    part: Any  # the part that takes its result, for `merge`; -1 if the item is not split


class CoreList(NamedTuple):
    """A core's items of one kind."""

    here: ThreadBlock
    record: Any  # the core's record
    first: int  # the record of this kind's first item
    n_heads: int

    @property
    def n(self) -> Any:
        """Number of items."""
        return self.here.work[self.record, CORE.n]

    def item(self, i: Any) -> CoreItem:
        """Item i."""
        work, core = self.here.work, self.record
        odd = lax.rem(i, 2) == 1
        index = jnp.where(odd, work[core, CORE.back], work[core, CORE.first]) + i * work[core, CORE.stride]
        record = self.first + lax.div(index, self.n_heads)
        head = lax.rem(index, self.n_heads)
        start, stop = work[record, ITEM.begin], work[record, ITEM.end]
        begin = start + jnp.where(i == 0, work[core, CORE.begin], 0)
        end = jnp.where(i == self.n - 1, jnp.minimum(stop, start + work[core, CORE.end]), stop)
        piece = work[record, ITEM.part]  # of a row that is split at fixed positions
        part = jnp.where(piece < 0, -1, piece * self.n_heads + head)
        split = (begin > start) | (end < stop)
        part = jnp.where(split, work[core, CORE.part] + jnp.where(i == 0, 0, 1), part)
        return CoreItem(record, head, begin, end, part)


def tiles(here: ThreadBlock) -> CoreList:
    """This core's tiles."""
    plan = here.shape.plan
    return CoreList(here, here.core, plan.first_tile, plan.n_tile_heads)


def entries(here: ThreadBlock) -> CoreList:
    """This core's entries."""
    plan = here.shape.plan
    return CoreList(here, plan.n_cores + here.core, plan.first_entry, here.shape.n_kv_heads)
