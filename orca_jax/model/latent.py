"""Latent attention (DeepSeek-V2, section 2.1), whose cache has one compressed vector per token.

The vector, from which all heads' keys and values can be computed, is followed by the rotated part of the key,
which all heads share. There are two ways to attend to it:

In the absorbed form, W_UK (which makes keys) is applied to a head's query, not to every token's vector, and
W_UV (which makes values) to the head's result. All heads then share one K/V head, and nothing in the cache is
expanded. In the plain form, a row's keys and values are computed a chunk at a time for all its queries; with
many queries that is less work (`Latent.is_plain`).

With an indexer a query sees only the keys that it selects, always in the absorbed form (selection.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from orca_jax.families.attention_config import Attention
from orca_jax.model.context import Attend, Context
from orca_jax.model.kv_cache import LayerCache, as_numbers, write
from orca_jax.model.layers import Linear, Matmul, RMSNorm, Weights, linear_of
from orca_jax.model.rotation import Rotation, query_factors, rotate
from orca_jax.model.selection import Indexer, Selecting

_MASKED = -1e30  # a masked key's score; finite, so that inf - inf cannot arise
_WHOLE_WEIGHT = 256  # of more tokens, the products with the unwanted part take longer than copying the other
_QUERIES, _KEYS = 128, 256  # the plain form's queries of a tile, and keys of a chunk


Product = Callable[[jax.Array, jax.Array], jax.Array]


class Queries(NamedTuple):
    """The heads' queries, split in two parts."""

    plain: jax.Array  # [T, N, P]
    rotated: jax.Array  # [T, N, rotary size]


class AttendPlain(Protocol):
    """Attention in the plain form with this iteration's tables bound."""

    def __call__(
        self, q: jax.Array, cache: LayerCache, weight: jax.Array, attention: Attention, /
    ) -> jax.Array:
        """q [T, N, P + rotary size] to [T, N, W]; weight [N, P + W, C] makes a head's keys and values.

        Tokens of rows in the absorbed form get zeros.
        """
        ...


@dataclass(frozen=True, slots=True)
class ByRow:
    """Attention of an iteration in which each row takes one of the two forms.

    The tokens of rows in the absorbed form are cut into `n_slabs` [] slabs. `slab` returns the tokens of one,
    [S] int32 filled up with T, and their `Attend`. Called as an `Attend`, this runs all rows in the absorbed
    form.
    """

    absorbed: Attend
    plain: AttendPlain
    slab: Callable[[jax.Array], tuple[jax.Array, Attend]]
    n_slabs: jax.Array

    def __call__(
        self,
        q: jax.Array,
        cache: LayerCache,
        attention: Attention,
        bias: jax.Array | None,
        sinks: jax.Array | None,
        /,
    ) -> jax.Array:
        return self.absorbed(q, cache, attention, bias, sinks)


