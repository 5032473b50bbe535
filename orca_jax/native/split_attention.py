"""Split attention on a CPU (ORCA 3.2): one custom call per layer, written in C (split_attention.c)."""

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.native.custom_call import target
from orca_jax.native.operations import BITS, CODES, attention_sizes, dtype_of_cache

_WIDTH, _STRIP = 16, 8  # sizes of heads and of blocks are multiples of these (split_attention.c)
_MOST_LATENT = 640  # elements; a thread keeps a tile of queries and one of results on its stack
_ALL_KEYS = 2**31 - 1  # the window of a layer without one


def unsupported(
    head_size: int,
    block_size: int,
    dtype: str,
    n_heads: int,
    n_kv_heads: int,
    value_size: int | None = None,
) -> str | None:
    """Why the native attention cannot run a model of these sizes, as a clause; None if it can."""
    if dtype not in BITS:
        return f"the native attention is for float32 and bfloat16, and keys and values are {dtype}"
    if value_size is not None and (head_size % _WIDTH or value_size % _WIDTH or head_size > _MOST_LATENT):
        return (
            f"the native attention is for latent keys of up to {_MOST_LATENT} elements, with keys and values "
            f"in steps of {_WIDTH}, not of {head_size} and {value_size}"
        )
    if value_size is None and (head_size % _WIDTH or not 0 < head_size <= 256):
        return f"the native attention is for heads of 16 to 256 in steps of {_WIDTH}, not of {head_size}"
    if block_size % _STRIP:
        return f"the native attention is for blocks of a multiple of {_STRIP} slots, not of {block_size}"
    if n_heads % n_kv_heads:
        return f"its {n_heads} query heads are not a multiple of its {n_kv_heads} key/value heads"
    return None


def attention_target(
    head_size: int, block_size: int, q_dtype: str, kv_dtype: str, value_size: int | None = None
) -> str:
    """Name of the custom call for float32 or bfloat16, in the cache also int8 or fp8. Raises NotBuilt."""
    return target("split_attention", **attention_sizes(head_size, block_size, q_dtype, kv_dtype, value_size))


def native_split_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array | None,
    block_table: jax.Array,
    row_start: jax.Array,
    kv_length: jax.Array,
    *,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    group: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    chunked: bool = False,
    soft_cap: float | None = None,
    slopes: jax.Array | None = None,
    causal: bool = True,
    relative: jax.Array | None = None,
    sinks: jax.Array | None = None,
    value_size: int | None = None,
) -> jax.Array:
    """Attention of each request's query tokens to its own keys, up to each query's position if `causal`.

    The first G = `group` slices, by default all, of q [T, n, K, D] are the queries, in group-major order:
    query head [g, k] attends to key/value head k. keys and values [n_blocks, K, B, D]; block_table
    [R, max_blocks], row_start [R + 1] and kv_length [R] int32. A row's queries are the last positions of its
    `kv_length`. The result is [T, G, K, D] in q's dtype, with zeros for padding tokens and for rows without a
    key. q and the cache are each float32 or bfloat16, in the cache also stored as uint16; the arithmetic is
    float32. Keys and values may also be of eight bits, int8 or e4m3 stored as uint8, with `key_scales` and
    `value_scales` [n_blocks, K, B] float32.

    The scores are those of model/attention.py, with the same options; blocks outside the `window` are not
    read. Without `values`, a value is the first `value_size` elements of its key, and the result has that
    size in place of D. Raises NotBuilt without a C compiler, or without AVX-512 or AVX2.
    """
    n_slices, n_kv_heads, head_size = q.shape[1:]
    group = n_slices if group is None else group
    block_size = keys.shape[2]
    kv_dtype = dtype_of_cache(keys.dtype.name)
    assert (values is None) is (value_size is not None)
    values = keys if values is None else values
    sizes = (group * n_kv_heads, keys.shape[1], value_size)
    reason = unsupported(head_size, block_size, q.dtype.name if kv_dtype in CODES else kv_dtype, *sizes)
    assert reason is None, reason
    assert 0 < group <= n_slices and keys.shape == values.shape and keys.shape[1] == n_kv_heads
    assert keys.dtype == values.dtype and q.dtype.name in BITS
    scales = [each for each in (key_scales, value_scales) if each is not None]
    assert len(scales) == (2 if kv_dtype in CODES else 0)
    assert all(each.shape == keys.shape[:3] and each.dtype == jnp.float32 for each in scales)
    assert block_table.dtype == row_start.dtype == kv_length.dtype == jnp.int32
    assert block_table.shape[0] == kv_length.shape[0] == row_start.shape[0] - 1
    assert (window is None or window > 0) and (soft_cap is None or soft_cap > 0)
    slopes = jnp.zeros((0, 0), jnp.float32) if slopes is None else slopes
    assert slopes.dtype == jnp.float32 and slopes.shape in ((0, 0), (group, n_kv_heads))
    sinks = jnp.zeros((0, 0), jnp.float32) if sinks is None else sinks
    assert sinks.dtype == jnp.float32 and sinks.shape in ((0, 0), (group, n_kv_heads))
    relative = jnp.zeros((0, n_kv_heads), jnp.float32) if relative is None else relative
    assert relative.dtype == jnp.float32 and relative.shape[1:] == (n_kv_heads,)
    assert not len(relative) or (len(relative) % 2 and group == 1)
    assert causal or (window is None and not slopes.size)
    size = head_size if value_size is None else value_size
    result = jax.ShapeDtypeStruct((q.shape[0], group, n_kv_heads, size), q.dtype)
    name = attention_target(head_size, block_size, str(q.dtype), kv_dtype, value_size)
    call = jax.ffi.ffi_call(name, result)
    return call(
        q,
        keys,
        values,
        block_table,
        row_start,
        kv_length,
        slopes,
        relative,
        sinks,
        *scales,
        causal=np.int32(causal),
        scale=np.float32(head_size**-0.5 if scale is None else scale),
        soft_cap=np.float32(soft_cap or 0),
        window=np.int32(_ALL_KEYS if window is None else min(window, _ALL_KEYS)),
        chunked=np.int32(chunked),
    )
