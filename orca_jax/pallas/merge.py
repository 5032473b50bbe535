"""The results of a row's pieces put together: the last step of split attention.

Gathers alone, over as many pieces as a row can have, so that XLA makes it a kernel or two: the share of each
piece, then the sums, written where the row's result belongs. A row that is not split writes nowhere.
"""

from functools import reduce

import jax
import jax.numpy as jnp

from orca_jax.pallas.work_items import ENTRY, Plan


def merge(out: jax.Array, part: jax.Array, part_top: jax.Array, work: jax.Array, plan: Plan) -> jax.Array:
    """Put the rows that were split into pieces together, in `out` [T, N, D].

    part [P, max_entries, K, G, D]: each piece's result and, where P is 2, what its rounding took away; part_top
    [max_entries, K, padded G] float32: the logarithm to base 2 of each piece's weight. What lies in them for
    entries that are no piece of a split row reaches no result.
    """
    merges = work[plan.first_merge :]
    n_pieces = merges[:, ENTRY.n_pieces]
    last = jnp.maximum(n_pieces - 1, 0)
    # A row with fewer pieces looks at its last again and again, and gives it no weight.
    entries = [merges[:, ENTRY.slot] + jnp.minimum(i, last) for i in range(plan.max_pieces)]
    tops = [
        jnp.where((i < n_pieces)[:, None, None], part_top.at[entry].get(mode='clip',wrap_negative_indices=False)[..., : plan.group], -jnp.inf)
        for i, entry in enumerate(entries)
    ]  # each [R, K, G]
    top = reduce(jnp.maximum, tops)
    weights = [jnp.exp2(x - top) for x in tops]
    sums = sum(
        weight[..., None] * part.at[:,entry].get(mode='clip',wrap_negative_indices=False).astype(jnp.float32).sum(axis=0)
        for weight, entry in zip(weights, entries, strict=True)
    )
    rows = (sums / sum(weights)[..., None]).reshape(plan.n_rows, -1, out.shape[-1]).astype(out.dtype)
    return out.at[merges[:, ENTRY.token]].set(rows, mode="drop", unique_indices=True)
