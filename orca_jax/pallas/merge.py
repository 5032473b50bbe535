"""The results of a row's pieces put together: the last step of split attention.

Gathers over at most as many pieces as a row can have, reductions too short for kernels of their own, and one
scatter: XLA makes a kernel or two of it. A row that is not split writes nowhere.
"""

import jax
import jax.numpy as jnp

from orca_jax.pallas.work_items import ENTRY, Plan


def merge(out: jax.Array, part: jax.Array, part_top: jax.Array, work: jax.Array, plan: Plan) -> jax.Array:
    """Put the rows that were split into pieces together, in `out` [T, N, D].

    part [n, max_entries, K, G, D]: each piece's result and, where n is 2, what its rounding took away;
    part_top [max_entries, K, padded G] float32: the logarithm to base 2 of each piece's weight. What lies in
    them for entries that are no piece of a split row reaches no result.
    """
    merges = work[plan.first_merge :]
    first, n_pieces = merges[:, ENTRY.slot, None], merges[:, ENTRY.n_pieces, None]
    piece = jnp.arange(plan.max_pieces, dtype=jnp.int32)  # P of them
    entry = first + jnp.clip(n_pieces - 1, 0, piece)  # [R, P] past its last, a row looks at its last again
    top = part_top.at[entry].get(mode="clip")[..., : plan.group]  # [R, P, K, G]
    top = jnp.where((piece < n_pieces)[..., None, None], top, -jnp.inf)
    weight = jnp.exp2(top - top.max(axis=1, keepdims=True))
    attended = sum(x.at[entry].get(mode="clip").astype(jnp.float32) for x in part)  # [R, P, K, G, D]
    sums = (weight[..., None] * attended).sum(axis=1)
    rows = sums / weight.sum(axis=1)[..., None]  # [R, K, G, D]
    rows = rows.reshape(plan.n_rows, -1, out.shape[-1]).astype(out.dtype)
    return out.at[merges[:, ENTRY.token]].set(rows, mode="drop", unique_indices=True)
