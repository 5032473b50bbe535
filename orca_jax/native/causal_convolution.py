"""The causal convolution of recurrent layers on a CPU: one custom call a layer (causal_convolution.c)."""

import jax
import jax.numpy as jnp

from orca_jax.native.custom_call import target


def native_causal_convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    state: jax.Array,
    row_start: jax.Array,
    state_of_row: jax.Array,
    starts: jax.Array,
    kept: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Convolve each channel of x [T, C] over the last W tokens of its request.

    `weight` [C, W] has the newest token's column last; `bias` is [C]. `state` [n_states, 1, W - 1, C] has
    the inputs before a row's first token. It is changed in place if donated; in another shape XLA would copy
    it. All are float32. The rows' arrays and `kept` are as in native_linear_attention. Returns the sums
    [T, C], zeros for padding, and the new states. Raises NotBuilt without a C compiler, or without AVX-512
    or AVX2.
    """
    n_tokens, n_channels = x.shape
    assert weight.shape == (n_channels, state.shape[2] + 1) and state.shape[3] == n_channels
    assert row_start.shape == (len(state_of_row) + 1,) and starts.shape == state_of_row.shape
    assert bias is None or bias.shape == (n_channels,)
    assert kept is None or kept.shape == (n_tokens,)
    bias = jnp.zeros(0, jnp.float32) if bias is None else bias
    kept = jnp.zeros(0, jnp.int32) if kept is None else kept
    assert all(each.dtype == jnp.float32 for each in (x, weight, bias, state)) and starts.dtype == jnp.bool
    assert all(each.dtype == jnp.int32 for each in (row_start, state_of_row, kept))
    results = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype))
    call = jax.ffi.ffi_call(target("causal_convolution"), results, input_output_aliases={7: 1})
    y, new = call(x, weight.T, bias, row_start, state_of_row, starts, kept, state)
    return y, new
