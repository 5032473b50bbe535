"""Split attention as one custom call a layer, on a CPU (ORCA 3.2); split_attention.c has the work."""

import jax
import jax.numpy as jnp

from orca_jax.native.compiler import target

_LANES, _STRIP = 16, 8  # as in split_attention.c


def unsupported(head_size: int, block_size: int, dtype: str, n_heads: int, n_kv_heads: int) -> str | None:
    """Why there is no form for such a model, or None."""
    if dtype != "float32":
        return f"the native attention is for float32, and keys and values are {dtype}"
    if head_size % _LANES or not 0 < head_size <= 256:
        return f"the native attention is for heads of 16 to 256 in steps of {_LANES}, not of {head_size}"
    if block_size % _STRIP:
        return f"the native attention is for blocks of a multiple of {_STRIP} slots, not of {block_size}"
    if n_heads != n_kv_heads:
        return "the native attention is for as many key/value heads as query heads"
    return None


def attention_target(head_size: int, block_size: int) -> str:
    """The name of the custom call. Raises NotBuilt."""
    return target("split_attention", HEAD_SIZE=head_size, BLOCK_SIZE=block_size)


def native_split_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    block_table: jax.Array,
    row_start: jax.Array,
    kv_length: jax.Array,
) -> jax.Array:
    """Causal attention of each request's query tokens to its own keys.

    q [T, N, D]; keys and values [n_blocks, N, B, D], all float32; block_table [R, max_blocks], row_start
    [R + 1] and kv_length [R] int32. A row's queries are the last positions of its `kv_length`. The result is
    [T, N, D], with zeros for padding tokens. Raises NotBuilt where there is no compiler.
    """
    n_heads, head_size = q.shape[1:]
    block_size = keys.shape[2]
    reason = unsupported(head_size, block_size, str(q.dtype), n_heads, keys.shape[1])
    assert reason is None, reason
    assert keys.shape == values.shape and keys.dtype == values.dtype == q.dtype
    assert block_table.dtype == row_start.dtype == kv_length.dtype == jnp.int32
    assert block_table.shape[0] == kv_length.shape[0] == row_start.shape[0] - 1
    call = jax.ffi.ffi_call(attention_target(head_size, block_size), jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(q, keys, values, block_table, row_start, kv_length)
