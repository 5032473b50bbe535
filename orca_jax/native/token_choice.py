"""The choice of next tokens and their log-probabilities as a custom call on a CPU, in C (token_choice.c)."""

import jax
import jax.numpy as jnp

from orca_jax.native.custom_call import target


def choice_target() -> str:
    """The name of the custom call. Raises NotBuilt."""
    return target("token_choice")


def native_choice(
    logits: jax.Array,
    raw: jax.Array,
    given: jax.Array,
    temperature: jax.Array,
    min_p: jax.Array,
    uniform: jax.Array,
    n_top: jax.Array,
    *,
    most_told: int,
) -> tuple[jax.Array, jax.Array]:
    """A token of each row of logits [R, V] float32, and what is told of its probability in `raw` [R, V].

    The rest is [R]. A row whose `given` int32 is not negative has that token. Others have the first of the
    largest logits if `temperature` float32 is 0, else one drawn with `min_p` and `uniform` in [0, 1) float32,
    as model/sampler.py does. Returns tokens [R] int32, and words [R, 2 + 2 N] int32, N is `most_told`: the
    token, its log-probability, the ids of the `n_top` int32 most likely and their log-probabilities; of those
    that are not asked for id 0 and -inf. If `n_top` is negative, nothing but the token is told. Raises
    NotBuilt as native_linear does.
    """
    n_rows, vocab = logits.shape
    assert raw.shape == (n_rows, vocab) and raw.dtype == logits.dtype == jnp.float32
    rows = (given, temperature, min_p, uniform, n_top)
    dtypes = (jnp.int32, jnp.float32, jnp.float32, jnp.float32, jnp.int32)
    assert all(row.shape == (n_rows,) for row in rows) and tuple(row.dtype for row in rows) == dtypes
    tokens = jax.ShapeDtypeStruct((n_rows,), jnp.int32)
    words = jax.ShapeDtypeStruct((n_rows, 2 + 2 * most_told), jnp.int32)
    tokens, words = jax.ffi.ffi_call(choice_target(), (tokens, words))(logits, raw, *rows)
    return tokens, words
