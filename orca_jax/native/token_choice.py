"""Chooses next tokens and computes their log-probabilities on a CPU: a custom call in C (token_choice.c)."""

import jax
import jax.numpy as jnp

from orca_jax.native.custom_call import target


def choice_target() -> str:
    """Name of the custom call. Raises NotBuilt."""
    return target("token_choice")


def native_choice(
    logits: jax.Array,
    raw: jax.Array,
    known: jax.Array,
    temperature: jax.Array,
    min_p: jax.Array,
    uniform: jax.Array,
    n_top: jax.Array,
    *,
    max_top: int,
) -> tuple[jax.Array, jax.Array]:
    """Choose each row's token from logits [R, V] float32, and compute log-probabilities from `raw` [R, V].

    The other arrays are [R]. Where `known` int32 is not negative, it is the row's token. Other rows get the
    first of the largest logits if `temperature` float32 is 0, else a token drawn with `min_p` and `uniform`
    in [0, 1) float32, as in model/sampler.py. Returns tokens [R] int32 and words [R, 2 + 2 max_top] int32:
    the token, its log-probability, then ids and log-probabilities of the `n_top` int32 most likely tokens,
    filled up with id 0 and -inf. If `n_top` is negative, the log-probabilities are -inf. Raises NotBuilt as
    native_linear does.
    """
    n_rows, vocab = logits.shape
    assert raw.shape == (n_rows, vocab) and raw.dtype == logits.dtype == jnp.float32
    rows = (known, temperature, min_p, uniform, n_top)
    dtypes = (jnp.int32, jnp.float32, jnp.float32, jnp.float32, jnp.int32)
    assert all(row.shape == (n_rows,) for row in rows) and tuple(row.dtype for row in rows) == dtypes
    tokens = jax.ShapeDtypeStruct((n_rows,), jnp.int32)
    words = jax.ShapeDtypeStruct((n_rows, 2 + 2 * max_top), jnp.int32)
    tokens, words = jax.ffi.ffi_call(choice_target(), (tokens, words))(logits, raw, *rows)
    return tokens, words
