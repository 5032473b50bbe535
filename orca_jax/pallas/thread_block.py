"""What a thread block of the kernel has: its place, the arrays in device memory, and its shared memory."""

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

    The arrays and barriers are references. S is the number of slots of the ring, C keys of a slot.
    """

    shape: KernelShape

    # In device memory: as in `split_attention` and `merge`.
    work: Any
    table: Any
    q: Any
    k_cache: Any
    v_cache: Any
    out: Any
    part: Any  # [n_rounded, parts, G, D]
    part_top: Any  # [parts, padded G]
    tile_part: Any  # [n_rounded, parts of tiles, 2 * Q, D]; None where tiles are never cut
    tile_part_top: Any  # [parts of tiles, 2 * Q]

    # In shared memory.
    q_s: Any  # [2, Q, D] each computing warp group's queries, shuffled as the matrix instruction wants them
    staged: Any  # [2, Q, D] where queries come in and results go out, not shuffled
    top_s: Any  # [2, Q] float32
    k_s: Any  # [S, C, D] the ring of keys, shuffled
    v_s: Any  # [S, C, D] and of values
    q_here: Any  # barriers, [2]: the queries have come
    k_here: Any  # [S] what was asked for has come
    v_here: Any
    k_free: Any  # [S] both warp groups are done with it
    v_free: Any
    turn: Any  # of the two computing warp groups
    given: Any  # the second warp group's share of an entry's result lies ready
    taken: Any  # and was taken by the first

    _: KW_ONLY
    core: Any  # which of the launch's thread blocks this is
    group: Any  # which of its warp groups runs this

    def slot(self, step: Any) -> Any:
        """The ring's slot of a step."""
        return lax.rem(step, self.shape.n_slots)


def scratch_types(shape: KernelShape, dtype: DTypeLike) -> list[Any]:
    """Shared memory and barriers, in the order of ThreadBlock's fields, but q_s and staged as one pair."""
    swizzle = swizzle_bytes(shape.head_size)
    shuffled = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    n_slots, copies = shape.n_slots, shape.step // shape.copied
    tiles = [
        plgpu.SMEM((2, Q, shape.head_size), dtype, transforms=shuffled),
        plgpu.SMEM((2, Q, shape.head_size), dtype),
    ]
    ring = plgpu.SMEM((n_slots, shape.step, shape.head_size), dtype, transforms=shuffled)
    return [
        plgpu.RefUnion(*tiles) if shape.aliased else tiles,
        plgpu.SMEM((2, Q), jnp.float32),
        ring,
        ring,
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(num_arrivals=copies, num_barriers=n_slots),
        plgpu.Barrier(num_arrivals=copies, num_barriers=n_slots),
        plgpu.Barrier(num_arrivals=2, num_barriers=n_slots),
        plgpu.Barrier(num_arrivals=2, num_barriers=n_slots),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=1),
        plgpu.Barrier(num_arrivals=1),
    ]
