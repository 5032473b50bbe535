"""The product of a linear layer as a custom call, on a CPU (ORCA 3.2); linear.c has the work."""

import jax
import jax.numpy as jnp

from orca_jax.native.compiler import target

_LANES, _FEW = 16, 8  # as in linear.c
# Up to so many tokens it is ahead of XLA's own, which packs the weight first; beyond them that no longer counts.
_MOST_TOKENS = 128


def linear_target() -> str:
    """The name of the custom call. Raises NotBuilt."""
    return target("linear")


def suits(x: jax.Array, weight: jax.Array) -> bool:
    """Whether there is a form for x [T, in] times weight [out, in], and it is the faster one."""
    (n_tokens, n_in), n_out = x.shape, weight.shape[0]
    return n_tokens <= _MOST_TOKENS and n_in > 0 and n_in % _LANES == 0 and n_out >= _LANES


def native_linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [T, in] times weight [out, in], giving [T, out], all float32.

    What a token gets does not depend on the others, but for whether there are more than eight. Raises
    NotBuilt where there is no compiler, or no AVX-512.
    """
    assert x.dtype == weight.dtype == jnp.float32 and x.shape[1] == weight.shape[1]
    n_tokens, n_in = x.shape
    n_packed = 0 if n_tokens <= _FEW else -(-n_tokens // _LANES) * _LANES
    y = jax.ShapeDtypeStruct((n_tokens, weight.shape[0]), x.dtype)
    columns = jax.ShapeDtypeStruct((n_packed, n_in), x.dtype)  # x transposed; only the call itself reads it
    product, _ = jax.ffi.ffi_call(linear_target(), (y, columns))(x, weight)
    return product
