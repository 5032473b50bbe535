"""Split attention over the K/V blocks, in pure JAX (ORCA 3.2: the one operation that is not batched).

Every request attends to its own keys and values, which lie in the blocks that the block table names. The work
is cut into tiles of query tokens of one row: rows of the increment phase are tiles of one query, rows of the
initiation phase are cut into tiles of many, large ones and for the rest small ones. A tile walks over its
keys a chunk of blocks at a time with a running softmax, so that no dense [T, context] array ever exists.

With `follow_lengths` tiles are taken a few at a time and the trip counts are the real lengths': right for a
CPU, where a loop costs what it does. Without it all tiles go at once and the trips are fixed by the shapes:
a GPU's host would have to read a run-time trip count back at each trip, and so block.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from orca_jax.model.kv_cache import LayerCache, as_numbers

_NOTHING = -1e30  # the score of a key that is not there; finite, so that no inf - inf arises


@dataclass(frozen=True, slots=True)
class Tiling:
    """The sizes of tiles of one kind: query tokens of each, keys of a chunk, tiles that go side by side."""

    queries: int
    chunk_keys: int
    abreast: int


class Tilings(NamedTuple):
    """The sizes for both phases; the initiation's in descending order."""

    increment: Tiling
    initiation: tuple[Tiling, ...]


_ALL = 1 << 30
_TILINGS = {
    # Following the lengths; measured on two cores: enough work a trip to bury its overhead, little enough to
    # stay in a near cache.
    True: Tilings(
        increment=Tiling(queries=1, chunk_keys=64, abreast=8),
        initiation=(
            Tiling(queries=128, chunk_keys=128, abreast=1),
            Tiling(queries=32, chunk_keys=64, abreast=4),
        ),
    ),
    # Static shapes: few trips of much work each. A chunk of all tiles is a temporary array.
    False: Tilings(
        increment=Tiling(queries=1, chunk_keys=512, abreast=_ALL),
        initiation=(Tiling(queries=64, chunk_keys=256, abreast=_ALL),),
    ),
}


def _tilings(n_tokens: int, *, follow_lengths: bool) -> Tilings:
    """The tilings for a bucket of `n_tokens`: no tile has more queries than that."""
    increment, initiation = _TILINGS[follow_lengths]
    # Of those that would hold the whole bucket, the smallest is enough.
    needed = initiation[sum(tiling.queries >= n_tokens for tiling in initiation[1:]) :]
    return Tilings(
        increment, tuple(replace(tiling, queries=min(tiling.queries, n_tokens)) for tiling in needed)
    )


class Tiles(NamedTuple):
    """The tiles of one kind, `abreast` in each of the n trips; all int32."""

    row: jax.Array  # [n, abreast] the tile's row; R where there is no tile
    start: jax.Array  # [n, abreast] index of its first token
    n_trips: jax.Array  # [] trips with a tile in them


class AttentionWork(NamedTuple):
    """The tiles of an iteration, made once and used by every layer."""

    increment: Tiles
    initiation: tuple[Tiles, ...]  # by size, as in the Tilings


