"""Mamba-2 (Dao & Gu, 2024), the mixer of most layers of Granite 4, Bamba, Nemotron-H and Falcon-H1."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from orca_jax.families.recurrence_config import Mamba2
from orca_jax.model.causal_convolution import causal_convolution
from orca_jax.model.context import Context
from orca_jax.model.layers import Weights, linear_of
from orca_jax.model.linear_attention import linear_attention
from orca_jax.model.recurrence import Heads
from orca_jax.model.shard import Shard


class Mamba2Mixer(nnx.Module):
    """The projections, the convolution and the norm around the selective state space."""

    def __init__(self, config: Mamba2, p: Weights) -> None:
        self.config = config.share
        self.sharing_group = max(1, config.n_shares // config.n_groups)  # devices that have heads of a group
        self.into, self.out = linear_of(p, "space_in"), linear_of(p, "space_out")
        self.conv = nnx.Param(p("conv.weight"))
        self.conv_bias = nnx.Param(p("conv.bias")) if config.conv_bias else None
        self.decay, self.step_bias = nnx.Param(p("space.decay")), nnx.Param(p("space.step_bias"))
        self.skip = nnx.Param(p("space.skip"))
        self.scale = None if config.norm is None else nnx.Param(p("space_norm.scale"))

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        """[T, H] to [T, H], for all tokens; replaces the rows' states."""
        assert ctx.rows is not None
        config, product, dtype, n = self.config, ctx.tokens.product, x.dtype, len(x)
        of_groups = config.n_groups * config.state_size
        ends = [config.inner, config.inner + config.channels]
        into = self.into(x, product)
        if config.multipliers:
            sizes = (config.inner, config.inner, of_groups, of_groups, config.n_heads)
            into = into * jnp.asarray(np.repeat(config.multipliers, sizes), into.dtype)
        z, xbc, step = jnp.split(into, ends, axis=1)
        bias = None if self.conv_bias is None else self.conv_bias[...]
        xbc, conv = causal_convolution(xbc, self.conv[...], bias, ctx.state["conv"], ctx.rows)
        ends = [config.inner, config.inner + of_groups]
        inputs, b, c = jnp.split(jax.nn.silu(xbc).astype(dtype).astype(jnp.float32), ends, axis=1)
        inputs = inputs.reshape(n, config.n_heads, -1)
        b, c = (each.reshape(n, config.n_groups, -1) for each in (b, c))
        step = step.astype(jnp.float32) + self.step_bias[...].astype(jnp.float32)
        step = jnp.clip(jax.nn.softplus(step), config.least_step, config.most_step)  # [T, N]
        decay = -step * jnp.exp(self.decay[...].astype(jnp.float32))
        of_heads = Heads(c, b, step[:, :, None] * inputs, decay)
        out, heads = linear_attention(of_heads, ctx.state["heads"], ctx.rows)
        out = out + self.skip[...].astype(jnp.float32)[:, None] * inputs
        ctx.state = {"conv": conv, "heads": heads}
        normed = self._normed(out.reshape(n, -1), z, ctx.shard)
        return self.out(normed.astype(dtype), product, ctx.joining)

    def _normed(self, x: jax.Array, z: jax.Array, shard: Shard) -> jax.Array:
        """x silu(z) [T, inner], normalised over each group before or after the product, if at all."""
        gate, norm = jax.nn.silu(z.astype(jnp.float32)), self.config.norm
        if norm is None or self.scale is None:
            return x * gate
        by_group = (x if self.config.norm_first else x * gate).reshape(len(x), self.config.n_groups, -1)
        mean_square = jnp.square(by_group).mean(axis=-1, keepdims=True)
        if self.sharing_group > 1:
            mean_square = self._over_group(mean_square, shard)
        normal = (by_group * lax.rsqrt(mean_square + norm.eps)).reshape(x.shape)
        normal = normal * self.scale[...].astype(jnp.float32)
        return normal * gate if self.config.norm_first else normal

    def _over_group(self, mean: jax.Array, shard: Shard) -> jax.Array:
        """The mean over all devices that share this device's group, of their means [T, 1, 1]."""
        n_groups = shard.n // self.sharing_group
        own = jnp.arange(n_groups) == shard.index // self.sharing_group
        means = shard.total(jnp.where(own, mean, 0)) / self.sharing_group  # [T, 1, groups]
        return jnp.where(own, means, 0).sum(axis=-1, keepdims=True)
