"""What a thread block of the kernel works with: its place, arrays in device memory, and shared memory."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from orca_jax.pallas.kernel_shape import KernelShape, Q, swizzle_bytes


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
    turn: Any  # of the two computing warp groups
    given: Any  # the second warp group's share of an entry's result is ready
    taken: Any  # and the first has read it

    _: KW_ONLY
    core: Any  # the index of this thread block in the launch
    group: Any  # the index of the warp group that runs this

    def slot(self, step: Any) -> Any:
        """The ring's slot of a step."""
        return lax.rem(step, self.shape.n_slots)


def scratch_types(shape: KernelShape, dtype: DTypeLike) -> list[Any]:
    """Shared memory and barriers, in the order of ThreadBlock's fields, with q_s and staged as one pair."""
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
