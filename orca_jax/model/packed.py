"""Products of experts whose matrices stay in MXFP4 (families/mixtures/mxfp4.py): unpacked as they are needed.

A row of a packed matrix has its numbers, two in a byte, and then the scales of every 32 of them.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from orca_jax.families.mixtures.mxfp4 import BLOCK, BLOCK_BYTES

Grouped = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # layers.grouped_matmul


def unpacked(packed: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The numbers [..., 32 n] in `dtype` of uint8 [..., 17 n]."""
    n_blocks = packed.shape[-1] // BLOCK_BYTES
    both, scales = jnp.split(packed, [n_blocks * BLOCK // 2], axis=-1)
    codes = jnp.stack([both & 15, both >> 4], axis=-1).reshape(*packed.shape[:-1], n_blocks, BLOCK)
    numbers = _fp4(codes.astype(jnp.uint32)) * _power(scales.astype(jnp.uint32))[..., None]
    return numbers.astype(dtype).reshape(*packed.shape[:-1], n_blocks * BLOCK)


def _fp4(code: jax.Array) -> jax.Array:
    """The float32 of a sign, two bits of exponent and one of mantissa, by its own bits."""
    exponent, mantissa = code >> 1 & 3, code & 1
    below_one = jnp.where(mantissa == 1, jnp.uint32(126 << 23), 0)
    bits = jnp.where(exponent > 0, (exponent + 126) << 23 | mantissa << 22, below_one) | code >> 3 << 31
    return lax.bitcast_convert_type(bits, jnp.float32)


def _power(scale: jax.Array) -> jax.Array:
    """2 ** (scale - 127) float32; of 0 that is the greatest number below the normal ones."""
    return lax.bitcast_convert_type(jnp.where(scale > 0, scale << 23, jnp.uint32(1 << 22)), jnp.float32)


def packed_grouped(x: jax.Array, weight: jax.Array, sizes: jax.Array, grouped: Grouped) -> jax.Array:
    """As `grouped` with a weight uint8 [X, out, 17 in / 32]."""
    at_once, one_by_one = (partial(each, grouped=grouped) for each in (of_those_hit, of_each_hit))
    return lax.platform_dependent(x, weight, sizes, cpu=one_by_one, default=at_once)


def of_those_hit(x: jax.Array, weight: jax.Array, sizes: jax.Array, grouped: Grouped) -> jax.Array:
    """Unpacks no more experts than there are rows, those with rows first, and all of these at once."""
    n = min(len(sizes), x.shape[0])
    hit = jnp.argsort(sizes == 0, stable=True)[:n]  # in their own order, which is that of the rows
    return grouped(x, unpacked(weight[hit], x.dtype), sizes[hit])


def of_each_hit(x: jax.Array, weight: jax.Array, sizes: jax.Array, grouped: Grouped) -> jax.Array:
    """Unpacks an expert at a time; those without rows are left out."""
    starts = jnp.cumsum(sizes) - sizes

    def add(i: jax.Array, y: jax.Array) -> jax.Array:
        def multiply(y: jax.Array) -> jax.Array:
            # Its rows first, and as the only group: others are not multiplied.
            own = grouped(jnp.roll(x, -starts[i], 0), unpacked(weight[i], x.dtype)[None], sizes[i][None])
            return y + jnp.roll(own, starts[i], 0)

        return lax.cond(sizes[i] > 0, multiply, lambda y: y, y)

    return lax.fori_loop(0, len(sizes), add, jnp.zeros((x.shape[0], weight.shape[1]), x.dtype))
