"""LFM2's mixer: a gated short convolution (Liquid AI, 2025)."""

import jax
from flax import nnx

from orca_jax.families.recurrence_config import ShortConvolution
from orca_jax.model.causal_convolution import causal_convolution
from orca_jax.model.context import Context
from orca_jax.model.layers import Weights, linear_of


class ShortConvolutionMixer(nnx.Module):
    """c * convolution(b * x), projected back; b, c and x are projections of the input."""

    def __init__(self, config: ShortConvolution, p: Weights) -> None:
        self.config = config
        self.into, self.out = linear_of(p, "conv_in"), linear_of(p, "conv_out")
        self.weight = nnx.Param(p("conv.weight"))
        self.bias = nnx.Param(p("conv.bias")) if config.bias else None

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        """[T, H] to [T, H], for all tokens; replaces the rows' states."""
        assert ctx.rows is not None
        b, c, x = self.into(x, ctx.tokens.product).reshape(len(x), 3, -1).swapaxes(0, 1)
        bias = None if self.bias is None else self.bias[...]
        mixed, new = causal_convolution(b * x, self.weight[...], bias, ctx.state["conv"], ctx.rows)
        ctx.state = {"conv": new}
        return self.out(c * mixed.astype(c.dtype), ctx.tokens.product, ctx.joining)
