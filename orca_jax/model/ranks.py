"""Order by counting: short sequences are ordered by comparing every pair.

On a GPU a sort is several launches, and the comparisons are one that costs less than a launch. On a CPU, and
for long sequences, sorting is less work.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

_MOST_COUNTED = 4096  # of longer sequences, the pairs take longer than a sort's launches


def ranks(values: jax.Array) -> jax.Array:
    """Each element's place along the last axis in descending order, int32; of equal ones the first is first.

    This is the order of lax.top_k, but for NaN and a zero's sign.
    """
    index = jnp.arange(values.shape[-1])
    one, other = values[..., :, None], values[..., None, :]
    before = (other > one) | ((other == one) & (index < index[:, None]))
    return before.sum(axis=-1, dtype=jnp.int32)


def sorted_places(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A stable ascending sort of `keys` [n]: which element is at each place, and each element's place."""
    if len(keys) > _MOST_COUNTED:
        return _by_sorting(keys)
    return lax.platform_dependent(keys, cpu=_by_sorting, default=places_by_counting)


def group_sizes(keys: jax.Array, n: int) -> jax.Array:
    """How many of `keys` [N] are 0, 1, ... n - 1: [n] int32."""

    def down(keys: jax.Array) -> jax.Array:
        return (keys[:, None] == jnp.arange(n)).sum(axis=0, dtype=jnp.int32)

    return lax.platform_dependent(keys, cpu=down, default=partial(sizes_across, n=n))


def sizes_across(keys: jax.Array, n: int) -> jax.Array:
    """group_sizes by sums along the last axis. On a GPU they are one kernel; on a CPU they take longer."""
    return (jnp.arange(n)[:, None] == keys).sum(axis=1, dtype=jnp.int32)


def _by_sorting(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=jnp.int32), unique_indices=True)
    return order, place


def places_by_counting(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """sorted_places by comparing every pair."""
    place = ranks(-keys)
    index = jnp.arange(len(keys), dtype=jnp.int32)
    order = jnp.where(place == index[:, None], index, 0).sum(axis=-1, dtype=jnp.int32)
    return order, place
