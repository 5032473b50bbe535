"""Cross attention: a decoder's tokens attend to their request's encoder output."""

import jax
from flax import nnx

from orca_jax.families.attention_config import Attention
from orca_jax.model.context import AttendAndPlace, Context, Iteration
from orca_jax.model.kv_cache import LayerCache, write
from orca_jax.model.layers import Weights, linear_of


class CrossAttention(nnx.Module):
    """The projections of cross attention; `write` fills its cache before the decoder runs."""

    def __init__(self, config: Attention, p: Weights) -> None:
        self.config = config
        self.q = linear_of(p, "cross_q")
        self.kv = linear_of(p, "cross_kv")
        self.out = linear_of(p, "cross_out")

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        """x [T, H] to [T, H]."""
        attend = ctx.queries.cross
        assert attend is not None
        queries = self.q(x, ctx.product).reshape(x.shape[0], 1, -1, self.config.head_size)  # [T, 1, K, D]
        attended = attend(queries, ctx.cache, self.config, None, None)
        return self.out(attended.reshape(x.shape[0], -1), ctx.product, ctx.shard)

    def write(self, encoded: jax.Array, cache: LayerCache, iteration: Iteration) -> LayerCache:
        """Write keys and values of the encoder's output `encoded` [T, H] to the iteration's slots."""
        tokens, slots = iteration.tokens, iteration.slot_of_token
        assert slots is not None
        kv = self.kv(encoded, tokens.product).reshape(encoded.shape[0], 2, -1, self.config.head_size)
        if isinstance(tokens.attend, AttendAndPlace):
            placed = tokens.attend.place(kv, kv, slots, cache, None, n_queries=0, key=0, interleaved=False)
            return placed[1]
        return write(cache, kv[:, 0], kv[:, 1], slots)
