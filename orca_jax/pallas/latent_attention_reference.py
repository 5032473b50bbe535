"""Latent attention in plain, dense JAX, which the kernel must equal."""

import jax

from orca_jax.pallas.split_attention_reference import split_attention_reference


def latent_attention_reference(
    q: jax.Array,
    cache: jax.Array,
    block_table: jax.Array,
    row_start: jax.Array,
    kv_length: jax.Array,
    *,
    rank: int,
    scale: float,
) -> jax.Array:
    """`latent_attention`, with float32 products and softmax: the same arguments, and [T, N, C].

    It is split attention with one key/value head whose values are its keys, up to their first C elements.
    """
    rows = (block_table, row_start, kv_length)
    return split_attention_reference(q[:, :, None], cache, cache, *rows, scale=scale)[:, :, 0, :rank]
