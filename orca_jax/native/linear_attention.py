"""Linear attention on a CPU: one custom call per layer, written in C (linear_attention.c)."""

import jax
import jax.numpy as jnp

from orca_jax.native.custom_call import target

_MOST_KEYS = 256  # as in linear_attention.c


def has_linear_attention_form(q: jax.Array) -> bool:
    """Whether native_linear_attention takes queries and keys [T, N, K]."""
    return 0 < q.shape[2] <= _MOST_KEYS


def native_linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array | None,
    state: jax.Array,
    row_start: jax.Array,
    state_of_row: jax.Array,
    starts: jax.Array,
    kept: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Run the gated delta rule, or without `beta` a state space, over the tokens of all rows.

    q, k [T, N, K]; v [T, N G, V]; decay and beta [T, N G]; `state` [n_states, N G, K, V], changed in place if
    donated; all float32. row_start [R + 1] and state_of_row [R] int32 and starts [R] bool are as in the
    model's Rows; `kept` [T] int32 is the place of the state after each token, out of range for none. Returns
    the results [T, N G, V], zeros for padding, and the new states. Raises NotBuilt without a C compiler, or
    without AVX-512 or AVX2.
    """
    n_tokens, n_heads, value_size = v.shape
    assert q.shape == k.shape and len(q) == n_tokens and n_heads % q.shape[1] == 0
    assert has_linear_attention_form(q) and state.shape[1:] == (n_heads, q.shape[2], value_size)
    assert decay.shape == (n_tokens, n_heads) and (beta is None or beta.shape == decay.shape)
    assert row_start.shape == (len(state_of_row) + 1,) and starts.shape == state_of_row.shape
    assert kept is None or kept.shape == (n_tokens,)
    floats = q, k, v, decay, jnp.zeros((0, n_heads), jnp.float32) if beta is None else beta, state
    whole = row_start, state_of_row, jnp.zeros(0, jnp.int32) if kept is None else kept
    assert all(each.dtype == jnp.float32 for each in floats) and starts.dtype == jnp.bool
    assert all(each.dtype == jnp.int32 for each in whole)
    results = (jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype))
    call = jax.ffi.ffi_call(target("linear_attention"), results, input_output_aliases={9: 1})
    out, new = call(*floats[:5], row_start, state_of_row, starts, whole[2], state)
    return out, new