class LatentAttention(nnx.Module):
    """The projections before and after attention; the heads are this device's."""

    def __init__(self, config: Attention, p: Weights) -> None:
        assert config.latent is not None and config.rotary is not None
        self.attention, self.config = config, config.latent
        self.interleaved = config.rotary.interleaved
        compressed = config.latent.query_rank is not None
        self.q_a = linear_of(p, "q_a") if compressed else None
        self.q_a_norm = _norm(config, p, "q_a_norm") if compressed else None
        self.q = linear_of(p, "q_b" if compressed else "q")
        self.kv_a = linear_of(p, "kv_a")
        self.kv_a_norm = _norm(config, p, "kv_a_norm")
        shared = config.indexer is None or config.indexer.shared
        self.indexer = None if config.indexer is None or shared else Indexer(config.indexer, p)
        self.kv_b = Linear(_weight(p, "kv_b.weight"), None)
        self.out = linear_of(p, "out")

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        """x [T, H] to [R, H], the tokens that attend, or to this device's slice of them."""
        queries, rotation = ctx.queries, ctx.rotation
        assert rotation is not None
        if ctx.slot_of_token is not None:
            keys, product = self._keys(x, rotation, ctx.tokens.product), ctx.tokens.product
            index_keys = None if self.indexer is None else self.indexer.keys(x, rotation, product)
            ctx.cache = write(ctx.cache, keys, None, ctx.slot_of_token, index_keys)
        x, rotation, product = queries.of(x), rotation.of(queries.of), queries.product
        compressed = x
        if self.q_a is not None and self.q_a_norm is not None:
            compressed = self.q_a_norm(self.q_a(x, product))
        made = self._queries(compressed, rotation, product, queries.of(ctx.positions))
        if isinstance(queries.attend, Selecting):
            attended = self._selected(made, x, compressed, rotation, ctx, queries.attend)
        else:
            attended = self._attended(made, ctx.cache, queries.attend)
        return self.out(attended, product, ctx.shard)

    def _keys(self, x: jax.Array, rotation: Rotation, product: Matmul) -> jax.Array:
        """The compressed keys of x [T, H] for the cache: [T, 1, C + rotary size]."""
        rank, compressed = self.config.rank, self.kv_a(x, product)
        turned = self._rotated(compressed[:, None, rank:], rotation)
        return jnp.concatenate([self.kv_a_norm(compressed[:, None, :rank]), turned], axis=-1)

    def _selected(
        self,
        queries: Queries,
        x: jax.Array,
        compressed: jax.Array,
        rotation: Rotation,
        ctx: Context,
        attend: Selecting,
    ) -> jax.Array:
        """Attend to the keys that an indexer selects, and densely from rows that select nothing.

        `compressed` [T, A] are the compressed queries of x [T, H]. The selection stays in the context.
        """
        cache, given = ctx.cache, None if ctx.selected is None else ctx.queries.of(ctx.selected)

        def with_selected(dense: jax.Array) -> tuple[jax.Array, jax.Array]:
            selected = given
            if self.indexer is not None:
                asked = self.indexer.queries(x, compressed, rotation, ctx.queries.product)
                selected = attend.select(asked, cache)
            assert selected is not None
            attended = attend.to(self._in_cache_space(queries), cache, selected, self.attention)
            values = _values(attended, self._kv_weight(), self.config.plain_size).reshape(dense.shape)
            return jnp.where(attend.mine[:, None], values, dense), selected

        def without(dense: jax.Array) -> tuple[jax.Array, jax.Array]:
            return dense, attend.nothing

        n_tokens, n_heads, _ = queries.plain.shape
        if attend.dense is None:
            zeros = jnp.zeros((n_tokens, n_heads * self.config.value_size), queries.plain.dtype)
            attended, ctx.selected = with_selected(zeros)
            return attended
        dense = self._attended(queries, cache, attend.dense)
        attended, ctx.selected = lax.cond(attend.some, with_selected, without, dense)
        return attended

    def _attended(self, queries: Queries, cache: LayerCache, attend: Attend) -> jax.Array:
        """Attend to the cache, all heads side by side: [T, N W]."""
        n_tokens = len(queries.plain)
        if not isinstance(attend, ByRow):
            return self._absorbed(queries, cache, attend).reshape(n_tokens, -1)

        def add_slab(i: jax.Array, out: jax.Array) -> jax.Array:
            tokens, absorbed = attend.slab(i)
            some = Queries(*(each.at[tokens].get(mode="clip") for each in queries))
            return out.at[tokens].set(self._absorbed(some, cache, absorbed), mode="drop")

        whole = jnp.concatenate(queries, axis=-1)
        out = attend.plain(whole, cache, self._kv_weight(), self.attention)
        return lax.fori_loop(0, attend.n_slabs, add_slab, out).reshape(n_tokens, -1)

    def _queries(self, x: jax.Array, rotation: Rotation, product: Matmul, positions: jax.Array) -> Queries:
        """The queries of x [T, H], or of compressed queries x [T, A]."""
        latent, temperature = self.config, self.attention.scores.temperature
        q = self.q(x, product).reshape(x.shape[0], -1, latent.query_size)
        if temperature is not None:
            q = q * query_factors(temperature, positions).astype(q.dtype)[:, None, None]
        return Queries(q[..., : latent.plain_size], self._rotated(q[..., latent.plain_size :], rotation))

    def _absorbed(self, queries: Queries, cache: LayerCache, attend: Attend) -> jax.Array:
        """Attend in the absorbed form: [T, N, W]."""
        absorbed = self._in_cache_space(queries)[:, :, None]  # [T, N, 1, C + rotary]
        attended = attend(absorbed, cache, self.attention, None, None)  # [T, N, 1, C]
        return _values(attended[:, :, 0], self._kv_weight(), self.config.plain_size)

    def _in_cache_space(self, queries: Queries) -> jax.Array:
        """The heads' absorbed queries, which meet cached vectors: [T, N, C + rotary]."""
        plain = _in_cache_space(queries.plain, self._kv_weight())
        return jnp.concatenate([plain, queries.rotated], axis=-1)

    def _kv_weight(self) -> jax.Array:
        """Each head's W_UK and W_UV, which make its keys and values: [N, P + W, C]."""
        latent = self.config
        return self.kv_b.weight[...].reshape(-1, latent.plain_size + latent.value_size, latent.rank)

    def _rotated(self, x: jax.Array, rotation: Rotation) -> jax.Array:
        """Rotate x [T, n, rotary size]."""
        return rotate(x[:, None], rotation, interleaved=self.interleaved)[:, 0]


