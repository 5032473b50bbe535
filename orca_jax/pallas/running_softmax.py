"""Attention to one slot's keys after another, with a running softmax in registers, in float32.

The carry from slot to slot has, for each query row, top [Q], the highest score so far times log2(e); total
[Q], the sum of weights, which are 2 ** (score - top); and sums [Q, D], the sum of weighted values (in latent
attention, of this warp group's half of their columns).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from orca_jax.pallas.kernel_shape import Q, swizzle_bytes
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
from orca_jax.pallas.ring import slot_of
from orca_jax.pallas.thread_block import Block, ThreadBlock, TileShape

Carry = tuple[jax.Array, jax.Array, jax.Array]


class Mask(NamedTuple):
    """The keys of a slot that each query row sees."""

    key: Any  # the slot's first key
    end: Any  # the key after the item's last; values from here on may hold anything
    last_key: jax.Array  # [Q] the last key that each query row sees
    n_seen: Any  # the number of keys up to last_key that a row sees; None for all


_LOWEST = -1e30  # top before the first key; finite, so that inf - inf cannot arise
_LOG2_E = math.log2(math.e)


def nothing_yet(shape: TileShape) -> Carry:
    """The carry before the first key."""
    interpret = shape.interpret
    return (
        laid_out(jnp.full((Q,), _LOWEST, jnp.float32), TILE_ROW, interpret=interpret),
        laid_out(jnp.zeros((Q,), jnp.float32), TILE_ROW, interpret=interpret),
        laid_out(jnp.zeros((Q, shape.n_values), jnp.float32), TILE, interpret=interpret),
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
    shape, slot = here.shape, slot_of(here, step)
    interpret = shape.interpret
    plgpu.barrier_wait(here.k_here.at[slot])
    scores = times_transposed(
        here.q_s.at[here.group],
        here.k_s.at[slot],
        lambda: next_turn(here) if in_turns else None,
        interpret=interpret,
    )  # [Q, C]
    plgpu.barrier_arrive(here.k_free.at[slot])
    (top, total, sums), weights = weighed(shape, carry, scores, mask, here.q_s.dtype)
    if in_turns:
        plgpu.barrier_arrive(here.turn)
    plgpu.barrier_wait(here.v_here.at[slot])
    if in_turns:
        plgpu.barrier_wait(here.turn)
    if mask is not None:
        # In turns the first warp group has multiplied by these values, and so cleared them, when the second's
        # turn comes.
        clears = (here.group == 0) | (not in_turns)
        pl.when(clears & reaches_past_end(shape, mask))(lambda: clear_past_end(here, here.v_s, slot, mask))
    sums = plus_product(sums, weights, here.v_s.at[slot], interpret=interpret)
    plgpu.barrier_arrive(here.v_free.at[slot])
    return top, total, sums


def weighed(
    shape: TileShape, carry: Carry, scores: jax.Array, mask: Mask | None, dtype: DTypeLike
) -> tuple[Carry, jax.Array]:
    """Turn a slot's products of queries and keys [Q, C] into weights of `dtype`.

    Returns the carry with the weights' total and the shrunk sums, which lack this slot's values.
    """
    top, total, sums = carry
    interpret = shape.interpret
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
    sums = sums * along_rows(shrink, (Q, shape.n_values))
    narrow = weights.astype(dtype)
    new_top, total, sums, narrow = lax.optimization_barrier((new_top, total, sums, narrow))
    return (new_top, total, sums), narrow


def reaches_past_end(shape: TileShape, mask: Mask) -> Any:
    """Whether a slot has keys past the item's last."""
    return mask.key + shape.step > mask.end


def clear_past_end(here: Block, ring: Any, slot: Any, mask: Mask, first: Any = 0) -> None:
    """Zero a slot's values past the item's last key, in `n_values` columns of the ring from `first` on.

    They are left over and may be inf or NaN, and 0 * NaN is NaN.
    """
    width = swizzle_bytes(here.shape.n_values) // 2
    for column in range(0, here.shape.n_values, width):  # a few registers at a time
        values = ring.at[slot, :, pl.ds(first + column, width)]
        row = iota(here.shape.step, width, 0, interpret=here.shape.interpret) + mask.key
        values[...] = jnp.where(row < mask.end, values[...], jnp.zeros(values.shape, values.dtype))
    plgpu.commit_smem()
