"""Writes keys and values to the cache on a CPU, and rotates queries and keys: one custom call (place.c)."""

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.native.custom_call import target
from orca_jax.native.operations import BITS, CODES, dtype_of_cache, place_sizes

_WIDTH, _MOST = 16, 256  # a head's size is a multiple of one, and at most the other (place.c)


def native_place(
    heads: jax.Array,
    values: jax.Array,
    slot_of_token: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    into_keys: jax.Array,
    into_values: jax.Array,
    *into_scales: jax.Array,
    n_queries: int,
    key: int,
    interleaved: bool = False,
) -> tuple[jax.Array, ...]:
    """Write keys and values to their slots in a layer's cache [n_blocks, K, B, D], in place if donated.

    The keys are slice `key` of heads [T, n, K, D], the values the last slice of values [T, m, K, D]; a token
    whose slot_of_token [T] int32 is out of range is not written. cos and sin [T, size / 2] float32, or None,
    rotate the first `size` elements of each key, and of each query in the first `n_queries` (G) slices of
    heads: pairs of elements size / 2 apart or, if `interleaved`, adjacent ones. Returns the queries [T, G, K,
    D], and the cache's arrays. All are float32 or all bfloat16, in the cache also stored as uint16; the
    arithmetic is float32. A cache of eight bits also has scales of keys and of values, [n_blocks, K, B]
    float32, and is written as by `in_eight_bits` of model/kv_cache.py. Raises NotBuilt without a C compiler,
    or without AVX-512 or AVX2.
    """
    n_tokens, n_slices, n_kv_heads, head_size = heads.shape
    nothing = jnp.zeros((n_tokens, 0), jnp.float32)
    cos, sin = nothing if cos is None else cos, nothing if sin is None else sin
    assert head_size % _WIDTH == 0 and 0 < head_size <= _MOST and into_keys.shape == into_values.shape
    assert into_keys.shape[1] == n_kv_heads and into_keys.shape[3] == head_size
    assert values.shape[0] == n_tokens and values.shape[2:] == heads.shape[2:]
    assert 0 <= key < n_slices and 0 <= n_queries <= n_slices
    assert cos.shape == sin.shape and cos.shape[0] == n_tokens and 2 * cos.shape[1] <= head_size
    assert cos.dtype == sin.dtype == jnp.float32 and slot_of_token.dtype == jnp.int32
    dtype, held = heads.dtype.name, dtype_of_cache(into_keys.dtype.name)
    assert heads.dtype == values.dtype and dtype in BITS and into_values.dtype == into_keys.dtype
    assert held == dtype if not into_scales else held in CODES and len(into_scales) == 2
    assert all(scales.shape == into_keys.shape[:3] and scales.dtype == jnp.float32 for scales in into_scales)
    into = into_keys, into_values, *into_scales
    caches = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in into]
    queries = jax.ShapeDtypeStruct((n_tokens, n_queries, n_kv_heads, head_size), heads.dtype)
    call = jax.ffi.ffi_call(
        target("place", **place_sizes(dtype, held)),
        (queries, *caches),
        input_output_aliases={5 + i: 1 + i for i in range(len(into))},
    )
    return tuple(
        call(
            heads,
            values,
            slot_of_token,
            cos,
            sin,
            *into,
            key=np.int32(key),
            interleaved=np.int32(interleaved),
        )
    )
