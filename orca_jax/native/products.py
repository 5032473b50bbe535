"""The matrix products of linear layers and experts on a CPU, as custom calls written in C (ORCA 3.2).

One product (product.h) serves three calls: a linear layer (linear.c), rows in groups that each have their
own weight (grouped.c), and a whole mixture of experts (mixture.c).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.native.custom_call import target
from orca_jax.native.operations import BITS, grouped_sizes, linear_sizes

_WIDTH = 16  # the input is a multiple of this, and the output at least this (product.h)
DTYPES = tuple(BITS)


def linear_target(x_dtype: Any, weight_dtype: Any, *, steady: bool = False) -> str:
    """Name of linear.c's custom call for these DTYPES. Raises NotBuilt."""
    return target("linear", **linear_sizes(np.dtype(x_dtype).name, np.dtype(weight_dtype).name, steady))


def has_form(x: jax.Array, weight: jax.Array) -> bool:
    """Whether native_linear can multiply x [T, in] by weight [out, in], native_grouped by [X, out, in]."""
    if x.dtype.name not in DTYPES or weight.dtype.name not in DTYPES:
        return False
    return x.shape[1] % _WIDTH == 0 and x.shape[1] > 0 and weight.shape[-2] >= _WIDTH


def native_linear(
    x: jax.Array, weight: jax.Array, n_tokens: jax.Array | None = None, *, steady: bool = False
) -> jax.Array:
    """x [T, in] times weight [out, in]: [T, out] in x's dtype.

    x and weight are each float32 or bfloat16; products and sums are float32. Only the first `n_tokens` [1]
    int32 rows, by default all, are computed; the others are zero. A token's result may depend on the number
    of tokens and on whether it is among the last, never on other tokens' values; with `steady` it depends
    only on whether there are more than eight tokens, with AVX2 six, and with AMX in bfloat16 on the token
    alone. Raises NotBuilt without a C compiler, or
    without AVX-512 or AVX2.
    """
    assert x.shape[1] == weight.shape[1] and has_form(x, weight)
    if n_tokens is None:
        n_tokens = jnp.full(1, x.shape[0], jnp.int32)
    assert n_tokens.shape == (1,) and n_tokens.dtype == jnp.int32
    y = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), x.dtype)
    return jax.ffi.ffi_call(linear_target(x.dtype, weight.dtype, steady=steady), y)(x, weight, n_tokens)


def native_grouped(x: jax.Array, weight: jax.Array, sizes: jax.Array, *, steady: bool = False) -> jax.Array:
    """Consecutive groups of rows of x [N, in], each times its own weight of [X, out, in]: [N, out].

    Group i has sizes[i] rows, [X] int32; rows after the last group give zeros. Dtypes and errors are those of
    native_linear. A row's result depends on its group, as a token's does on the batch there. With `steady`
    it depends on the row alone, and small groups take longer.
    """
    n_experts, n_out, n_in = weight.shape
    assert x.shape[1] == n_in and sizes.shape == (n_experts,) and sizes.dtype == jnp.int32
    assert has_form(x, weight)
    y = jax.ShapeDtypeStruct((x.shape[0], n_out), x.dtype)
    return jax.ffi.ffi_call(_target("grouped", x, weight, steady), y)(x, weight, sizes)


def has_mixture_form(x: jax.Array, up: jax.Array, down: jax.Array) -> bool:
    """Whether native_mixture can run these experts."""
    n_experts, hidden, size = down.shape
    halves = up.shape == (n_experts, 2, size, hidden) and up.dtype == down.dtype
    return halves and size % _WIDTH == 0 and size > 0 and has_form(x, down)


def native_mixture(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    steady: bool = False,
) -> jax.Array:
    """Run the experts that each token of x [T, H] chose, and sum their results by weight: [T, H].

    `chosen` [T, k] int32 are a token's experts and `weights` [T, k] float32 the factors of their results; a
    number outside 0 to X - 1 adds nothing. An expert computes down (silu(gate) * up), with gate the first
    half of `up` [X, 2, F, H], and `down` [X, H, F]. Dtypes, errors and `steady` are those of native_grouped,
    and the products equal its products to the bit.
    """
    n_experts, hidden, size = down.shape
    n_tokens, top_k = chosen.shape
    assert has_mixture_form(x, up, down) and x.shape == (n_tokens, hidden)
    assert weights.shape == chosen.shape and weights.dtype == jnp.float32 and chosen.dtype == jnp.int32
    n_rows = n_tokens * top_k
    shapes = [(n_tokens, hidden), (n_rows, hidden), (2, n_rows, size), (n_rows, hidden)]
    results = [jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes]  # y, then memory to work in
    call = jax.ffi.ffi_call(_target("mixture", x, down, steady), results)
    return call(x, weights, chosen, up.reshape(n_experts, 2 * size, hidden), down)[0]


def _target(operation: str, x: jax.Array, weight: jax.Array, steady: bool) -> str:
    return target(operation, **grouped_sizes(x.dtype.name, weight.dtype.name, steady))
