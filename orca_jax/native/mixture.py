"""The experts of a mixture as a custom call on a CPU, written in C (mixture.c)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.native.custom_call import target
from orca_jax.native.linear import has_form
from orca_jax.native.operations import grouped_sizes


def mixture_target(x_dtype: Any, weight_dtype: Any, *, steady: bool = False) -> str:
    """The name of the custom call for dtypes of linear.py. Raises NotBuilt."""
    return target("mixture", **grouped_sizes(np.dtype(x_dtype).name, np.dtype(weight_dtype).name, steady))


def has_mixture_form(x: jax.Array, up: jax.Array, down: jax.Array) -> bool:
    """Whether native_mixture can run these experts."""
    n_experts, hidden, size = down.shape
    halves = up.shape == (n_experts, 2, size, hidden) and up.dtype == down.dtype
    return halves and size % 16 == 0 and size > 0 and has_form(x, down)


def native_mixture(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    steady: bool = False,
) -> jax.Array:
    """The sum of weights [T, k] float32 times what each of the experts chosen [T, k] int32 makes of x [T, H].

    An expert gives down (silu(gate) * up), with `up` [X, 2, F, H] of which gate is the first, and `down`
    [X, H, F]. A number outside 0 to X - 1 adds nothing. Dtypes and `steady` are native_grouped's, and so are
    the products, to the bit. Raises NotBuilt as native_linear does.
    """
    n_experts, hidden, size = down.shape
    n_tokens, top_k = chosen.shape
    assert has_mixture_form(x, up, down) and x.shape == (n_tokens, hidden)
    assert weights.shape == chosen.shape and weights.dtype == jnp.float32 and chosen.dtype == jnp.int32
    n_rows = n_tokens * top_k
    shapes = [(n_tokens, hidden), (n_rows, hidden), (2, n_rows, size), (n_rows, hidden)]
    results = [jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes]
    name = mixture_target(x.dtype, down.dtype, steady=steady)
    return jax.ffi.ffi_call(name, results)(x, weights, chosen, up.reshape(n_experts, 2 * size, hidden), down)[
        0
    ]
