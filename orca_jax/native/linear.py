"""The matrix product of a linear layer as a custom call on a CPU (ORCA 3.2), written in C (linear.c)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.native.custom_call import target
from orca_jax.native.operations import BITS, linear_sizes

_WIDTH = 16  # the input is a multiple of this, and the output at least this (linear.c)
DTYPES = tuple(BITS)


def linear_target(x_dtype: Any, weight_dtype: Any, *, steady: bool = False) -> str:
    """The name of the custom call for these DTYPES. Raises NotBuilt."""
    return target("linear", **linear_sizes(np.dtype(x_dtype).name, np.dtype(weight_dtype).name, steady))


def has_form(x: jax.Array, weight: jax.Array) -> bool:
    """Whether native_linear can multiply x [T, in] by weight [out, in], native_grouped by [X, out, in]."""
    if x.dtype.name not in DTYPES or weight.dtype.name not in DTYPES:
        return False
    return x.shape[1] % _WIDTH == 0 and x.shape[1] > 0 and weight.shape[-2] >= _WIDTH


def native_linear(
    x: jax.Array, weight: jax.Array, n_tokens: jax.Array | None = None, *, steady: bool = False
) -> jax.Array:
    """x [T, in] times weight [out, in], giving [T, out] in x's dtype.

    Each is float32 or bfloat16; products and sums are float32. Only the first `n_tokens` [1] int32, by
    default all, are computed; the other results are zero. A token's result depends on how many there are and
    on whether it is one of the last, and on nothing else of the others; if `steady` only on whether there are
    more than eight, with AVX2 six. Raises NotBuilt without a C compiler, or without AVX-512 or AVX2.
    """
    assert x.shape[1] == weight.shape[1] and has_form(x, weight)
    if n_tokens is None:
        n_tokens = jnp.full(1, x.shape[0], jnp.int32)
    assert n_tokens.shape == (1,) and n_tokens.dtype == jnp.int32
    y = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), x.dtype)
    return jax.ffi.ffi_call(linear_target(x.dtype, weight.dtype, steady=steady), y)(x, weight, n_tokens)
