"""Rotation and the writing of keys and values in plain JAX, which the kernel must equal."""

import jax
import jax.numpy as jnp


def place_reference(
    heads: jax.Array,
    values: jax.Array,
    slot_of_token: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    into_keys: jax.Array,
    into_values: jax.Array,
    *,
    n_queries: int,
    key: int,
    interleaved: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`place`, with the same arguments and results."""

    def turned(x: jax.Array) -> jax.Array:
        """Rotate x [T, n, K, D], each pair as a complex number."""
        if cos is None or sin is None:
            return x
        n, size = cos.shape[1], 2 * cos.shape[1]
        first, step = (2 * jnp.arange(n), 1) if interleaved else (jnp.arange(n), n)
        a, b = (x[..., each].astype(jnp.float32) for each in (first, first + step))
        by = jax.lax.complex(cos, sin)[:, None, None]
        pairs = jax.lax.complex(a, b) * by
        assert size <= x.shape[-1]
        x = x.at[..., first].set(pairs.real.astype(x.dtype))
        return x.at[..., first + step].set(pairs.imag.astype(x.dtype))

    n_slots, block_size = into_keys.shape[0] * into_keys.shape[2], into_keys.shape[2]
    slot = jnp.where(slot_of_token < 0, n_slots, slot_of_token)  # a negative index would count from the end
    block, offset = slot // block_size, slot % block_size
    return (
        turned(heads[:, :n_queries]),
        into_keys.at[block, :, offset].set(turned(heads[:, key : key + 1])[:, 0], mode="drop"),
        into_values.at[block, :, offset].set(values[:, -1], mode="drop"),
    )
