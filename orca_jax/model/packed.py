"""Products of experts whose weights stay in MXFP4 (families/mixtures/mxfp4.py), unpacked as they are needed.

A row of a packed weight has its numbers, two in a byte, and then one scale byte for every 32 numbers.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from orca_jax.families.mixtures.mxfp4 import BLOCK, BLOCK_BYTES

Unpack = Callable[[jax.Array], jax.Array]  # numbers [n] of experts to their dense weights [n, out, in]
Grouped = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # layers.grouped_matmul


def unpacked(packed: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Unpack uint8 [..., 17 n] to numbers [..., 32 n] in `dtype`."""
    n_blocks = packed.shape[-1] // BLOCK_BYTES
    both, scales = jnp.split(packed, [n_blocks * BLOCK // 2], axis=-1)
    codes = jnp.stack([both & 15, both >> 4], axis=-1).reshape(*packed.shape[:-1], n_blocks, BLOCK)
    numbers = _fp4(codes.astype(jnp.uint32)) * _power(scales.astype(jnp.uint32))[..., None]
    return numbers.astype(dtype).reshape(*packed.shape[:-1], n_blocks * BLOCK)


def _fp4(code: jax.Array) -> jax.Array:
    """The float32 of an FP4 code: a sign, two bits of exponent and one of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    below_one = jnp.where(mantissa == 1, jnp.uint32(126 << 23), 0)
    bits = jnp.where(exponent > 0, (exponent + 126) << 23 | mantissa << 22, below_one) | code >> 3 << 31
    return lax.bitcast_convert_type(bits, jnp.float32)


def _power(scale: jax.Array) -> jax.Array:
    """2 ** (scale - 127) as float32; for scale 0 that is subnormal, the half of the least normal number."""
    return lax.bitcast_convert_type(jnp.where(scale > 0, scale << 23, jnp.uint32(1 << 22)), jnp.float32)


def packed_grouped(x: jax.Array, weight: jax.Array, sizes: jax.Array, grouped: Grouped) -> jax.Array:
    """`grouped` with a packed weight, uint8 [X, out, 17 in / 32]."""
    return grouped_unpacked(x, lambda at: unpacked(weight[at], x.dtype), weight.shape[1], sizes, grouped)


def grouped_unpacked(
    x: jax.Array, experts: Unpack, n_out: int, sizes: jax.Array, grouped: Grouped
) -> jax.Array:
    """`grouped` with a packed weight of which `experts` unpacks some experts, each [n_out, in]."""
    one_by_one = partial(unpack_one_by_one, experts=experts, n_out=n_out, grouped=grouped)
    at_once = partial(unpack_at_once, experts=experts, grouped=grouped)
    return lax.platform_dependent(x, sizes, cpu=one_by_one, default=at_once)


def unpack_at_once(x: jax.Array, sizes: jax.Array, *, experts: Unpack, grouped: Grouped) -> jax.Array:
    """grouped_unpacked for accelerators: unpacks all experts that have rows at once.

    There are at most as many of them as rows.
    """
    n = min(len(sizes), x.shape[0])
    hit = jnp.argsort(sizes == 0, stable=True)[:n]  # stable: the experts stay in the order of the rows
    return grouped(x, experts(hit), sizes[hit])


def unpack_one_by_one(
    x: jax.Array, sizes: jax.Array, *, experts: Unpack, n_out: int, grouped: Grouped
) -> jax.Array:
    """grouped_unpacked for CPUs: unpacks one expert at a time, and skips experts without rows."""
    starts = jnp.cumsum(sizes) - sizes

    def add(i: jax.Array, y: jax.Array) -> jax.Array:
        def multiply(y: jax.Array) -> jax.Array:
            # The expert's rows come first, as the only group, so that no others are multiplied.
            added = grouped(jnp.roll(x, -starts[i], 0), experts(i[None]), sizes[i][None])
            return y + jnp.roll(added, starts[i], 0)

        return lax.cond(sizes[i] > 0, multiply, lambda y: y, y)

    return lax.fori_loop(0, len(sizes), add, jnp.zeros((x.shape[0], n_out), x.dtype))
