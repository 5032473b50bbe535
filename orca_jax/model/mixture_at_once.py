"""A mixture's experts for few tokens, in a handful of products without sorting, for GPUs without a kernel.

A decode is bound by reading weights. If its tokens choose most of the experts anyway, every expert computes
every token: the weights are read once, by two large products, and what a token did not choose is dropped. If
they choose few, the weights of those are copied together first.
"""

import jax
import jax.numpy as jnp

MOST_TOKENS = 128  # of more, the arithmetic that is dropped takes longer than reading the weights
_COPY = 3  # a copied weight is read, written and read again


def mixture_at_once(
    x: jax.Array, weights: jax.Array, experts: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array | None:
    """layers.MixtureProduct for few tokens: each one's down (silu(gate) * up) of its experts; else None.

    x [T, H], weights [T, k] float32, experts [T, k] int32, up [X, 2, F, H], down [X, H, F]; gives [T, H].
    """
    (n_tokens, top_k), n_experts = experts.shape, len(up)
    if n_tokens > MOST_TOKENS:
        return None
    if _COPY * n_tokens * top_k <= n_experts:
        return _of_chosen(x, weights, experts, up, down)
    return _of_all(x, weights, experts, up, down)


def _of_all(
    x: jax.Array, weights: jax.Array, experts: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    n_experts, _, size, hidden = up.shape
    inner = jnp.einsum("th,nh->tn", x, up.reshape(-1, hidden)).reshape(len(x), n_experts, 2, size)
    is_chosen = experts[:, :, None] == jnp.arange(n_experts)  # [T, k, X]
    weight = jnp.where(is_chosen, weights[:, :, None], 0).sum(axis=1)  # [T, X]
    # A product with zero would let another expert's NaN into the sum.
    made = jnp.where(is_chosen.any(axis=1)[:, :, None], _gated(inner[:, :, 0], inner[:, :, 1]), 0)
    out = jnp.einsum("txf,xhf->xth", made, down)
    return (out.astype(jnp.float32) * weight.T[:, :, None]).sum(axis=0).astype(x.dtype)


def _of_chosen(
    x: jax.Array, weights: jax.Array, experts: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    inner = jnp.einsum("th,tkifh->tkif", x, up.at[experts].get(mode="clip"))
    made = _gated(inner[:, :, 0], inner[:, :, 1])
    out = jnp.einsum("tkf,tkhf->tkh", made, down.at[experts].get(mode="clip")).astype(jnp.float32)
    here = (experts < len(up))[:, :, None]  # a number past the last is another device's expert, or none
    return jnp.where(here, out * weights[:, :, None], 0).sum(axis=1).astype(x.dtype)


def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up
