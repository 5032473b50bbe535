"""The dense feed-forward layer, and the activation functions that mixtures of experts use too."""

import jax
import jax.numpy as jnp
from flax import nnx

from orca_jax.families import model_config
from orca_jax.families.model_config import Activation
from orca_jax.model.context import Context
from orca_jax.model.layers import Weights, linear_of

_GATE_SLOPE = 1.702  # gpt-oss's approximation of GELU by a sigmoid


class FeedForward(nnx.Module):
    """Two linear layers with an activation function between them."""

    def __init__(self, config: model_config.FeedForward, p: Weights) -> None:
        self.config = config
        self.up = linear_of(p, "up")
        self.down = linear_of(p, "down")

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        """x [T, H] to [T, H]."""
        return self.down(between(self.up(x, ctx.product), self.config), ctx.product, ctx.shard)


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """Apply the activation function, elementwise."""
    match activation:
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "relu":
            return jax.nn.relu(x)
        case "silu":
            return jax.nn.silu(x)


def between(x: jax.Array, config: model_config.FeedForward) -> jax.Array:
    """Apply the activation between the two products: x [T, F], or [T, 2 F] if gated, to [T, F]."""
    if not config.gated:
        return activate(x, config.activation)
    gate, up = jnp.split(x, 2, axis=1)
    if config.gate_limit is None:
        return activate(gate, config.activation) * up
    gate = jnp.minimum(gate, config.gate_limit)
    up = jnp.clip(up, -config.gate_limit, config.gate_limit)
    return gate * jax.nn.sigmoid(_GATE_SLOPE * gate) * (up + 1)
