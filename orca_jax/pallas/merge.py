"""Results that were computed in parts, put together: the last step of split attention.

Gathers over at most as many parts as a result can have, reductions too short for kernels of their own, and
one scatter: XLA makes two kernels of it. What was not cut writes nowhere.
"""

import jax
import jax.numpy as jnp
from jax import lax

from orca_jax.pallas.work_list.bounds import TILE, Plan
from orca_jax.pallas.work_list.work_items import MERGE


def merge_rows(
    out: jax.Array, part: jax.Array, part_top: jax.Array, work: jax.Array, plan: Plan
) -> jax.Array:
    """Put the rows together that were cut, in `out` [T, N, D].

    part [n, parts, G, D]: each part's result and, where n is 2, what its rounding took away; part_top
    [parts, padded G] float32: the logarithm to base 2 of each part's weight. What lies in them for parts that
    nobody wrote reaches no result.
    """
    merges = work[plan.first_merge : plan.first_tile_merge]
    rows = _together(part, part_top[:, : plan.group], merges, plan.most_parts)  # [M, G, D]
    apart = out.reshape(plan.n_tokens, plan.n_kv_heads, plan.group, -1)
    at = apart.at[merges[:, MERGE.token], merges[:, MERGE.head]]
    return at.set(rows.astype(out.dtype), mode="drop", unique_indices=True).reshape(out.shape)


def merge_tiles(
    out: jax.Array, part: jax.Array, part_top: jax.Array, work: jax.Array, plan: Plan
) -> jax.Array:
    """The same for tiles: part [n, parts, TILE, D], part_top [parts, TILE]."""
    merges = work[plan.first_tile_merge :]
    rows = _together(part, part_top, merges, plan.most_tile_parts)  # [M, TILE, D]
    row = jnp.arange(TILE, dtype=jnp.int32)
    nowhere = plan.n_tokens + jnp.arange(rows.shape[0] * TILE, dtype=jnp.int32).reshape(-1, TILE)
    there = row < merges[:, MERGE.n_queries, None]
    token = jnp.where(there, merges[:, MERGE.token, None] + row, nowhere)
    at = out.at[token, merges[:, MERGE.head, None]]
    return at.set(rows.astype(out.dtype), mode="drop", unique_indices=True)


def _together(part: jax.Array, part_top: jax.Array, merges: jax.Array, most: int) -> jax.Array:
    """[M, Q, D] float32 of part [n, parts, Q, D] and part_top [parts, Q]."""
    i = jnp.arange(most, dtype=jnp.int32)  # P of them
    first, following, stride, n_parts = (
        merges[:, column, None] for column in (MERGE.part, MERGE.following, MERGE.stride, MERGE.n_parts)
    )
    there = i < n_parts  # [M, P]
    # Past its last a result looks at its first again, which is a number: 0 * NaN is NaN.
    which = jnp.where((i > 0) & there, following + (i - 1) * stride, first)
    tops = jnp.where(there[..., None], part_top.at[which].get(mode="clip"), -jnp.inf)  # [M, P, Q]
    # Apart, or XLA takes it for a softmax, which it makes a kernel of its own.
    top = lax.optimization_barrier(tops.max(axis=1, keepdims=True))
    weight = jnp.exp2(tops - top)[..., None]
    results = sum(x.at[which].get(mode="clip").astype(jnp.float32) for x in part)  # [M, P, Q, D]
    return (weight * results).sum(axis=1) / weight.sum(axis=1)
