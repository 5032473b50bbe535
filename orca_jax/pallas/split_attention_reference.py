"""Split attention in pure JAX, dense and plain: what the kernel is held to.

Shape letters as in `orca_jax/model/__init__.py`: T tokens, R rows, N heads, K key/value heads, D head size,
B tokens of a block; C is the most keys a row can have, `max_blocks * B`.
"""

import jax
import jax.numpy as jnp


def split_attention_reference(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_table: jax.Array,
    row_start: jax.Array,
    kv_length: jax.Array,
    *,
    scale: float | None = None,
) -> jax.Array:
    """Causal attention of each request's query tokens to its own keys (ORCA 3.2).

    q [T, N, D], or [T, n, N, D] of which the first of n are the queries; k_cache, v_cache [n_blocks, K, B, D]
    with N a multiple of K; block_table [R, max_blocks], row_start [R + 1] and kv_length [R] int32. The
    queries of row r are the tokens row_start[r] to row_start[r + 1], the last positions of its kv_length[r].
    `scale` is D ** -0.5 unless given. Products and softmax are float32. Returns [T, N, D] of q's dtype, with
    zeros for tokens that belong to no row. What lies in slots that no query sees never reaches the result, be
    it NaN.
    """
    q = q if q.ndim == 3 else q[:, 0]
    n_tokens, n_heads, head_size = q.shape
    n_kv_heads = k_cache.shape[1]
    factor = head_size**-0.5 if scale is None else scale

    token = jnp.arange(n_tokens, dtype=jnp.int32)  # [T]
    row = jnp.searchsorted(row_start, token, side="right") - 1  # [T] the last row that starts at or before it
    row = jnp.clip(row, 0, len(kv_length) - 1)
    belongs = token < row_start[-1]
    position = jnp.where(belongs, kv_length[row] - row_start[row + 1] + token, -1)  # [T] within its request

    def keys_of_rows(cache: jax.Array) -> jax.Array:
        """All slots of each row, in order: [R, C, K, D] float32."""
        blocks = cache.at[block_table].get(mode="clip")  # [R, max_blocks, K, B, D]
        in_order = blocks.swapaxes(2, 3)  # [R, max_blocks, B, K, D]
        return in_order.reshape(len(block_table), -1, n_kv_heads, head_size).astype(jnp.float32)

    keys, values = keys_of_rows(k_cache)[row], keys_of_rows(v_cache)[row]  # [T, C, K, D]
    seen = jnp.arange(keys.shape[1], dtype=jnp.int32) <= position[:, None]  # [T, C]
    groups = q.astype(jnp.float32).reshape(n_tokens, n_kv_heads, n_heads // n_kv_heads, head_size)
    scores = factor * jnp.einsum("tkgd,tckd->tkgc", groups, jnp.where(seen[..., None, None], keys, 0))
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    weights = jnp.where(belongs[:, None, None, None], jax.nn.softmax(scores, axis=-1), 0)  # [T, K, N / K, C]
    out = jnp.einsum("tkgc,tckd->tkgd", weights, jnp.where(seen[..., None, None], values, 0))
    return out.reshape(q.shape).astype(q.dtype)
