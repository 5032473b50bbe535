"""The last step of split attention: combines the parts of items that were split.

For each split item it gathers as many parts as a result can have, reduces over them, and scatters the result;
XLA makes two or three kernels of that. Other results are already in the output.
"""

import jax
import jax.numpy as jnp

from orca_jax.pallas.work_list.bounds import MOST_TILE_PARTS, TILE, Plan
from orca_jax.pallas.work_list.work_items import MERGE

_LOWEST = -1e30  # the top of a missing part; finite, so that inf - inf cannot arise


def merge_rows(
    out: jax.Array,
    part: jax.Array,
    part_top: jax.Array,
    work: jax.Array,
    plan: Plan,
    *,
    grouped_last: bool = False,
) -> jax.Array:
    """Write the results of split rows to `out` [T, G, K, D], or [T, K, G, D] with `grouped_last`.

    part [n, parts, G, D]: each part's result and, if n is 2, the remainder of its rounding. part_top
    [parts, padded G] float32: the logarithm to base 2 of each part's weight. Parts that no core wrote may
    hold anything.
    """
    merges = work[plan.first_merge : plan.first_tile_merge]
    rows = _combined(part, part_top[:, : plan.group], merges, plan.most_parts)  # [M, G, D]
    token, head = merges[:, MERGE.token], merges[:, MERGE.head]
    at = out.at[token, head] if grouped_last else out.at[token, :, head]
    return at.set(rows.astype(out.dtype), mode="drop", unique_indices=True)


def merge_tiles(
    out: jax.Array, part: jax.Array, part_top: jax.Array, work: jax.Array, plan: Plan
) -> jax.Array:
    """Write the results of split tiles to `out` [T, G, K, D].

    part [n, parts, TILE, D] and part_top [parts, TILE] are as in merge_rows. A tile's rows are, for each half
    of its tokens, one packed head after another.
    """
    merges = work[plan.first_tile_merge :]
    rows = _combined(part, part_top, merges, MOST_TILE_PARTS)  # [M, TILE, D]
    row, half = jnp.arange(TILE, dtype=jnp.int32), plan.tile_tokens // 2
    query = row // (TILE // 2) * half + row % half
    kv_head, first = jnp.divmod(merges[:, MERGE.head, None], plan.group // plan.packed)
    head = first * plan.packed + row % (TILE // 2) // half
    nowhere = plan.n_tokens + jnp.arange(rows.shape[0] * TILE, dtype=jnp.int32).reshape(-1, TILE)
    exists = query < merges[:, MERGE.n_queries, None]
    token = jnp.where(exists, merges[:, MERGE.token, None] + query, nowhere)
    at = out.at[token, head, kv_head]
    return at.set(rows.astype(out.dtype), mode="drop", unique_indices=True)


def _combined(part: jax.Array, part_top: jax.Array, merges: jax.Array, most: int) -> jax.Array:
    """Combine part [n, parts, Q, D] and part_top [parts, Q], at most `most` parts each: [M, Q, D] float32."""
    i = jnp.arange(most, dtype=jnp.int32)  # [P]
    first, following, stride, n_parts = (
        merges[:, column, None] for column in (MERGE.part, MERGE.following, MERGE.stride, MERGE.n_parts)
    )
    exists = i < n_parts  # [M, P]
    # For parts that it lacks, a result reads its first part again, which is finite: 0 * NaN is NaN.
    which = jnp.where((i > 0) & exists, following + (i - 1) * stride, first)
    tops = jnp.where(exists[..., None], part_top.at[which].get(mode="clip"), _LOWEST)  # [M, P, Q]
    tops = jnp.maximum(tops, _LOWEST)  # of a part that sees no key it is -inf
    # Each part's share by its distances to all parts: one kernel, where a softmax's maximum, weights and sum
    # are three. An infinite sum gives the share 0.
    shares = 1 / jnp.exp2(tops[:, None] - tops[:, :, None]).sum(axis=2)
    results = sum(x.at[which].get(mode="clip").astype(jnp.float32) for x in part)  # [M, P, Q, D]
    return (shares[..., None] * results).sum(axis=1)
