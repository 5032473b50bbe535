"""A thread block of a kernel: its device and shared memory, and its list of items."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from orca_jax.pallas.kernel_shape import KernelShape, Q, swizzle_bytes
from orca_jax.pallas.work_list.balance import CORE
from orca_jax.pallas.work_list.bounds import Plan
from orca_jax.pallas.work_list.work_items import ITEM


class TileShape(Protocol):
    """The sizes that the kernels' common parts read; see KernelShape."""

    @property
    def block_size(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def soft_cap(self) -> float | None: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def interpret(self) -> bool: ...
    @property
    def step(self) -> int: ...
    @property
    def n_values(self) -> int: ...
    @property
    def copied(self) -> int: ...
    @property
    def n_slots(self) -> int: ...


class Ring(NamedTuple):
    """A ring of slots in shared memory that is filled from a cache."""

    pool: Any  # [n_blocks, K, B, D] the cache
    slots: Any  # [S, C, D] swizzled
    arrived: Any  # barriers, [S]: the slot has been filled
    free: Any  # [S] both computing warp groups are done with the slot


class Block(Protocol):
    """A thread block of three warp groups: 0 and 1 compute, 2 fetches. What the common parts read."""

    @property
    def shape(self) -> TileShape: ...
    @property
    def work(self) -> Any: ...
    @property
    def table(self) -> Any: ...
    @property
    def staged(self) -> Any: ...
    @property
    def top_s(self) -> Any: ...
    @property
    def core(self) -> Any: ...
    @property
    def group(self) -> Any: ...
    @property
    def rings(self) -> tuple[Ring, ...]: ...


@dataclass(frozen=True, slots=True)
class ThreadBlock:
    """A thread block of split attention.

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

    @property
    def rings(self) -> tuple[Ring, ...]:
        """The rings of keys and of values."""
        return (
            Ring(self.k_cache, self.k_s, self.k_here, self.k_free),
            Ring(self.v_cache, self.v_s, self.v_here, self.v_free),
        )


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

    here: Block
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


def entries(here: Block) -> CoreList:
    """Entries of the list of work that this core computes."""
    plan = here.shape.plan
    return CoreList(here, plan.n_cores + here.core, plan.first_entry, plan.n_kv_heads)
