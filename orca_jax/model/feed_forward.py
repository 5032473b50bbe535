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
        self.xielu = nnx.Param(p("xielu")) if config.activation == "xielu" else None

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        """x [T, H] to [T, H]."""
        inner = self.up(x, ctx.product)
        inner = between(inner, self.config) if self.xielu is None else xielu(inner, self.xielu[...])
        out = self.down(inner, ctx.product, ctx.shard)
        multiplier = self.config.multiplier
        return out if multiplier == 1.0 else out * jnp.asarray(multiplier, out.dtype)


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
        case "relu2":
            return jnp.square(jax.nn.relu(x))
        case "xielu":
            raise AssertionError("xielu has weights")


def xielu(x: jax.Array, numbers: jax.Array) -> jax.Array:
    """Apply xIELU (Huang and Schlag, 2025) with its `numbers` [4], elementwise, in float32.

    The numbers are both alphas before their softplus, beta, and the bound of the exponential's argument.
    """
    wide = x.astype(jnp.float32)
    positive, negative, beta, bound = numbers.astype(jnp.float32)
    curved = jnp.where(
        wide > 0,
        jax.nn.softplus(positive) * wide * wide,
        (beta + jax.nn.softplus(negative)) * (jnp.expm1(jnp.minimum(wide, bound)) - wide),
    )
    return (curved + beta * wide).astype(x.dtype)


def between(x: jax.Array, config: model_config.FeedForward) -> jax.Array:
    """Apply the activation between the two products: x [T, F], or [T, 2 F] if gated, to [T, F]."""
    if not config.gated:
        return activate(x, config.activation)
    gate, up = jnp.split(x, 2, axis=1)
    if config.gate_multiplier != 1.0:
        gate = gate * jnp.asarray(config.gate_multiplier, gate.dtype)
    if config.gate_limit is None:
        return activate(gate, config.activation) * up
    gate = jnp.minimum(gate, config.gate_limit)
    up = jnp.clip(up, -config.gate_limit, config.gate_limit)
    return gate * jax.nn.sigmoid(_GATE_SLOPE * gate) * (up + 1)
