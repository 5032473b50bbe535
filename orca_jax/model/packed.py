"""Products of experts whose weights stay packed, and are unpacked as they are needed."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

Unpack = Callable[[jax.Array], jax.Array]  # numbers [n] of experts to their dense weights [n, out, in]
Grouped = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # layers.grouped_matmul


def grouped_unpacked(
    x: jax.Array, experts: Unpack, n_out: int, sizes: jax.Array, grouped: Grouped
) -> jax.Array:
    """`grouped` with a packed weight of which `experts` unpacks some experts, each [n_out, in]."""
    one_by_one = partial(unpack_one_by_one, experts=experts, n_out=n_out, grouped=grouped)
    if len(x) <= len(sizes):
        elsewhere = partial(unpack_by_row, experts=experts)
    else:
        elsewhere = partial(unpack_at_once, experts=experts, grouped=grouped)
    return lax.platform_dependent(x, sizes, cpu=one_by_one, default=elsewhere)


def unpack_by_row(x: jax.Array, sizes: jax.Array, *, experts: Unpack) -> jax.Array:
    """grouped_unpacked for few rows on accelerators: each row multiplies the packed weight of its expert.

    XLA makes one kernel of it, which reads packed numbers and writes results alone. An expert is read again
    for each of its rows; unpacking it once means writing and reading its numbers, 4 to 8 times as many bytes.
    """
    row, number = jnp.arange(len(x)), jnp.arange(len(sizes))
    ends = jnp.where(number <= number[:, None], sizes, 0).sum(axis=1)  # one launch, unlike jnp.cumsum
    expert = (row[:, None] >= ends).sum(axis=1)
    products = experts(expert).astype(jnp.float32) * x.astype(jnp.float32)[:, None]
    return jnp.where((row < ends[-1])[:, None], products.sum(axis=-1), 0).astype(x.dtype)


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