def attention_work(
    row_start: jax.Array, kv_length: jax.Array, n_tokens: int, *, follow_lengths: bool
) -> AttentionWork:
    """Cut the rows into tiles: `row_start` [R + 1], `kv_length` [R] int32, of a bucket of `n_tokens`."""
    n_rows = kv_length.shape[0]
    input_length = jnp.diff(row_start)
    single = input_length == 1

    # Rows of like lengths side by side, the longest first: tiles abreast take as long as the longest.
    order = jnp.argsort(jnp.where(single, -kv_length, 1)).astype(jnp.int32)
    increment_row = jnp.where(single[order], order, n_rows)
    increment_start = row_start[order]

    tilings = _tilings(n_tokens, follow_lengths=follow_lengths)

    def trips(row: jax.Array, start: jax.Array, n: jax.Array, tiling: Tiling) -> Tiles:
        abreast = min(tiling.abreast, len(row))
        short = -len(row) % abreast
        row = jnp.pad(row, (0, short), constant_values=n_rows).reshape(-1, abreast)
        return Tiles(row, jnp.pad(start, (0, short)).reshape(-1, abreast), -(-n // abreast))

    initiation: list[Tiles] = []
    begin, left = row_start[:-1], jnp.where(single, 0, input_length)  # [R] what no tile has yet
    for i, tiling in enumerate(tilings.initiation):
        queries = tiling.queries
        # What is left goes into smaller tiles, unless those would be as many as fill one of this size.
        spare = queries if i + 1 == len(tilings.initiation) else tilings.initiation[i + 1].queries
        tiles_of_row = (left + spare - 1) // queries
        tiles_before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(tiles_of_row)])
        # Each row with tiles has two tokens or more, and at most one tile that is not full.
        most_tiles = max(1, n_tokens // queries + min(n_rows, n_tokens // 2))
        tile = jnp.arange(most_tiles, dtype=jnp.int32)
        owner = (jnp.searchsorted(tiles_before, tile, side="right") - 1).astype(jnp.int32)
        row = jnp.where(tile < tiles_before[-1], owner, n_rows)
        place = tile - tiles_before.at[owner].get(mode="clip")
        start = begin.at[owner].get(mode="clip") + queries * place
        initiation.append(trips(row, start, tiles_before[-1], tiling))
        begin, left = begin + queries * tiles_of_row, jnp.maximum(left - queries * tiles_of_row, 0)
    return AttentionWork(
        trips(increment_row, increment_start, single.sum(dtype=jnp.int32), tilings.increment),
        tuple(initiation),
    )


def split_attention(
    q: jax.Array,
    cache: LayerCache,
    block_table: jax.Array,
    row_start: jax.Array,
    kv_length: jax.Array,
    work: AttentionWork,
    *,
    follow_lengths: bool,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    slopes: jax.Array | None = None,
    causal: bool = True,
    relative: jax.Array | None = None,
    sinks: jax.Array | None = None,
    value_size: int | None = None,
) -> jax.Array:
    """Attention of each request's query tokens to its own keys, up to its own position where `causal`.

    q [T, G, K, D]; cache blocks [n_blocks, K, B, D]; block_table [R, max_blocks], row_start [R + 1] and
    kv_length [R] int32. A row's queries are the last positions of its `kv_length`. Scores are scale * q.k
    (by default D ** -0.5), then soft_cap * tanh(scores / soft_cap), then for ALiBi slopes [G, K] times (key
    position - query position). A `relative` bias [2 M + 1, K] float32 adds to a score its row (key position -
    query position) + M, the first or the last for keys further away; G is then 1. With a `window` a query
    sees that many keys, its own the last, and blocks without any of them are not read. `sinks` [G, K] float32
    are scores of one more key for each head, which has no value. Without `causal` every query sees all keys
    of its row, of which there may be fewer than queries, and there are no window and no slopes. Sums and
    softmax are float32; the result [T, G, K, D] has q's dtype, and padding tokens and rows without a key get
    zeros. A cache without values has them as the first `value_size` elements of its keys; the result then has
    so many in place of D. `work` is `attention_work` of the same arrays and the same `follow_lengths`.
    """
    n_tokens, n_groups, n_kv_heads, head_size = q.shape
    assert causal or (window is None and slopes is None)
    assert relative is None or n_groups == 1
    assert (value_size is None) is (cache.values is not None)
    n_values = head_size if value_size is None else value_size
    # One axis for all heads, so that XLA lays the tiles out alike with one group and with several.
    heads = q.reshape(n_tokens, -1, head_size)  # [T, G * K, D]
    scaled = (heads.astype(jnp.float32) * (head_size**-0.5 if scale is None else scale)).astype(q.dtype)

    def attend(out: jax.Array, tiles: Tiles, tiling: Tiling) -> jax.Array:
        n_queries = tiling.queries

        def trip(i: jax.Array, out: jax.Array) -> jax.Array:
            row, start = tiles.row[i], tiles.start[i]  # [I]
            index = start[:, None] + jnp.arange(n_queries, dtype=jnp.int32)  # [I, Q]
            end = row_start.at[row + 1].get(mode="fill", fill_value=0)[:, None]
            mine = index < end
            length = kv_length.at[row].get(mode="fill", fill_value=0)[:, None]
            position = length - end + index  # [I, Q] the query's own
            last_key = jnp.where(mine, position if causal else length - 1, -1)  # [I, Q]
            tile = scaled.at[index].get(mode="clip").swapaxes(1, 2)  # [I, G * K, Q, D]
            attended = _attend(
                tile.reshape(-1, n_groups, n_kv_heads, n_queries, head_size).swapaxes(1, 2),
                cache,
                block_table.at[row].get(mode="clip"),
                position,
                last_key,
                chunk_keys=tiling.chunk_keys,
                follow_lengths=follow_lengths,
                window=window,
                soft_cap=soft_cap,
                slopes=slopes,
                relative=relative,
                sinks=sinks,
                n_values=n_values,
            )
            attended = attended.swapaxes(1, 2).reshape(*tile.shape[:3], n_values)
            attended = attended.swapaxes(1, 2)  # [I, Q, G * K, D]
            where = jnp.where(mine, index, n_tokens)
            return out.at[where].set(attended.astype(out.dtype), mode="drop")

        return lax.fori_loop(0, tiles.n_trips if follow_lengths else len(tiles.row), trip, out)

    tilings = _tilings(n_tokens, follow_lengths=follow_lengths)
    out = jnp.zeros((*heads.shape[:2], n_values), heads.dtype)
    out = attend(out, work.increment, tilings.increment)
    if n_tokens > 1:  # one token cannot be an initiation of several
        for tiles, tiling in zip(work.initiation, tilings.initiation, strict=True):
            out = attend(out, tiles, tiling)
    return out.reshape(*q.shape[:3], n_values)


def _attend(
    queries: jax.Array,
    cache: LayerCache,
    table: jax.Array,
    position: jax.Array,
    last_key: jax.Array,
    *,
    chunk_keys: int,
    follow_lengths: bool,
    window: int | None,
    soft_cap: float | None,
    slopes: jax.Array | None,
    relative: jax.Array | None,
    sinks: jax.Array | None,
    n_values: int,
) -> jax.Array:
    """Running softmax of I tiles at once over chunks of C keys.

    queries [I, K, G, Q, D], scaled, at `position` [I, Q]; table [I, max_blocks]; last_key [I, Q]: the last
    key that each query sees, -1 for none. Returns [I, K, G, Q, n_values] float32, with zeros for a query that
    sees nothing.
    """
    n_tiles, n_kv_heads, per_head, n_queries, head_size = queries.shape
    block_size = cache.keys.shape[2]
    queries = queries.reshape(n_tiles, n_kv_heads, per_head * n_queries, head_size)
    blocks = max(1, min(chunk_keys // block_size, table.shape[1]))
    chunk = blocks * block_size
    n_chunks = -(-table.shape[1] // blocks)
    n_seen = last_key.max(axis=1) + 1  # [I] keys up to the last that any query of the tile sees
    first_block, n_reached = jnp.zeros((), jnp.int32), n_seen  # keys from the first block to the last seen
    if window is None:
        table = jnp.pad(table, ((0, 0), (0, n_chunks * blocks - table.shape[1])))
    else:
        # Each tile's chunks begin at the first block that any of its queries sees.
        first_seen = jnp.where(last_key >= 0, last_key, jnp.iinfo(jnp.int32).max).min(axis=1) - window + 1
        first_block = jnp.where(n_seen > 0, jnp.maximum(first_seen, 0) // block_size, 0)[:, None]  # [I, 1]
        n_reached = n_seen - first_block[:, 0] * block_size
        most_blocks = -(-(window + n_queries - 2) // block_size) + 1
        n_chunks = min(n_chunks, -(-most_blocks // blocks))
    last_key = jnp.tile(last_key, (1, per_head))[:, None, :, None]  # [I, 1, G * Q, 1]

    def by_query_of(heads: jax.Array) -> jax.Array:
        """A number of each head [G, K] for each query, [1, K, G * Q]."""
        return heads.T.repeat(n_queries, axis=1)[None]

    slope = None if slopes is None else by_query_of(slopes)[..., None]

    def fetch(pool: jax.Array, ids: jax.Array) -> jax.Array:
        """Blocks `ids` [I, blocks] of [n_blocks, K, B, D] as [I, K, C, D]."""
        found = as_numbers(pool.at[ids].get(mode="clip"))  # [I, blocks, K, B, D]
        return found.swapaxes(1, 2).reshape(n_tiles, n_kv_heads, chunk, head_size)

    def step(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, sums = carry
        key = j * chunk + jnp.arange(chunk, dtype=jnp.int32)
        if window is None:
            ids = lax.dynamic_slice_in_dim(table, j * blocks, blocks, axis=1)
        else:
            columns = first_block + j * blocks + jnp.arange(blocks, dtype=jnp.int32)
            ids = jnp.take_along_axis(table, columns, axis=1, mode="clip")
            key = first_block * block_size + key  # [I, C]
        by_query = key if window is None else key[:, None, None]
        keys = fetch(cache.keys, ids)
        scores = jnp.einsum("ikqd,ikcd->ikqc", queries, keys, preferred_element_type=jnp.float32)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        if slope is not None:
            scores = scores + slope * (by_query - last_key)
        if relative is not None:
            furthest = relative.shape[0] // 2
            distance = jnp.clip(key[..., None, :] - position[:, :, None], -furthest, furthest)  # [I, Q, C]
            scores = scores + relative.T.at[:, distance + furthest].get(mode="clip").swapaxes(0, 1)
        seen = by_query <= last_key
        if window is not None:
            seen = seen & (by_query > last_key - window)
        scores = jnp.where(seen, scores, _NOTHING)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        shrink = jnp.exp(top - new_top)
        weights = jnp.exp(scores - new_top[..., None])
        # Slots after the row's last key may hold another row's inf or NaN, and 0 * NaN is NaN.
        there = (key < n_seen[:, None])[:, None, :, None]
        found = keys[..., :n_values] if cache.values is None else fetch(cache.values, ids)
        values = jnp.where(there, found, 0)
        weighted = jnp.einsum(
            "ikqc,ikcd->ikqd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
        )
        return new_top, total * shrink + weights.sum(axis=-1), sums * shrink[..., None] + weighted

    flat = queries.shape[:3]
    start = (
        jnp.full(flat, _NOTHING, jnp.float32)
        if sinks is None
        else jnp.broadcast_to(by_query_of(sinks), flat),
        jnp.full(flat, 0 if sinks is None else 1, jnp.float32),
        jnp.zeros((*flat, n_values), jnp.float32),
    )
    trips = -(-n_reached.max() // chunk) if follow_lengths else n_chunks
    _, total, sums = lax.fori_loop(0, trips, step, start)
    # A query that sees nothing has an equal weight on everything; its sums are not its own.
    attended = jnp.where(last_key >= 0, sums / jnp.maximum(total, 1e-30)[..., None], 0.0)
    return attended.reshape(n_tiles, n_kv_heads, per_head, n_queries, n_values)
