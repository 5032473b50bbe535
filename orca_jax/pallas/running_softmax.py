"""Attention over the keys of one slot after another, with a running softmax in registers, float32.

What is carried from slot to slot: top [Q], the highest score of each query row so far, times log2(e); total
[Q], the sum of its weights, which are 2 ** (score - top); sums [Q, D], that of its weighted values.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from orca_jax.pallas.kernel_shape import KernelShape, Q, swizzle_bytes
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


class Mask(NamedTuple):
    """Which keys of a slot count."""

    key: Any  # the slot's first
    end: Any  # no key from here on does, and values behind it may be anything
    last_key: jax.Array  # [Q] of each query row


_LOWEST = -1e30  # top before the first key: finite, so that no inf - inf arises
_LOG2_E = math.log2(math.e)


def nothing_yet(shape: KernelShape) -> Carry:
    """The carry before the first key."""
    interpret = shape.interpret
    return (
        laid_out(jnp.full((Q,), _LOWEST, jnp.float32), TILE_ROW, interpret=interpret),
        laid_out(jnp.zeros((Q,), jnp.float32), TILE_ROW, interpret=interpret),
        laid_out(jnp.zeros((Q, shape.head_size), jnp.float32), TILE, interpret=interpret),
    )


def next_turn(here: ThreadBlock) -> None:
    """Give the other warp group its turn and wait for one's own."""
    plgpu.barrier_arrive(here.turn)
    plgpu.barrier_wait(here.turn)


def attend(here: ThreadBlock, carry: Carry, step: Any, mask: Mask | None = None, *, in_turns: bool) -> Carry:
    """Take in a slot of C keys: all of them for each query row, or those that `mask` leaves.

    `in_turns`: the two warp groups, which must call this equally often, take turns, so that the matrix unit
    has one's products to do while the other has its softmax.
    """
    top, total, sums = carry
    shape, slot = here.shape, here.slot(step)
    interpret, c = shape.interpret, shape.scale * _LOG2_E
    plgpu.barrier_wait(here.k_here.at[slot])
    scores = times_transposed(
        here.q_s.at[here.group],
        here.k_s.at[slot],
        lambda: next_turn(here) if in_turns else None,
        interpret=interpret,
    )  # [Q, C]
    plgpu.barrier_arrive(here.k_free.at[slot])
    if mask is not None:
        keys = iota(Q, shape.step, 1, interpret=interpret) + mask.key
        scores = jnp.where(keys <= along_rows(mask.last_key, (Q, shape.step)), scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(axis=1) * c)
    shrink = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores * c - along_rows(new_top, (Q, shape.step)))
    total = total * shrink + weights.sum(axis=1)
    sums = sums * along_rows(shrink, (Q, shape.head_size))
    narrow = weights.astype(here.q_s.dtype)
    new_top, total, sums, narrow = lax.optimization_barrier((new_top, total, sums, narrow))
    if in_turns:
        plgpu.barrier_arrive(here.turn)
    plgpu.barrier_wait(here.v_here.at[slot])
    if in_turns:
        plgpu.barrier_wait(here.turn)
    if mask is not None:
        behind = mask.key + shape.step > mask.end
        pl.when(behind)(lambda: _clear_behind(here, slot, mask.key, mask.end))
    sums = plus_product(sums, narrow, here.v_s.at[slot], interpret=interpret)
    plgpu.barrier_arrive(here.v_free.at[slot])
    return new_top, total, sums


def _clear_behind(here: ThreadBlock, slot: Any, key: Any, end: Any) -> None:
    """Zero a slot's values behind `end`: what others left there may be inf or NaN, and 0 * NaN is NaN."""
    width = swizzle_bytes(here.shape.head_size) // 2
    for column in range(0, here.shape.head_size, width):  # a few registers at a time
        values = here.v_s.at[slot, :, pl.ds(column, width)]
        row = iota(here.shape.step, width, 0, interpret=here.shape.interpret) + key
        values[...] = jnp.where(row < end, values[...], jnp.zeros(values.shape, values.dtype))
    plgpu.commit_smem()
