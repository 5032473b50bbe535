"""The matrix products of experts as a custom call on a CPU, written in C (grouped.c)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.native.custom_call import target
from orca_jax.native.linear import has_form
from orca_jax.native.operations import grouped_sizes


def grouped_target(x_dtype: Any, weight_dtype: Any, *, steady: bool = False) -> str:
    """The name of the custom call for dtypes of linear.py. Raises NotBuilt."""
    return target("grouped", **grouped_sizes(np.dtype(x_dtype).name, np.dtype(weight_dtype).name, steady))


def native_grouped(x: jax.Array, weight: jax.Array, sizes: jax.Array, *, steady: bool = False) -> jax.Array:
    """Rows of x [N, in] in groups of `sizes` [X] int32, each times its own of [X, out, in]: [N, out].

    Each is float32 or bfloat16; products and sums are float32, and the result has x's dtype. Rows after the
    last group are zero. A row's result depends on its group as a token's in native_linear; if `steady` it
    depends on nothing but itself, but small groups take longer. Raises NotBuilt as native_linear does.
    """
    n_experts, n_out, n_in = weight.shape
    assert x.shape[1] == n_in and sizes.shape == (n_experts,) and sizes.dtype == jnp.int32
    assert has_form(x, weight)
    y = jax.ShapeDtypeStruct((x.shape[0], n_out), x.dtype)
    return jax.ffi.ffi_call(grouped_target(x.dtype, weight.dtype, steady=steady), y)(x, weight, sizes)
