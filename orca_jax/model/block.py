"""One Transformer layer, built from the parts that its config names."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from orca_jax.families.attention_config import Attention
from orca_jax.families.model_config import Layer
from orca_jax.families.norm_config import Norm
from orca_jax.model.kv_cache import LayerCache, write
from orca_jax.model.latent import LatentProjections
from orca_jax.model.layers import LayerNorm, Matmul, RMSNorm, Weights, between, linear_of
from orca_jax.model.mixture import Mixture
from orca_jax.model.rotation import Rotation, rotate
from orca_jax.model.shard import Shard
from orca_jax.model.token_slices import Slices


def weights_of_layer(parameters: Mapping[str, jax.Array], layer: int) -> Weights:
    """The parameters of one layer, by their names in it."""
    return lambda name: parameters.get(f"layers.{layer}.{name}")


class Attend(Protocol):
    """Split attention with this iteration's tables bound: the one operation that knows of requests."""

    def __call__(
        self,
        q: jax.Array,
        cache: LayerCache,
        attention: Attention,
        bias: jax.Array | None,
        sinks: jax.Array | None,
        /,
    ) -> jax.Array:
        """q [T, n, K, D], of which the first G slices are queries, to [T, G, K, D or the size of a value].

        The slices after the queries are for kernels, which may so read the queries where the product that
        gave them left them; keys and values are in the cache already. `attention` is the layer's, with G and
        the form of its scores; `bias` is what that form adds to them, float32: for ALiBi its slopes [G, K],
        for a relative bias [2 * max_distance + 1, K] by (key position - query position) from -max_distance
        on. `sinks` [G, K] float32 are the heads' own scores, which join the softmax's sum. K are the K/V
        heads of this device.
        """
        ...


@runtime_checkable
class Placing(Attend, Protocol):
    """Attention that writes the cache itself, and rotates what it writes."""

    def place(
        self,
        heads: jax.Array,
        values: jax.Array,
        slot_of_token: jax.Array,
        cache: LayerCache,
        rotation: Rotation | None,
        *,
        n_queries: int,
        key: int,
        interleaved: bool,
    ) -> tuple[jax.Array, LayerCache]:
        """The queries, rotated, and the cache with the keys, rotated too, and the values.

        The queries are the first `n_queries` slices of heads [T, n, K, D], the keys its slice `key`, the
        values the last slice of values [T, m, K, D]. A token whose slot_of_token [T] int32 is out of range is
        dropped.
        """
        ...


class Evaluated(NamedTuple):
    """The tokens whose hidden states are wanted: of the others only keys and values are computed.

    `tokens` [R] int32 are indices in the batch, perhaps several of one request. `attend` takes the queries of
    these alone, [R, n, K, D], and `cross` theirs of cross attention; `product` is for R tokens.
    """

    tokens: jax.Array
    attend: Attend
    product: Matmul
    cross: Attend | None = None

    def of(self, x: jax.Array) -> jax.Array:
        """Of an array [T, ...] what belongs to these tokens, [R, ...]."""
        return x.at[self.tokens].get(mode="clip")


class Passed(NamedTuple):
    """What a layer gives: the hidden states [T, H] behind it, or [R, H], its cache, and the experts that
    these tokens chose, [T, k] or [R, k] int32.
    """

    x: jax.Array
    cache: LayerCache
    chosen: jax.Array | None  # None: there are no experts


class CrossAttention(nnx.Module):
    """Attention of a decoder's tokens to what the encoder made of their request's input."""

    def __init__(self, config: Attention, p: Weights) -> None:
        self.config = config
        self.q = linear_of(p, "cross_q")
        self.kv = linear_of(p, "cross_kv")
        self.out = linear_of(p, "cross_out")

    def __call__(
        self, x: jax.Array, cache: LayerCache, attend: Attend, shard: Shard, product: Matmul
    ) -> jax.Array:
        """x [T, H] to [T, H]; `attend` is bound to the slots of the encoder's tokens."""
        queries = self.q(x, product).reshape(x.shape[0], 1, -1, self.config.head_size)  # [T, 1, K, D]
        attended = attend(queries, cache, self.config, None, None)
        return self.out(attended.reshape(x.shape[0], -1), product, shard)

    def write(
        self,
        encoded: jax.Array,
        cache: LayerCache,
        slot_of_token: jax.Array,
        attend: Attend,
        product: Matmul,
    ) -> LayerCache:
        """The cache with this layer's keys and values of the encoder's tokens, `encoded` [T, H]."""
        kv = self.kv(encoded, product).reshape(encoded.shape[0], 2, -1, self.config.head_size)
        if isinstance(attend, Placing):
            return attend.place(kv, kv, slot_of_token, cache, None, n_queries=0, key=0, interleaved=False)[1]
        return write(cache, kv[:, 0], kv[:, 1], slot_of_token)


