"""The grouped product in pure JAX, dense and plain: the kernel must equal it."""

import jax
import jax.numpy as jnp


def grouped_product_reference(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Rows of x [N, in] in groups, one after another, each times its own of weight [X, out, in]: [N, out].

    Group i has `sizes[i]` rows, [X] int32; rows after the last group give zeros, whatever is in them.
    Products are float32, the result has x's dtype.
    """
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(x)), side="right")  # [N]
    own = weight.at[group].get(mode="clip").astype(jnp.float32)  # [N, out, in]
    out = jnp.einsum("ni,noi->no", x.astype(jnp.float32), own)
    return jnp.where((group < len(sizes))[:, None], out, 0).astype(x.dtype)
