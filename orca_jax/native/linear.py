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


def native_linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [T, in] times weight [out, in], giving [T, out], all float32.

    What a token gets does not depend on the others, but for whether there are more than eight. Raises
    NotBuilt where there is no compiler, or no AVX-512.
    """
    assert x.dtype == weight.dtype == jnp.float32 and x.shape[1] == weight.shape[1]
    y = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), x.dtype)
    return jax.ffi.ffi_call(linear_target(), y)(x, weight)
