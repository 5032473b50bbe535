"""Latent attention in the plain form on a CPU: one custom call per layer, written in C (plain_latent.c)."""

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.native.custom_call import target
from orca_jax.native.operations import BITS, dtype_of_cache

_WIDTH = 16  # every size is a multiple of this, as in plain_latent.c


def unsupported(dtype: str, **sizes: int) -> str | None:
    """Why this form cannot run in C, or None if it can; `sizes` are the parts of keys and values by name."""
    if dtype not in BITS:
        return f"the native plain form is for float32 and bfloat16, and keys and values are {dtype}"
    for name, size in sizes.items():
        if size % _WIDTH:
            return f"the native plain form is for a {name} in steps of {_WIDTH}, not of {size}"
    return None


def plain_latent_target(q_dtype: str, kv_dtype: str) -> str:
    """Name of the custom call; each dtype is float32 or bfloat16. Raises NotBuilt."""
    return target("plain_latent", Q_BITS=BITS[q_dtype], KV_BITS=BITS[kv_dtype])


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
    """Causal attention of each request's query tokens to its keys, expanded from the latent cache.

    q [T, N, P + U]; keys [n_blocks, 1, B, C + U] has a token's compressed vector (C), then the rotated part
    of its key (U); weight [N, P + W, C] expands a compressed vector to a head's key (P) and value (W).
    block_table [R, max_blocks], row_start [R + 1] and kv_length [R] int32. A row's queries are the last
    positions of its `kv_length`; scores are `scale` times q.k. The result is [T, N, W] in the dtype of q and
    weight, with zeros for padding tokens and for rows without a key. That dtype and the cache's are each
    float32 or bfloat16, in the cache also stored as uint16; the arithmetic is float32. Raises NotBuilt
    without a C compiler, or without AVX-512 or AVX2.
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
