"""The product of a linear layer as a custom call, on a CPU (ORCA 3.2); linear.c has the work."""

import jax
import jax.numpy as jnp

from orca_jax.native.compiler import target

_LANES = 16  # as in linear.c


def linear_target() -> str:
    """The name of the custom call. Raises NotBuilt."""
    return target("linear")


def has_form(x: jax.Array, weight: jax.Array) -> bool:
    """Whether there is one for x [T, in] times weight [out, in]."""
    return x.shape[1] % _LANES == 0 and x.shape[1] > 0 and weight.shape[0] >= _LANES


def native_linear(x: jax.Array, weight: jax.Array, n_tokens: jax.Array | None = None) -> jax.Array:
    """x [T, in] times weight [out, in], giving [T, out], all float32.

    Behind the first `n_tokens` [1] int32, by default all, nothing is computed and the result is zero. What a
    token gets does not depend on the others, but for whether more than eight are computed. Raises NotBuilt
    where there is no compiler, or no AVX-512.
    """
    assert x.dtype == weight.dtype == jnp.float32 and x.shape[1] == weight.shape[1] and has_form(x, weight)
    if n_tokens is None:
        n_tokens = jnp.full(1, x.shape[0], jnp.int32)
    assert n_tokens.shape == (1,) and n_tokens.dtype == jnp.int32
    y = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), x.dtype)
    return jax.ffi.ffi_call(linear_target(), y)(x, weight, n_tokens)
