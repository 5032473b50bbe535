"""Moves queries into shared memory, and results out of registers, through a staging buffer.

The matrix instruction reads swizzled rows, but copies of a single head's rows cannot swizzle. So copies use
the buffer `staged`, and a warp group moves the numbers between it and the swizzled tile or its registers.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from orca_jax.pallas.kernel_shape import Q, swizzle_bytes
from orca_jax.pallas.mosaic_forms import along_rows, load_plain
from orca_jax.pallas.running_softmax import Carry
from orca_jax.pallas.thread_block import Block, ThreadBlock


def load_queries(here: ThreadBlock, sources: Sequence[Any]) -> None:
    """Load the rows of `sources`, at most Q in all, to the tile that the matrix instruction reads.

    The barrier `q_here` counts the heads packed in a tile; there may be fewer sources.
    """
    group, staged, at = here.group, here.staged, 0
    for source in sources:
        buffer = staged.at[group, pl.ds(at, source.shape[0])]
        plgpu.copy_gmem_to_smem(source, buffer, here.q_here.at[group])
        at += source.shape[0]
    for _ in range(here.shape.plan.packed - len(sources)):
        plgpu.barrier_arrive(here.q_here.at[group])
    plgpu.barrier_wait(here.q_here.at[group])
    whole = (group, slice(None), slice(None))
    here.q_s[group] = load_plain(staged, whole, interpret=here.shape.interpret)
    plgpu.commit_smem()


def stage(here: Block, sums: jax.Array, total: jax.Array, *, rest: bool = False) -> None:
    """Write sums [Q, D] over total [Q] to the staging buffer, rounded; with `rest`, the rounding's remainder.

    A row that sees no key has total 0, and gives 0.
    """
    share = jnp.where(total > 0, 1 / total, 0.0)
    width = swizzle_bytes(here.shape.n_values) // 2
    for column in range(0, here.shape.n_values, width):  # a few registers at a time
        exact = lax.slice(sums, (0, column), (Q, column + width)) * along_rows(share, (Q, width))
        rounded = exact.astype(here.staged.dtype)
        if rest:
            rounded = (exact - rounded.astype(jnp.float32)).astype(here.staged.dtype)
        here.staged[here.group, :, pl.ds(column, width)] = rounded
    plgpu.commit_smem()


def put_part(
    here: Block, carry: Carry, places: Sequence[Any], place_of_top: Any, *, n_rows: int, n_tops: int
) -> None:
    """Copy a part's staged result to the arrays that `merge` reads: `n_rows` rows, and `n_tops` tops.

    A top is the logarithm to base 2 of the sum of a row's weights. `places` are for the rounded result and,
    if it is kept, the rounding's remainder. The caller waits for the last copy.
    """
    top, total, sums = carry
    staged = here.staged.at[here.group, pl.ds(0, n_rows)]
    plgpu.copy_smem_to_gmem(staged, places[0])
    here.top_s[here.group] = top + jnp.log2(total)  # -inf for a row that sees none of these keys
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(here.top_s.at[here.group, pl.ds(0, n_tops)], place_of_top)
    for place in places[1:]:
        plgpu.wait_smem_to_gmem(0)
        stage(here, sums, total, rest=True)
        plgpu.copy_smem_to_gmem(staged, place)
