"""Sparse attention: each query sees only the keys that an indexer selects (DeepSeek-V3.2, section 2.1).

A layer's indexer keeps a small key of each token in the cache beside the compressed vector. For a query it
scores all index keys of the request, and attention then reads the compressed vectors of the `top_k` best
alone: its work no longer grows with the context. A row with at most `top_k` keys selects all of them, so it
attends as a layer without an indexer does, and its index keys are only written.

Rows that select are cut into tiles of a few queries (attention.py), because scores of a tile read each index
key once, and gathered vectors of many queries would not fit in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from orca_jax.families.attention_config import Attention
from orca_jax.families.attention_config import Indexer as IndexerConfig
from orca_jax.families.model_config import SELECTED_DIGITS
from orca_jax.model.attention import AttentionWork, Tiles, Tiling, Tilings, tiles_of_rows
from orca_jax.model.context import Attend
from orca_jax.model.kv_cache import LayerCache, as_numbers
from orca_jax.model.layers import LayerNorm, Linear, Matmul, Weights, linear_of, norm_of
from orca_jax.model.rotation import Rotation, rotate

_MASKED = -1e30  # a masked key's score; finite, so that inf - inf cannot arise
_FEWEST_KEYS = 256  # that one trip scores

# The queries of a tile, and tiles of a trip: `top_k` vectors are gathered for each query of a trip, 2.4 MB in
# float32 for V3.2's 2,048. Only static shapes, on GPUs, need many in a trip.
_TILINGS = {
    True: Tilings(Tiling(1, _FEWEST_KEYS, 8), (Tiling(8, _FEWEST_KEYS, 1),)),
    False: Tilings(Tiling(1, _FEWEST_KEYS, 32), (Tiling(16, _FEWEST_KEYS, 2),)),
}


class IndexQueries(NamedTuple):
    """The part of a key's score that its query brings."""

    queries: jax.Array  # [T, n_heads, k]
    weights: jax.Array  # [T, n_heads] float32, with the scores' scale


class Indexer(nnx.Module):
    """The projections to index keys and queries. Every device holds them whole, and selects the same keys."""

    def __init__(self, config: IndexerConfig, p: Weights) -> None:
        self.config = config
        self.keys_of, self.queries_of = linear_of(p, "index_k"), linear_of(p, "index_q")
        self.key_norm = _layer_norm(config, p)
        weights = p("index_weights.weight")
        assert weights is not None
        self.weights_of = Linear(weights, None)

    def keys(self, x: jax.Array, rotation: Rotation, product: Matmul) -> jax.Array:
        """The index keys of x [T, H] for the cache: [T, 1, k]."""
        return self._rotated(self.key_norm(self.keys_of(x, product))[:, None], rotation)

    def queries(
        self, x: jax.Array, compressed: jax.Array, rotation: Rotation, product: Matmul
    ) -> IndexQueries:
        """The index queries of x [T, H], whose compressed queries are [T, A]."""
        made = self.queries_of(compressed, product).reshape(len(x), -1, self.config.head_size)
        weights = product.in_float32(x, self.weights_of.weight.get_value())
        return IndexQueries(self._rotated(made, rotation), weights * self.config.scale)

    def _rotated(self, x: jax.Array, rotation: Rotation) -> jax.Array:
        """Rotate the first elements of each of x [T, n, k]."""
        return rotate(x[:, None], rotation, interleaved=self.config.interleaved)[:, 0]


def _layer_norm(config: IndexerConfig, p: Weights) -> LayerNorm:
    norm = norm_of(config.norm, p, "index_k_norm")
    assert isinstance(norm, LayerNorm)
    return norm


@dataclass(frozen=True, slots=True)
class Selecting:
    """Attention of an iteration in which some rows, or with `dense` None all, see selected keys alone.

    `dense` attends from the other rows' tokens, and gives zeros for those that select. `select` and `to` are
    for the tokens that do: [T, top_k] int32 positions, -1 for none, and their results [T, N, C] from absorbed
    queries [T, N, D], zeros for all other tokens. Called as an `Attend`, this is `dense`.
    """

    dense: Attend | None
    some: jax.Array  # [] bool: any row selects
    mine: jax.Array  # [T] bool: the token's row does
    select: Callable[[IndexQueries, LayerCache], jax.Array]
    to: Callable[[jax.Array, LayerCache, jax.Array, Attention], jax.Array]
    nothing: jax.Array  # [T, top_k] the selection of tokens none of which selects

    def __call__(
        self,
        q: jax.Array,
        cache: LayerCache,
        attention: Attention,
        bias: jax.Array | None,
        sinks: jax.Array | None,
        /,
    ) -> jax.Array:
        assert self.dense is not None
        return self.dense(q, cache, attention, bias, sinks)


