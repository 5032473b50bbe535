"""The grouped product in plain JAX, which the kernel must equal."""

import jax
import jax.numpy as jnp


def grouped_product_reference(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Consecutive groups of rows of x [N, in], each times its own weight of [X, out, in]: [N, out].

    Group i has `sizes[i]` rows, [X] int32; rows after the last group give zeros, whatever they hold.
    Products are float32, the result has x's dtype.
    """
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(x)), side="right")  # [N]
    weight_of_row = weight.at[group].get(mode="clip").astype(jnp.float32)  # [N, out, in]
    out = jnp.einsum("ni,noi->no", x.astype(jnp.float32), weight_of_row)
    return jnp.where((group < len(sizes))[:, None], out, 0).astype(x.dtype)
