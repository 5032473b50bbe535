"""Gated DeltaNet, the mixer of most layers of Qwen3-Next and Qwen 3.5 (Yang et al., 2024)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from orca_jax.families.recurrence_config import GatedDeltaNet
from orca_jax.model.causal_convolution import causal_convolution
from orca_jax.model.context import Context
from orca_jax.model.layers import RMSNorm, Weights, linear_of
from orca_jax.model.linear_attention import linear_attention
from orca_jax.model.recurrence import Heads


class GatedDeltaNetMixer(nnx.Module):
    """The projections, the convolution and the norm around the gated delta rule."""

    def __init__(self, config: GatedDeltaNet, p: Weights) -> None:
        self.config = config.share
        self.into = linear_of(p, "delta_in")
        self.gates = linear_of(p, "delta_gates") if config.by_key_head else None
        names = () if config.by_key_head else ("delta_z", "delta_b", "delta_a")
        self.apart = nnx.List([linear_of(p, name) for name in names])
        self.conv = nnx.Param(p("conv.weight"))
        self.decay, self.step_bias = nnx.Param(p("delta.decay")), nnx.Param(p("delta.step_bias"))
        self.norm = RMSNorm(config.norm, p("delta_norm.scale"))
        self.out = linear_of(p, "delta_out")

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        """[T, H] to [T, H], for all tokens; replaces the rows' states."""
        assert ctx.rows is not None
        config, product, dtype = self.config, ctx.tokens.product, x.dtype
        qkv, z, strength, step = self._projected(x, ctx)
        qkv, conv = causal_convolution(qkv, self.conv[...], None, ctx.state["conv"], ctx.rows)
        q, k, v = jnp.split(jax.nn.silu(qkv).astype(dtype), [config.keys, 2 * config.keys], axis=1)
        q, k = (_normal(each.reshape(len(x), config.n_key_heads, -1)) for each in (q, k))
        per_step = -jnp.exp(self.decay[...].astype(jnp.float32))
        step = step.astype(jnp.float32) + self.step_bias[...].astype(jnp.float32)
        v = v.reshape(len(x), config.n_value_heads, -1)
        decay, beta = per_step * jax.nn.softplus(step), jax.nn.sigmoid(strength.astype(jnp.float32))
        of_heads = Heads(q * config.key_size**-0.5, k, v, decay, beta)
        out, heads = linear_attention(of_heads, ctx.state["heads"], ctx.rows)
        ctx.state = {"conv": conv, "heads": heads}
        z = z.reshape(out.shape).astype(jnp.float32)
        out = (self.norm(out.astype(dtype)).astype(jnp.float32) * jax.nn.silu(z)).astype(dtype)
        return self.out(out.reshape(len(x), -1), product, ctx.joining)

    def _projected(self, x: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values [T, channels]; gates [T, values]; strengths and decays [T, N]."""
        config, product = self.config, ctx.tokens.product
        into = self.into(x, product)
        if self.gates is None:
            z, strength, step = (each(x, product) for each in self.apart)
            return into, z, strength, step
        n, size = len(x), config.key_size
        of_head = config.values // config.n_key_heads
        parts = jnp.split(
            into.reshape(n, config.n_key_heads, -1), [size, 2 * size, 2 * size + of_head], axis=2
        )
        q, k, v, z = (part.reshape(n, -1) for part in parts)
        strength, step = jnp.split(self.gates(x, product).reshape(n, config.n_key_heads, -1), 2, axis=2)
        return jnp.concatenate([q, k, v], axis=1), z, strength.reshape(n, -1), step.reshape(n, -1)


def _normal(x: jax.Array) -> jax.Array:
    """x [..., K] with length 1, float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + 1e-6)
