"""Latent attention (DeepSeek-V2, section 2.1), in the form that attends to what is compressed.

A token leaves one vector in the cache: what its key and value follow from, then the part of its key that is
rotated. In place of every token's key, a head's query is multiplied by what makes keys (W_UK), and in place
of every token's value, what the head attends to by what makes values (W_UV). So all heads share one K/V head,
and nothing in the cache is ever expanded.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from orca_jax.families.attention_config import Attention
from orca_jax.model.layers import Linear, Matmul, RMSNorm, Weights, linear_of
from orca_jax.model.rotation import Rotation, rotate


class LatentProjections(nnx.Module):
    """What stands before and after attention to the cache; the heads are this device's."""

    def __init__(self, config: Attention, p: Weights) -> None:
        assert config.latent is not None and config.rotary is not None
        self.config, self.interleaved = config.latent, config.rotary.interleaved
        compressed = config.latent.query_rank is not None
        self.q_a = linear_of(p, "q_a") if compressed else None
        self.q_a_norm = _norm(config, p, "q_a_norm") if compressed else None
        self.q = linear_of(p, "q_b" if compressed else "q")
        self.kv_a = linear_of(p, "kv_a")
        self.kv_a_norm = _norm(config, p, "kv_a_norm")
        self.kv_b = Linear(_weight(p, "kv_b.weight"), None)

    def keys(self, x: jax.Array, rotation: Rotation, product: Matmul) -> jax.Array:
        """What x [T, H] leaves in the cache, [T, 1, C + rotary size]."""
        own = self.config
        compressed = self.kv_a(x, product)
        turned = self._rotated(compressed[:, None, own.rank :], rotation)
        return jnp.concatenate([self.kv_a_norm(compressed[:, None, : own.rank]), turned], axis=-1)

    def queries(self, x: jax.Array, rotation: Rotation, product: Matmul) -> jax.Array:
        """The queries of x [T, H] as they meet the cache, [T, N, 1, C + rotary size]."""
        own = self.config
        if self.q_a is not None and self.q_a_norm is not None:
            x = self.q_a_norm(self.q_a(x, product))
        q = self.q(x, product).reshape(x.shape[0], -1, own.query_size)  # [T, N, Q]
        makes_keys = self._of_heads()[:, : own.plain_size]  # W_UK [N, plain size, C]
        plain = jnp.einsum("tnp,npc->tnc", q[..., : own.plain_size], makes_keys)
        turned = self._rotated(q[..., own.plain_size :], rotation)
        return jnp.concatenate([plain, turned], axis=-1)[:, :, None]

    def values(self, attended: jax.Array) -> jax.Array:
        """What heads get from `attended` [T, N, 1, C], side by side: [T, N W]."""
        makes_values = self._of_heads()[:, self.config.plain_size :]  # W_UV [N, W, C]
        return jnp.einsum("tnc,nwc->tnw", attended[:, :, 0], makes_values).reshape(attended.shape[0], -1)

    def _of_heads(self) -> jax.Array:
        own = self.config
        return self.kv_b.weight[...].reshape(-1, own.plain_size + own.value_size, own.rank)

    def _rotated(self, x: jax.Array, rotation: Rotation) -> jax.Array:
        """x [T, n, rotary size]."""
        return rotate(x[:, None], rotation, interleaved=self.interleaved)[:, 0]


def _norm(config: Attention, p: Weights, name: str) -> RMSNorm:
    assert config.latent is not None
    return RMSNorm(config.latent.norm, _weight(p, f"{name}.scale"))


def _weight(p: Weights, name: str) -> jax.Array:
    weight = p(name)
    assert weight is not None, name
    return weight
