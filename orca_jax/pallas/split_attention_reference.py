"""Split attention in plain, dense JAX, which the kernel must equal.

Shape letters as in `orca_jax/model/__init__.py`; C = max_blocks * B is the most keys that a row can have.
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
    group: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """`split_attention`, with float32 products and softmax: the same arguments, and [T, G, K, D].

    Slots that no query sees never affect the result, even if they hold NaN.
    """
    q = q if group is None else q[:, :group]
    n_tokens, _, n_kv_heads, head_size = q.shape
    factor = head_size**-0.5 if scale is None else scale

    token = jnp.arange(n_tokens, dtype=jnp.int32)  # [T]
    row = jnp.searchsorted(row_start, token, side="right") - 1  # [T] the last row that starts at or before it
    row = jnp.clip(row, 0, len(kv_length) - 1)
    belongs = token < row_start[-1]
    position = jnp.where(belongs, kv_length[row] - row_start[row + 1] + token, -1)  # [T] in its request

    def keys_of_rows(cache: jax.Array) -> jax.Array:
        """All slots of each row, in order: [R, C, K, D] float32."""
        blocks = cache.at[block_table].get(mode="clip")  # [R, max_blocks, K, B, D]
        in_order = blocks.swapaxes(2, 3)  # [R, max_blocks, B, K, D]
        return in_order.reshape(len(block_table), -1, n_kv_heads, head_size).astype(jnp.float32)

    keys, values = keys_of_rows(k_cache)[row], keys_of_rows(v_cache)[row]  # [T, C, K, D]
    key = jnp.arange(keys.shape[1], dtype=jnp.int32)
    seen = key <= position[:, None]  # [T, C]
    if window is not None:
        seen &= key > position[:, None] - window
    visible = seen[..., None, None]
    scores = factor * jnp.einsum("tgkd,tckd->tgkc", q.astype(jnp.float32), jnp.where(visible, keys, 0))
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    weights = jnp.where(belongs[:, None, None, None], jax.nn.softmax(scores, axis=-1), 0)  # [T, G, K, C]
    out = jnp.einsum("tgkc,tckd->tgkd", weights, jnp.where(visible, values, 0))
    return out.astype(q.dtype)
