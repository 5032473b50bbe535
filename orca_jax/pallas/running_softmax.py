"""Attention to one slot's keys after another, with a running softmax in registers, in float32.

The carry from slot to slot has, for each query row, top [Q], the highest score so far times log2(e); total
[Q], the sum of weights, which are 2 ** (score - top); and sums [Q, D], the sum of weighted values.
"""

import math
from collections.abc import Callable
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
    tanh,
    times_transposed,
)
from orca_jax.pallas.thread_block import ThreadBlock

Carry = tuple[jax.Array, jax.Array, jax.Array]


class Mask(NamedTuple):
    """The keys of a slot that each query row sees."""

    key: Any  # the slot's first key
    end: Any  # the key after the item's last; values from here on may hold anything
    last_key: jax.Array  # [Q] the last key that each query row sees
    n_seen: Any  # the number of keys up to last_key that a row sees; None for all


_LOWEST = -1e30  # top before the first key; finite, so that inf - inf cannot arise
_LOG2_E = math.log2(math.e)


def nothing_yet(shape: KernelShape) -> Carry:
    """The carry before the first key."""
    interpret = shape.interpret
    return (
        laid_out(jnp.full((Q,), _LOWEST, jnp.float32), TILE_ROW, interpret=interpret),
        laid_out(jnp.zeros((Q,), jnp.float32), TILE_ROW, interpret=interpret),
        laid_out(jnp.zeros((Q, shape.head_size), jnp.float32), TILE, interpret=interpret),
    )


def over_slots(
    whole: Callable[..., Carry],
    masked: Callable[..., Carry],
    carry: Carry,
    n_head: Any,
    n_whole: Any,
    n_all: Any,
) -> Carry:
    """Attend to n_all slots: `masked` up to n_head (None: none), `whole` up to n_whole, then `masked`."""
    if n_head is None:
        carry = lax.fori_loop(0, n_whole, whole, carry)
        return lax.fori_loop(n_whole, n_all, masked, carry)

    def half(second: Any, carry: Carry) -> Carry:
        carry = lax.fori_loop(second * n_whole, jnp.where(second == 0, n_head, n_all), masked, carry)
        return lax.fori_loop(n_head, jnp.where(second == 0, n_whole, 0), whole, carry)

    return lax.fori_loop(0, 2, half, carry)  # the kernel then has the masked loop's long code once


def next_turn(here: ThreadBlock) -> None:
    """Give the other warp group its turn and wait for this one's."""
    plgpu.barrier_arrive(here.turn)
    plgpu.barrier_wait(here.turn)


def attend(here: ThreadBlock, carry: Carry, step: Any, mask: Mask | None = None, *, in_turns: bool) -> Carry:
    """Attend to a slot's C keys, all of them or those that `mask` lets each query row see.

    With `in_turns` the two warp groups alternate, so that the matrix unit computes one group's products
    during the other's softmax. Both must then call this equally often.
    """
    top, total, sums = carry
    shape, slot = here.shape, here.slot(step)
    interpret = shape.interpret
    plgpu.barrier_wait(here.k_here.at[slot])
    scores = times_transposed(
        here.q_s.at[here.group],
        here.k_s.at[slot],
        lambda: next_turn(here) if in_turns else None,
        interpret=interpret,
    )  # [Q, C]
    plgpu.barrier_arrive(here.k_free.at[slot])
    c = shape.scale * _LOG2_E  # the factor that the scores still lack
    if shape.soft_cap is not None:  # before the mask: tanh would make -1 of -inf
        scores = tanh(scores, shape.scale / shape.soft_cap, interpret=interpret)
        c = shape.soft_cap * _LOG2_E
    if mask is not None:
        tile = (Q, shape.step)
        key, last_key = iota(*tile, 1, interpret=interpret), along_rows(mask.last_key - mask.key, tile)
        seen = key <= last_key
        if mask.n_seen is not None:  # one comparison is enough: a negative difference is large as unsigned
            seen = (last_key - key).astype(jnp.uint32) < jnp.asarray(mask.n_seen).astype(jnp.uint32)
        scores = jnp.where(seen, scores, -jnp.inf)
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
        past_end = mask.key + shape.step > mask.end
        pl.when(past_end)(lambda: _clear_past_end(here, slot, mask.key, mask.end))
    sums = plus_product(sums, narrow, here.v_s.at[slot], interpret=interpret)
    plgpu.barrier_arrive(here.v_free.at[slot])
    return new_top, total, sums


def _clear_past_end(here: ThreadBlock, slot: Any, key: Any, end: Any) -> None:
    """Zero a slot's values from `end` on: they are left over and may be inf or NaN, and 0 * NaN is NaN."""
    width = swizzle_bytes(here.shape.head_size) // 2
    for column in range(0, here.shape.head_size, width):  # a few registers at a time
        values = here.v_s.at[slot, :, pl.ds(column, width)]
        row = iota(here.shape.step, width, 0, interpret=here.shape.interpret) + key
        values[...] = jnp.where(row < end, values[...], jnp.zeros(values.shape, values.dtype))
    plgpu.commit_smem()
