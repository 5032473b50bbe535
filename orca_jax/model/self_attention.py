"""Self-attention: writes the tokens' keys and values to the cache, then attends to each request's cache."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from orca_jax.families.attention_config import Attention
from orca_jax.model.adapted import flat_inputs
from orca_jax.model.context import AttendAndPlace, Context
from orca_jax.model.kv_cache import write
from orca_jax.model.layers import RMSNorm, Weights, linear_of
from orca_jax.model.rotation import Rotation, query_factors, rotate
from orca_jax.model.shard import Shard


class SelfAttention(nnx.Module):
    """The projections around split attention, with query/key norms, rotary positions and score biases."""

    def __init__(self, config: Attention, p: Weights) -> None:
        self.config = config
        self.qkv = linear_of(p, "qkv")
        self.q_norm, self.k_norm = _qk_norms(config, p)
        self.out = linear_of(p, "out")
        self.relative_bias = None if config.scores.relative is None else nnx.Param(p("relative_bias"))
        self.sinks = nnx.Param(p("sinks")) if config.scores.sinks else None

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        """x [T, H] to [R, H], the tokens that attend, or to this device's slice of them."""
        config = self.config
        qkv = self.qkv(x, ctx.tokens.product)
        n_slices = config.group * (2 if config.output_gate else 1) + config.kv_slices
        qkv = qkv.reshape(x.shape[0], n_slices, config.n_kv_heads // ctx.shard.n, config.head_size)
        gate = None
        if config.output_gate:
            gate, qkv = ctx.queries.of(qkv[:, : config.group]), qkv[:, config.group :]
        queries = self._placed(qkv, ctx) if config.kv_from is None else self._queries(qkv, ctx)
        sinks = None if self.sinks is None else self.sinks[...].astype(jnp.float32).reshape(config.group, -1)
        attended = ctx.queries.attend(queries, ctx.cache, config, self._bias(ctx.shard), sinks)
        if gate is not None:
            attended = attended * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(attended.dtype)
        if flat_inputs(self.out.weight.get_value()):
            attended = attended.swapaxes(1, 2)  # [R, K, G, D], the checkpoint's order
        return self.out(attended.reshape(attended.shape[0], -1), ctx.queries.product, ctx.shard)

    def _placed(self, qkv: jax.Array, ctx: Context) -> jax.Array:
        """Write the keys and values of qkv [T, G + 2, K, D], if there are slots, and return the queries.

        Where values are keys, qkv ends with the keys.

        The queries, with their norm and rotation, are the first G slices of the result [R, n, K, D].
        """
        config, group, rotation = self.config, self.config.group, ctx.rotation
        interleaved = config.rotary is not None and config.rotary.interleaved
        all_attend, slots, attend = ctx.queries.at is None, ctx.slot_of_token, ctx.tokens.attend
        # All tokens have queries, even those that do not attend: leaving them out would copy the weight.
        queries, keys = ctx.queries.of(qkv), qkv[:, group : group + 1]
        values = qkv if config.value_norm is None else _normed(qkv[:, -1:], config.value_norm)
        heads, key = qkv, group  # an array with the keys, and their slice of it
        qk_norm, temperature = config.qk_norm, config.scores.temperature
        if rotation is not None and qk_norm is not None and qk_norm.after_rotation:
            queries, keys = self._rotated(queries[:, :group], keys, rotation, ctx)
            rotation = None
        if qk_norm is not None and not qk_norm.scaled:
            queries, keys = (_normed(each, qk_norm.norm.eps) for each in (queries[:, :group], keys))
        if self.q_norm is not None and self.k_norm is not None and qk_norm is not None:
            queries = queries[:, :group]
            if qk_norm.over == "width":
                queries = self.q_norm.over_heads(queries, ctx.shard)
                keys = self.k_norm.over_heads(keys, ctx.shard)
            else:
                queries, keys = self.q_norm(queries), self.k_norm(keys)
        if temperature is not None:
            factors = query_factors(temperature, ctx.queries.of(ctx.positions)).astype(queries.dtype)
            queries = queries[:, :group] * factors[:, None, None, None]
        if qk_norm is not None or temperature is not None:
            heads, key = (jnp.concatenate([queries, keys], 1), group) if all_attend else (keys, 0)
        if slots is not None and isinstance(attend, AttendAndPlace):
            n_queries = 0 if rotation is None or not all_attend else group
            rotated, ctx.cache = attend.place(
                heads,
                values,
                slots,
                ctx.cache,
                rotation,
                n_queries=n_queries,
                key=key,
                interleaved=interleaved,
            )
            if n_queries:
                return rotated
            slots = None  # keys and values are in the cache now
        if rotation is not None:
            queries, keys = self._rotated(queries[:, :group], keys, rotation, ctx)
        if slots is not None:
            ctx.cache = write(ctx.cache, keys[:, 0], values[:, -1], slots)
        return queries

    def _queries(self, qkv: jax.Array, ctx: Context) -> jax.Array:
        """The queries [R, G, K, D] of a layer that attends to another layer's keys and values."""
        queries, rotation, qk_norm = ctx.queries.of(qkv), ctx.rotation, self.config.qk_norm
        temperature = self.config.scores.temperature
        by = None if rotation is None else rotation.of(ctx.queries.of)
        interleaved = self.config.rotary is not None and self.config.rotary.interleaved
        first = qk_norm is not None and qk_norm.after_rotation
        if by is not None and first:
            queries = rotate(queries, by, interleaved=interleaved)
        if qk_norm is not None and not qk_norm.scaled:
            queries = _normed(queries, qk_norm.norm.eps)
        if self.q_norm is not None and qk_norm is not None:
            over_width = qk_norm.over == "width"
            queries = self.q_norm.over_heads(queries, ctx.shard) if over_width else self.q_norm(queries)
        if temperature is not None:
            factors = query_factors(temperature, ctx.queries.of(ctx.positions)).astype(queries.dtype)
            queries = queries * factors[:, None, None, None]
        return queries if by is None or first else rotate(queries, by, interleaved=interleaved)

    def _rotated(
        self, queries: jax.Array, keys: jax.Array, rotation: Rotation, ctx: Context
    ) -> tuple[jax.Array, jax.Array]:
        """Rotate the queries of the tokens that attend, and the keys of all tokens."""
        interleaved = self.config.rotary is not None and self.config.rotary.interleaved
        by = rotation if ctx.queries.at is None else rotation.of(ctx.queries.of)
        return rotate(queries, by, interleaved=interleaved), rotate(keys, rotation, interleaved=interleaved)

    def _bias(self, shard: Shard) -> jax.Array | None:
        """`Attend`'s bias, for this device's heads."""
        if self.relative_bias is not None and self.config.scores.relative is not None:
            buckets = self.config.scores.relative.buckets(causal=self.config.causal)
            return self.relative_bias[...].astype(jnp.float32)[buckets]
        slopes = self.config.slopes()
        if slopes is None or shard.n == 1:
            return None if slopes is None else jnp.asarray(slopes)
        n_kv_heads = slopes.shape[1] // shard.n
        return lax.dynamic_slice_in_dim(jnp.asarray(slopes), shard.index * n_kv_heads, n_kv_heads, axis=1)


def _qk_norms(attention: Attention, p: Weights) -> tuple[RMSNorm | None, RMSNorm | None]:
    if attention.qk_norm is None or not attention.qk_norm.scaled:
        return None, None
    q_scale, k_scale = p("q_norm.scale"), p("k_norm.scale")
    assert q_scale is not None and (k_scale is not None or attention.kv_from is not None)
    keys = None if k_scale is None else RMSNorm(attention.qk_norm.norm, k_scale)
    return RMSNorm(attention.qk_norm.norm, q_scale), keys


def _normed(x: jax.Array, eps: float) -> jax.Array:
    """An RMSNorm of each head of x [T, n, K, D], without a scale."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + eps)).astype(x.dtype)
