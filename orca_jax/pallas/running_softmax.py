"""Attention over the keys of one slot after another, with a running softmax in registers, float32.

What is carried from slot to slot: top [Q], the highest score of each query row so far, times log2(e); total
[Q], the sum of its weights, which are 2 ** (score - top); sums [Q, D], that of its weighted values.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from orca_jax.pallas.kernel_shape import C, KernelShape, Q, swizzle_bytes
from orca_jax.pallas.mosaic_forms import (
    TILE,
    TILE_ROW,
    along_rows,
    iota,
    laid_out,
    plus_product,
    times_transposed,
)
from orca_jax.pallas.thread_block import ThreadBlock

Carry = tuple[jax.Array, jax.Array, jax.Array]

_NOTHING = -1e30  # the score of a key that is not there; finite, so that no inf - inf arises
_LOG2_E = math.log2(math.e)


def nothing_yet(shape: KernelShape) -> Carry:
    """The carry before the first key."""
    interpret = shape.interpret
    return (
        laid_out(jnp.full((Q,), _NOTHING, jnp.float32), TILE_ROW, interpret=interpret),
        laid_out(jnp.zeros((Q,), jnp.float32), TILE_ROW, interpret=interpret),
        laid_out(jnp.zeros((Q, shape.head_size), jnp.float32), TILE, interpret=interpret),
    )


def attend(here: ThreadBlock, carry: Carry, step: Any, key: Any, end: Any, last_key: jax.Array) -> Carry:
    """Take in a slot, keys `key` to `key + C`; each query row sees keys up to its last_key [Q]."""
    top, total, sums = carry
    shape = here.shape
    interpret = shape.interpret
    slot = here.slot(step)
    plgpu.barrier_wait(here.k_here.at[slot])
    scores = times_transposed(here.q_s.at[here.group], here.k_s.at[slot], interpret=interpret)  # [Q, C]
    plgpu.barrier_arrive(here.k_free.at[slot])
    keys = iota(Q, C, 1, interpret=interpret) + key
    scores = jnp.where(keys <= along_rows(last_key, (Q, C)), scores, _NOTHING)
    c = shape.scale * _LOG2_E
    new_top = jnp.maximum(top, scores.max(axis=1) * c)
    shrink = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores * c - along_rows(new_top, (Q, C)))
    total = total * shrink + weights.sum(axis=1)
    sums = sums * along_rows(shrink, (Q, shape.head_size))
    plgpu.barrier_wait(here.v_here.at[slot])

    @pl.when(key + C > end)
    def _():
        # What others left in the slots behind the row's own may be inf or NaN, and 0 * NaN is NaN.
        width = swizzle_bytes(shape.head_size) // 2
        for column in range(0, shape.head_size, width):  # a few registers at a time
            values = here.v_s.at[slot, :, pl.ds(column, width)]
            row = iota(C, width, 0, interpret=interpret) + key
            values[...] = jnp.where(row < end, values[...], jnp.zeros(values.shape, values.dtype))
        plgpu.commit_smem()

    sums = plus_product(sums, weights.astype(here.q_s.dtype), here.v_s.at[slot], interpret=interpret)
    plgpu.barrier_arrive(here.v_free.at[slot])
    return new_top, total, sums