def _in_cache_space(plain: jax.Array, kv_weight: jax.Array) -> jax.Array:
    """W_UK^T applied to queries [T, N, P], for kv_weight [N, P + W, C]: [T, N, C]."""
    size = plain.shape[-1]

    def of_part(plain: jax.Array, kv_weight: jax.Array) -> jax.Array:
        return jnp.einsum("tnp,npc->tnc", plain, kv_weight[:, :size])

    def of_whole(plain: jax.Array, kv_weight: jax.Array) -> jax.Array:
        padded = jnp.pad(plain, ((0, 0), (0, 0), (0, kv_weight.shape[1] - size)))
        return jnp.einsum("tnp,npc->tnc", padded, kv_weight)

    return _of_kv_weight(of_part, of_whole, plain, kv_weight)


def _values(attended: jax.Array, kv_weight: jax.Array, n_plain: int) -> jax.Array:
    """W_UV applied to results [T, N, C], for kv_weight [N, P + W, C]: [T, N, W]."""

    def of_part(attended: jax.Array, kv_weight: jax.Array) -> jax.Array:
        return jnp.einsum("tnc,nwc->tnw", attended, kv_weight[:, n_plain:])

    def of_whole(attended: jax.Array, kv_weight: jax.Array) -> jax.Array:
        return jnp.einsum("tnc,nmc->tnm", attended, kv_weight)[:, :, n_plain:]

    return _of_kv_weight(of_part, of_whole, attended, kv_weight)


def _of_kv_weight(of_part: Product, of_whole: Product, x: jax.Array, kv_weight: jax.Array) -> jax.Array:
    """A product with a part of the weight.

    XLA copies a part of a weight before the product on a GPU. With few tokens that takes longer than
    multiplying by the whole weight.
    """
    if len(x) > _WHOLE_WEIGHT:
        return of_part(x, kv_weight)
    return lax.platform_dependent(x, kv_weight, cpu=of_part, default=of_whole)


