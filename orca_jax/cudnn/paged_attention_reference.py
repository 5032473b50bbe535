"""One call of cuDNN's paged attention, in plain, dense JAX."""

import jax
import jax.numpy as jnp


def paged_attention_reference(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    kv_length: jax.Array,
    block_table: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` with float32 sums, reading every slot that cuDNN may read.

    cuDNN masks scores, but does not promise to ignore slots after an entry's keys. So this multiplies their
    values by 0, not leaving them out: NaN in any block of an entry's table makes its result NaN.
    """
    n_entries, n_queries, n_heads, head_size = q.shape
    n_kv_heads = k_cache.shape[1]

    def in_order(cache: jax.Array) -> jax.Array:
        """All slots of each entry: [E, K, C, D] float32, with NaN for ids that are no block."""
        blocks = cache.astype(jnp.float32).at[block_table].get(mode="fill", wrap_negative_indices=False)
        return blocks.swapaxes(1, 2).reshape(n_entries, n_kv_heads, -1, head_size)

    keys, values = in_order(k_cache), in_order(v_cache)
    grouped = q.astype(jnp.float32).reshape(n_entries, n_queries, n_kv_heads, -1, head_size)
    scores = scale * jnp.einsum("eqkgd,ekcd->ekgqc", grouped, keys)
    exists = jnp.arange(keys.shape[2], dtype=jnp.int32) < kv_length[:, None]  # [E, C]
    scores = jnp.where(exists[:, None, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("ekgqc,ekcd->eqkgd", weights, values)
    log_sum = jax.nn.logsumexp(scores, axis=-1).reshape(n_entries, n_heads, n_queries)
    return out.reshape(q.shape).astype(q.dtype), log_sum