class Block(nnx.Module):
    """One Transformer layer, of the parts that `config` names."""

    def __init__(self, config: Layer, p: Weights) -> None:
        self.config = config
        norms = {name: norm_of(config.norm, p, name) for name in config.norms}
        self.attn_norm = norms.get("attn_norm")
        self.attn_out_norm = norms.get("attn_out_norm")
        self.mlp_norm = norms.get("mlp_norm")
        self.mlp_out_norm = norms.get("mlp_out_norm")
        latent = config.attention.latent is not None
        self.latent = LatentProjections(config.attention, p) if latent else None
        self.qkv = None if latent else linear_of(p, "qkv")
        self.q_norm, self.k_norm = _qk_norms(config.attention, p)
        self.out = linear_of(p, "out")
        relative = config.attention.scores.relative
        self.relative_bias = None if relative is None else nnx.Param(p("relative_bias"))  # [buckets, K]
        self.sinks = nnx.Param(p("sinks")) if config.attention.scores.sinks else None
        self.cross_norm = norms.get("cross_norm")
        self.cross = None if config.cross is None else CrossAttention(config.cross, p)
        mixed = config.feed_forward.experts is not None
        self.mixture = Mixture(config.feed_forward, p) if mixed else None
        self.up = None if mixed else linear_of(p, "up")
        self.down = None if mixed else linear_of(p, "down")

    def __call__(
        self,
        x: jax.Array,
        cache: LayerCache,
        slot_of_token: jax.Array | None,
        rotation: Rotation | None,
        attend: Attend,
        shard: Shard,
        product: Matmul,
        evaluated: Evaluated | None = None,
        cross: Attend | None = None,
    ) -> Passed:
        """x [T, H] through the layer, or with `evaluated` those tokens' part of it, [R, H].

        All tokens' keys and values are written to the cache first, unless there are no slots: then they are
        in it already. `cross` is for cross attention, whose keys and values are in the cache.
        """
        after_attention = product if evaluated is None else evaluated.product
        chosen: jax.Array | None = None
        slices = self._slices(x, (x if evaluated is None else evaluated.tokens).shape[0], shard)
        if slices is not None:  # from attention on
            shard, after_attention = slices.scattering, slices.product(after_attention)

        def taken(value: jax.Array) -> jax.Array:
            value = value if evaluated is None else evaluated.of(value)
            return value if slices is None else slices.own(value)

        def attention(value: jax.Array) -> tuple[jax.Array, LayerCache]:
            attended, written = self._attention(
                value, cache, slot_of_token, rotation, attend, shard, product, evaluated
            )
            return self._scaled(_normed(self.attn_out_norm, attended)), written

        def feed_forward(value: jax.Array) -> jax.Array:
            nonlocal chosen
            given, chosen = self._feed_forward(value, shard, after_attention, slices)
            return self._scaled(_normed(self.mlp_out_norm, given))

        def crossing(value: jax.Array, written: LayerCache) -> jax.Array:
            attends = cross if evaluated is None else evaluated.cross
            assert self.cross is not None and attends is not None
            return self._scaled(self.cross(value, written, attends, shard, after_attention))

        match self.config.residual:
            case "pre" | "both" | "after":
                attended, written = attention(_normed(self.attn_norm, x))
                x = taken(x) + attended
                if self.cross is not None:
                    x = x + crossing(_normed(self.cross_norm, x), written)
                x = x + feed_forward(_normed(self.mlp_norm, x))
            case "post":
                attended, written = attention(x)
                x = _normed(self.attn_norm, taken(x) + attended)
                if self.cross is not None:
                    x = _normed(self.cross_norm, x + crossing(x, written))
                x = _normed(self.mlp_norm, x + feed_forward(x))
            case "parallel" | "parallel_two_norms":
                normed = _normed(self.attn_norm, x)
                attended, written = attention(normed)
                x = taken(x)
                given = feed_forward(taken(normed) if self.mlp_norm is None else self.mlp_norm(x))
                x = x + attended + given
        return Passed(x if slices is None else slices.whole(x), written, chosen)

    def _attention(
        self,
        x: jax.Array,
        cache: LayerCache,
        slot_of_token: jax.Array | None,
        rotation: Rotation | None,
        attend: Attend,
        shard: Shard,
        product: Matmul,
        evaluated: Evaluated | None,
    ) -> tuple[jax.Array, LayerCache]:
        config = self.config.attention
        if self.latent is not None:
            assert rotation is not None
            if slot_of_token is not None:
                cache = write(cache, self.latent.keys(x, rotation, product), None, slot_of_token)
            if evaluated is not None:
                x, rotation = evaluated.of(x), Rotation(*map(evaluated.of, rotation))
                attend, product = evaluated.attend, evaluated.product
            attended = self.latent.attended(x, rotation, product, cache, attend)
            return self.out(attended, product, shard), cache
        assert self.qkv is not None
        group, n_kv_heads = config.group, config.n_kv_heads // shard.n
        qkv = self.qkv(x, product)
        qkv = qkv.reshape(x.shape[0], group + 2, n_kv_heads, config.head_size)  # [T, G + 2, K, D]
        queries, cache = self._placed(qkv, cache, slot_of_token, rotation, attend, shard, evaluated)
        if evaluated is not None:
            attend, product = evaluated.attend, evaluated.product
        sinks = None if self.sinks is None else self.sinks[...].astype(jnp.float32).reshape(group, -1)
        attended = attend(queries, cache, config, self._bias(shard), sinks)  # [T or R, G, K, D]
        return self.out(attended.reshape(attended.shape[0], -1), product, shard), cache

    def _placed(
        self,
        qkv: jax.Array,
        cache: LayerCache,
        slot_of_token: jax.Array | None,
        rotation: Rotation | None,
        attend: Attend,
        shard: Shard,
        evaluated: Evaluated | None,
    ) -> tuple[jax.Array, LayerCache]:
        """The queries of qkv [T, G + 2, K, D], and the cache with its keys and values, if there are slots.

        The queries are the first G slices of the result [T or R, n, K, D]. They and the keys have their norm
        and rotation.
        """
        config, group = self.config.attention, self.config.attention.group
        interleaved = config.rotary is not None and config.rotary.interleaved
        # The queries of all tokens come with the keys: without them the weight would have to be cut.
        queries, keys = qkv if evaluated is None else evaluated.of(qkv), qkv[:, group : group + 1]
        heads, key = qkv, group  # those that have the keys
        if self.q_norm is not None and self.k_norm is not None and config.qk_norm is not None:
            queries = queries[:, :group]
            if config.qk_norm.over == "width":
                queries, keys = self.q_norm.over_heads(queries, shard), self.k_norm.over_heads(keys, shard)
            else:
                queries, keys = self.q_norm(queries), self.k_norm(keys)
            heads, key = (jnp.concatenate([queries, keys], 1), group) if evaluated is None else (keys, 0)
        if slot_of_token is not None and isinstance(attend, Placing):
            n_queries = 0 if rotation is None or evaluated is not None else group
            rotated, cache = attend.place(
                heads,
                qkv,
                slot_of_token,
                cache,
                rotation,
                n_queries=n_queries,
                key=key,
                interleaved=interleaved,
            )
            if n_queries:
                return rotated, cache
            slot_of_token = None  # the keys and values are in the cache
        if rotation is not None:
            by = rotation if evaluated is None else Rotation(*map(evaluated.of, rotation))
            queries = rotate(queries[:, :group], by, interleaved=interleaved)
            keys = rotate(keys, rotation, interleaved=interleaved)
        if slot_of_token is not None:
            cache = write(cache, keys[:, 0], qkv[:, group + 1], slot_of_token)
        return queries, cache

    def _slices(self, x: jax.Array, n_tokens: int, shard: Shard) -> Slices | None:
        """If the layer exchanges tokens, how they are cut behind attention, where it has `n_tokens`."""
        exchange, width = shard.exchange, x.shape[1] * x.dtype.itemsize
        if exchange is None or not exchange.wanted(self.config, width, n_tokens):
            return None
        return Slices(shard, exchange, n_tokens)

    def _feed_forward(
        self, x: jax.Array, shard: Shard, product: Matmul, slices: Slices | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """What the layer's feed-forward part gives, and the experts that tokens chose."""
        if self.mixture is not None:
            return self.mixture(x, product, shard, slices)
        assert self.up is not None and self.down is not None
        inner = between(self.up(x, product), self.config.feed_forward)
        return self.down(inner, product, shard), None

    def _bias(self, shard: Shard) -> jax.Array | None:
        """What `Attend` adds to the scores of this device's heads."""
        attention = self.config.attention
        if self.relative_bias is not None and attention.scores.relative is not None:
            buckets = attention.scores.relative.buckets(causal=attention.causal)
            return self.relative_bias[...].astype(jnp.float32)[buckets]
        slopes = attention.slopes()
        if slopes is None or shard.n == 1:
            return None if slopes is None else jnp.asarray(slopes)
        n_kv_heads = slopes.shape[1] // shard.n
        return lax.dynamic_slice_in_dim(jnp.asarray(slopes), shard.index * n_kv_heads, n_kv_heads, axis=1)

    def _scaled(self, x: jax.Array) -> jax.Array:
        multiplier = self.config.residual_multiplier
        return x if multiplier == 1.0 else x * jnp.asarray(multiplier, x.dtype)


def _normed(norm: LayerNorm | RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


def _qk_norms(attention: Attention, p: Weights) -> tuple[RMSNorm | None, RMSNorm | None]:
    if attention.qk_norm is None:
        return None, None
    q_scale, k_scale = p("q_norm.scale"), p("k_norm.scale")
    assert q_scale is not None and k_scale is not None
    return RMSNorm(attention.qk_norm.norm, q_scale), RMSNorm(attention.qk_norm.norm, k_scale)


def norm_of(norm: Norm, p: Weights, name: str) -> LayerNorm | RMSNorm:
    """The norm of that name."""
    scale = p(f"{name}.scale")
    assert scale is not None, name
    return RMSNorm(norm, scale) if norm.kind == "rms_norm" else LayerNorm(norm, scale, p(f"{name}.bias"))