def plain_attention(
    q: jax.Array,
    cache: LayerCache,
    weight: jax.Array,
    block_table: jax.Array,
    row_start: jax.Array,
    kv_length: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Attention in the plain form, in loops that follow the real lengths.

    q [T, N, P + rotary size]; weight [N, P + W, C]; block_table [R, max_blocks], row_start [R + 1] and
    kv_length [R] int32. A row's queries are the last positions of its `kv_length`. The result [T, N, W] has
    q's dtype, with zeros for padding tokens and for rows without a key.

    Keys and values are expanded a chunk at a time; every query tile visits a chunk before the next is
    expanded, with a running softmax, so that no array is as long as the context.
    """
    n_tokens, n_heads, size = q.shape
    rank, (_, _, block_size, width) = weight.shape[2], cache.keys.shape
    n_plain = size - (width - rank)
    n_values = weight.shape[1] - n_plain
    n_queries = min(_QUERIES, n_tokens)
    blocks = max(1, min(_KEYS // block_size, block_table.shape[1]))
    n_keys = blocks * block_size
    table = jnp.pad(block_table, ((0, 0), (0, -block_table.shape[1] % blocks)))
    # The last tile may reach past the last token.
    padded = jnp.pad(q.swapaxes(0, 1), ((0, 0), (0, n_queries), (0, 0)))
    shape = (n_heads, n_tokens + n_queries)
    start = (
        jnp.full(shape, _MASKED, jnp.float32),  # each query's greatest score,
        jnp.zeros(shape, jnp.float32),  # the sum of its weights
        jnp.zeros((*shape, n_values), jnp.float32),  # and of the values
    )

    def add_row(row: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        begin, end, length = row_start[row], row_start[row + 1], kv_length[row]
        before = length - (end - begin)  # positions before its first query

        def add_chunk(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            base = i * n_keys
            ids = lax.dynamic_slice_in_dim(table[row], i * blocks, blocks)
            found = as_numbers(cache.keys.at[ids].get(mode="clip")).reshape(n_keys, width)
            position = base + jnp.arange(n_keys, dtype=jnp.int32)
            # Slots after the row's last key may hold another row's inf or NaN.
            found = jnp.where((position < length)[:, None], found, 0)
            made = jnp.einsum("kc,nmc->nkm", found[:, :rank], weight)
            turned = jnp.broadcast_to(found[:, rank:], (n_heads, n_keys, width - rank))
            keys = jnp.concatenate([made[..., :n_plain], turned], axis=-1)  # [N, keys, P + rotary size]
            values = made[..., n_plain:]  # [N, keys, W]

            def add_tile(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                first = begin + j * n_queries

                def tile(of: jax.Array) -> jax.Array:
                    return lax.dynamic_slice_in_dim(of, first, n_queries, axis=1)

                top, total, sums = map(tile, carry)
                index = j * n_queries + jnp.arange(n_queries, dtype=jnp.int32)
                seen = (position <= before + index[:, None]) & (
                    index[:, None] < end - begin
                )  # [queries, keys]
                scores = jnp.einsum("nqd,nkd->nqk", tile(padded), keys, preferred_element_type=jnp.float32)
                scores = jnp.where(seen, scores * scale, _MASKED)
                new_top = jnp.maximum(top, scores.max(axis=-1))
                # A query that sees none of these keys, or is the next row's, keeps its sums.
                weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0)
                shrink = jnp.exp(top - new_top)
                weighted = jnp.einsum(
                    "nqk,nkw->nqw", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
                )
                new = new_top, total * shrink + weights.sum(axis=-1), sums * shrink[..., None] + weighted
                put = lax.dynamic_update_slice_in_dim
                return tuple(put(old, one, first, axis=1) for old, one in zip(carry, new, strict=True))

            first_tile = jnp.maximum(base - before, 0) // n_queries
            return lax.fori_loop(first_tile, -(-(end - begin) // n_queries), add_tile, carry)

        return lax.fori_loop(0, -(-length // n_keys), add_chunk, carry)

    _, total, sums = lax.fori_loop(0, len(kv_length), add_row, start)
    out = sums / jnp.where(total > 0, total, 1)[..., None]
    return out[:, :n_tokens].swapaxes(0, 1).astype(q.dtype)


def _norm(config: Attention, p: Weights, name: str) -> RMSNorm:
    assert config.latent is not None
    return RMSNorm(config.latent.norm, _weight(p, f"{name}.scale"))


def _weight(p: Weights, name: str) -> jax.Array:
    weight = p(name)
    assert weight is not None, name
    return weight
