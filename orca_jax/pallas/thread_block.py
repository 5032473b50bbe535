"""A thread block of the kernel: its device and shared memory, and its list of items."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from orca_jax.pallas.kernel_shape import KernelShape, Q, swizzle_bytes
from orca_jax.pallas.work_list.balance import CORE
from orca_jax.pallas.work_list.work_items import ITEM


@dataclass(frozen=True, slots=True)
class ThreadBlock:
    """A thread block of three warp groups: 0 and 1 compute, 2 fetches.

    Arrays and barriers are references. S is the number of slots of the ring, C the keys of a slot.
    """

    shape: KernelShape

    # In device memory, as in `split_attention` and `merge`.
    work: Any
    table: Any
    q: Any  # [T, n, K, D]
    k_cache: Any
    v_cache: Any
    out: Any  # [T, G, K, D]
    part: Any  # [n_rounded, parts, G, D]
    part_top: Any  # [parts, padded G]
    tile_part: Any  # [n_rounded, parts of tiles, 2 * Q, D]; None if tiles are never split
    tile_part_top: Any  # [parts of tiles, 2 * Q]

    # In shared memory.
    q_s: Any  # [2, Q, D] each computing warp group's queries, swizzled for the matrix instruction
    staged: Any  # [2, Q, D] queries on their way in and results on their way out, not swizzled
    top_s: Any  # [2, Q] float32
    k_s: Any  # [S, C, D] the ring of keys, swizzled
    v_s: Any  # [S, C, D] the ring of values
    q_here: Any  # barriers, [2]: the queries have arrived
    k_here: Any  # [S] the slot's keys have arrived
    v_here: Any
    k_free: Any  # [S] both computing warp groups are done with the slot's keys
    v_free: Any
    turn: Any  # the two computing warp groups alternate
    given: Any  # the second warp group's half of an entry's result is ready
    taken: Any  # the first warp group has read it

    _: KW_ONLY
    core: Any  # the index of this thread block in the launch
    group: Any  # the index of the warp group that runs this

    def slot(self, step: Any) -> Any:
        """The ring's slot of a step."""
        return lax.rem(step, self.shape.n_slots)


def scratch_types(shape: KernelShape, dtype: DTypeLike) -> list[Any]:
    """Shared memory and barriers in the order of ThreadBlock's fields, with q_s and staged as one pair."""
    swizzle = swizzle_bytes(shape.head_size)
    swizzled = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    n_slots, copies = shape.n_slots, shape.step // shape.copied
    tiles = [
        plgpu.SMEM((2, Q, shape.head_size), dtype, transforms=swizzled),
        plgpu.SMEM((2, Q, shape.head_size), dtype),
    ]
    ring = plgpu.SMEM((n_slots, shape.step, shape.head_size), dtype, transforms=swizzled)
    return [
        plgpu.RefUnion(*tiles) if shape.aliased else tiles,
        plgpu.SMEM((2, Q), jnp.float32),
        ring,
        ring,
        plgpu.Barrier(num_arrivals=shape.plan.packed, num_barriers=2),
        plgpu.Barrier(num_arrivals=copies, num_barriers=n_slots),
        plgpu.Barrier(num_arrivals=copies, num_barriers=n_slots),
        plgpu.Barrier(num_arrivals=2, num_barriers=n_slots),
        plgpu.Barrier(num_arrivals=2, num_barriers=n_slots),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=1),
        plgpu.Barrier(num_arrivals=1),
    ]


class CoreItem(NamedTuple):
    """One item of a core's list; all values are traced."""

    record: Any  # the item's record in the work list
    head: Any  # a tile's tile head, or an entry's key/value head
    begin: Any  # the first key
    end: Any  # the key after the last one
    part: Any  # the part that its result is, for `merge`; -1 if the item is not split


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
        piece = work[record, ITEM.part]  # -1 unless the row is split at fixed positions
        part = jnp.where(piece < 0, -1, piece * self.n_heads + head)
        split = (begin > start) | (end < stop)
        part = jnp.where(split, work[core, CORE.part] + jnp.where(i == 0, 0, 1), part)
        return CoreItem(record, head, begin, end, part)


def tiles(here: ThreadBlock) -> CoreList:
    """Tiles of queries that this core computes."""
    plan = here.shape.plan
    return CoreList(here, here.core, plan.first_tile, plan.n_tile_heads)


def entries(here: ThreadBlock) -> CoreList:
    """Entries of the list of work that this core computes."""
    plan = here.shape.plan
    return CoreList(here, plan.n_cores + here.core, plan.first_entry, here.shape.n_kv_heads)