class Batch(NamedTuple):
    """An iteration's rows: as in `attention.split_attention`, and which of them select."""

    block_table: jax.Array
    row_start: jax.Array
    kv_length: jax.Array
    selects: jax.Array  # [R] bool
    n_tokens: int
    one_each: bool  # as in a layout: no row has several tokens
    follow_lengths: bool


def selecting(batch: Batch, top_k: int, block_size: int, dense: Attend | None) -> Selecting:
    """Bind sparse attention to an iteration's rows; `dense` is bound to those that do not select."""
    tiles = _SelectingTiles.of(batch)
    row_of_token = jnp.searchsorted(batch.row_start[1:], jnp.arange(batch.n_tokens), side="right")
    mine = batch.selects.at[row_of_token].get(mode="fill", fill_value=False)
    nothing = jnp.full((batch.n_tokens, top_k), -1, jnp.int32)

    def select(asked: IndexQueries, cache: LayerCache) -> jax.Array:
        assert cache.index_keys is not None

        def of_tile(tile: _Tile) -> jax.Array:
            assert cache.index_keys is not None
            here = IndexQueries(*(each.at[tile.token].get(mode="clip") for each in asked))
            return best_keys(
                here, cache.index_keys, tile.table, tile.last_key, top_k, follow_lengths=batch.follow_lengths
            )

        return tiles.run(nothing, of_tile)

    def to(q: jax.Array, cache: LayerCache, selected: jax.Array, attention: Attention) -> jax.Array:
        assert attention.latent is not None
        rank = attention.latent.rank

        def of_tile(tile: _Tile) -> jax.Array:
            position = selected.at[tile.token].get(mode="clip")  # [I, Q, top_k]
            block = jnp.take_along_axis(tile.table[:, None], position // block_size, axis=2, mode="clip")
            vectors = as_numbers(cache.keys.at[block, 0, position % block_size].get(mode="clip"))
            queries = q.at[tile.token].get(mode="clip")
            return attend_to(queries, vectors, position >= 0, rank, attention.scale)

        return tiles.run(jnp.zeros((*q.shape[:2], rank), q.dtype), of_tile)

    return Selecting(dense, batch.selects.any(), mine, select, to, nothing)


def in_digits(selected: jax.Array, dtype: Any) -> jax.Array:
    """Positions [T, top_k], -1 for none, as numbers that any dtype holds exactly: [T, 3 top_k]."""
    digits = [(selected + 1) >> shift & 255 for shift in range(0, 8 * SELECTED_DIGITS, 8)]
    return jnp.concatenate(digits, axis=1).astype(dtype)


def from_digits(digits: jax.Array) -> jax.Array:
    """The positions of `in_digits`."""
    parts = jnp.split(digits.astype(jnp.int32), SELECTED_DIGITS, axis=1)
    return sum(part << 8 * i for i, part in enumerate(parts)) - jnp.ones_like(parts[0])


def all_keys(positions: jax.Array, top_k: int) -> jax.Array:
    """The selection of tokens at `positions` [T] that see all keys up to themselves: [T, top_k]."""
    each = jnp.arange(top_k, dtype=jnp.int32)
    return jnp.where(each <= positions[:, None], each, -1)


def attend_to(
    queries: jax.Array, vectors: jax.Array, exists: jax.Array, rank: int, scale: float
) -> jax.Array:
    """Attend from absorbed queries [..., N, D] to their own vectors [..., n, D] that exist: [..., N, rank].

    The first `rank` elements of a vector are its value. Zeros for a query without any vector.
    """
    # Slots that no token of the row has may hold another row's inf or NaN.
    vectors = jnp.where(exists[..., None], vectors, 0)
    scores = jnp.einsum("...nd,...kd->...nk", queries, vectors, preferred_element_type=jnp.float32) * scale
    seen = exists[..., None, :]
    scores = jnp.where(seen, scores, _MASKED)
    weights = jnp.where(seen, jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    total = weights.sum(axis=-1, keepdims=True)
    sums = jnp.einsum(
        "...nk,...kc->...nc",
        weights.astype(vectors.dtype),
        vectors[..., :rank],
        preferred_element_type=jnp.float32,
    )
    return (sums / jnp.where(total > 0, total, 1)).astype(queries.dtype)


def best_keys(
    asked: IndexQueries,
    index_keys: jax.Array,
    table: jax.Array,
    last_key: jax.Array,
    top_k: int,
    *,
    follow_lengths: bool,
) -> jax.Array:
    """The positions of the `top_k` keys with the greatest scores, up to `last_key` [I, Q]: [I, Q, top_k].

    `asked` has axes [I, Q] before its own; index_keys [n_blocks, 1, B, k], table [I, max_blocks]. Of equal
    scores the earlier key is taken; -1 stands for none. Keys are scored a chunk at a time, and only the best
    are kept, so that no array is as long as the context.
    """
    block_size = index_keys.shape[2]
    blocks = max(1, min(max(top_k, _FEWEST_KEYS) // block_size, table.shape[1]))
    chunk = blocks * block_size
    n_chunks = -(-table.shape[1] // blocks)
    table = jnp.pad(table, ((0, 0), (0, n_chunks * blocks - table.shape[1])))
    start = (
        jnp.full((*last_key.shape, top_k), -jnp.inf, jnp.float32),
        jnp.full((*last_key.shape, top_k), -1, jnp.int32),
    )

    def add_chunk(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        ids = lax.dynamic_slice_in_dim(table, j * blocks, blocks, axis=1)
        keys = as_numbers(index_keys.at[ids, 0].get(mode="clip")).reshape(len(table), chunk, -1)
        products = jnp.einsum("iqhd,icd->iqhc", asked.queries, keys, preferred_element_type=jnp.float32)
        scores = jnp.einsum("iqh,iqhc->iqc", asked.weights, jax.nn.relu(products))
        position = j * chunk + jnp.arange(chunk, dtype=jnp.int32)
        scores = jnp.where(position <= last_key[..., None], scores, -jnp.inf)
        # Those kept so far come first, since they are earlier keys.
        scores = jnp.concatenate([carry[0], scores], axis=-1)
        positions = jnp.concatenate([carry[1], jnp.broadcast_to(position, (*last_key.shape, chunk))], axis=-1)
        best, at = lax.top_k(scores, top_k)
        return best, jnp.take_along_axis(positions, at, axis=-1)

    trips = last_key.max() // chunk + 1 if follow_lengths else n_chunks
    best, positions = lax.fori_loop(0, trips, add_chunk, start)
    return jnp.where(best > -jnp.inf, positions, -1)


class _Tile(NamedTuple):
    """Some tiles of one trip."""

    table: jax.Array  # [I, max_blocks]
    token: jax.Array  # [I, Q] the queries' tokens
    last_key: jax.Array  # [I, Q] each query's own position, -1 for none


@dataclass(frozen=True, slots=True)
class _SelectingTiles:
    """The tiles of the rows that select, made once for all layers."""

    batch: Batch
    work: AttentionWork
    tilings: Tilings

    @staticmethod
    def of(batch: Batch) -> "_SelectingTiles":
        tilings = _TILINGS[batch.follow_lengths].within(batch.n_tokens)
        rows = (batch.row_start, batch.kv_length, batch.n_tokens)
        return _SelectingTiles(batch, tiles_of_rows(*rows, tilings, batch.selects), tilings)

    def run(self, out: jax.Array, of_tile: Callable[[_Tile], jax.Array]) -> jax.Array:
        """Write the results [I, Q, ...] of all tiles to their tokens in `out` [T, ...]."""
        kinds = [(self.work.increment, self.tilings.increment)]
        if not self.batch.one_each and self.batch.n_tokens > 1:
            kinds += zip(self.work.initiation, self.tilings.initiation, strict=True)
        for tiles, tiling in kinds:
            out = self._run(out, tiles, tiling, of_tile)
        return out

    def _run(
        self, out: jax.Array, tiles: Tiles, tiling: Tiling, of_tile: Callable[[_Tile], jax.Array]
    ) -> jax.Array:
        batch = self.batch

        def trip(i: jax.Array, out: jax.Array) -> jax.Array:
            row = tiles.row[i]  # [I]
            index = tiles.start[i][:, None] + jnp.arange(tiling.queries, dtype=jnp.int32)
            end = batch.row_start.at[row + 1].get(mode="fill", fill_value=0)[:, None]
            length = batch.kv_length.at[row].get(mode="fill", fill_value=0)[:, None]
            last_key = jnp.where(index < end, length - end + index, -1)
            found = of_tile(_Tile(batch.block_table.at[row].get(mode="clip"), index, last_key))
            where = jnp.where(index < end, index, batch.n_tokens)
            return out.at[where].set(found, mode="drop")

        return lax.fori_loop(0, tiles.n_trips if batch.follow_lengths else len(tiles.row), trip, out)
