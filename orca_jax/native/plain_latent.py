"""Latent attention in its plain form on a CPU: one custom call per layer, written in C (plain_latent.c)."""

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.native.custom_call import target
from orca_jax.native.operations import BITS, dtype_of_cache, plain_latent_sizes

_WIDTH = 16  # every size is a multiple of this, as in plain_latent.c


def unsupported(dtype: str, **sizes: int) -> str | None:
    """Why this cannot run such a model, or None if it can; `sizes` are by name those of keys and values."""
    if dtype not in BITS:
        return f"the native plain form is for float32 and bfloat16, and keys and values are {dtype}"
    for name, size in sizes.items():
        if size % _WIDTH:
            return f"the native plain form is for a {name} in steps of {_WIDTH}, not of {size}"
    return None


def plain_latent_target(q_dtype: str, kv_dtype: str) -> str:
    """The name of the custom call; each dtype is float32 or bfloat16. Raises NotBuilt."""
    return target("plain_latent", **plain_latent_sizes(q_dtype, kv_dtype))


def native_plain_latent(
    q: jax.Array,
    keys: jax.Array,
    weight: jax.Array,
    block_table: jax.Array,
    row_start: jax.Array,
    kv_length: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Attention of each request's query tokens to its own keys, up to its own position.

    q [T, N, P + U]; keys [n_blocks, 1, B, C + U], of each token what is compressed and the U rotated elements
    of its keys; weight [N, P + W, C] makes a head's keys and then its values of what is compressed.
    block_table [R, max_blocks], row_start [R + 1] and kv_length [R] int32. A row's queries are the last
    positions of its `kv_length`; scores are `scale` times q.k. The result is [T, N, W] in the dtype of q,
    which is the weight's, with zeros for padding tokens and for rows without a key. That dtype and the
    cache's are each float32 or bfloat16, of the cache also as uint16; the arithmetic is float32. Raises
    NotBuilt without a C compiler, or without AVX-512 or AVX2.
    """
    n_tokens, n_heads, size = q.shape
    kv_dtype = dtype_of_cache(keys.dtype.name)
    rank, width = weight.shape[2], keys.shape[3]
    plain = size - (width - rank)
    value = weight.shape[1] - plain
    reason = unsupported(kv_dtype, rank=rank, rotary_size=width - rank, plain_size=plain, value_size=value)
    assert reason is None, reason
    assert weight.shape[0] == n_heads and keys.shape[1] == 1 and min(width - rank, plain, value) > 0
    assert weight.dtype == q.dtype and q.dtype.name in BITS
    assert block_table.dtype == row_start.dtype == kv_length.dtype == jnp.int32
    assert block_table.shape[0] == kv_length.shape[0] == row_start.shape[0] - 1
    result = jax.ShapeDtypeStruct((n_tokens, n_heads, value), q.dtype)
    call = jax.ffi.ffi_call(plain_latent_target(str(q.dtype), kv_dtype), result)
    return call(q, keys, weight, block_table, row_start, kv_length, scale=np.float32(scale))
