"""Split attention over the K/V blocks, in pure JAX (ORCA 3.2: the one operation that is not batched).

Each request attends to its own keys and values, in the blocks that its block table names. The work is cut
into tiles of one row's query tokens: a decode row is a tile of one query, a prefill row is cut into large
tiles and, for the remainder, small ones. A tile visits its keys a chunk of blocks at a time with a running
softmax, so that no dense [T, context] array ever exists.

With `follow_lengths` a loop takes a few tiles at a time, and its trip counts follow the real lengths; that is
best on a CPU, where a trip costs no more than its work. Without it all tiles run at once, and trip counts are
fixed by the shapes: on a GPU the host would wait at each trip to read a run-time trip count.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from orca_jax.model.kv_cache import LayerCache, as_numbers, code_numbers

_MASKED = -1e30  # a masked key's score; finite, so that inf - inf cannot arise


@dataclass(frozen=True, slots=True)
class Tiling:
    """The sizes of one kind of tiles."""

    queries: int  # query tokens of a tile
    chunk_keys: int
    abreast: int  # tiles of one trip


class Tilings(NamedTuple):
    """The sizes for both phases (ORCA's words for decode and prefill)."""

    increment: Tiling
    initiation: tuple[Tiling, ...]  # largest first

    def within(self, n_tokens: int) -> "Tilings":
        """The tilings for a bucket of `n_tokens`: no tile has more queries than that."""
        # Of the tilings that would hold the whole bucket, only the smallest is needed.
        needed = self.initiation[sum(tiling.queries >= n_tokens for tiling in self.initiation[1:]) :]
        return Tilings(
            self.increment, tuple(replace(each, queries=min(each.queries, n_tokens)) for each in needed)
        )


_ALL = 1 << 30
_TILINGS = {
    # Following the lengths, measured on two cores: a trip does enough work to hide its overhead, and little
    # enough to stay in the first caches.
    True: Tilings(
        increment=Tiling(queries=1, chunk_keys=64, abreast=8),
        initiation=(
            Tiling(queries=128, chunk_keys=128, abreast=1),
            Tiling(queries=32, chunk_keys=64, abreast=4),
        ),
    ),
    # Static shapes: few trips with much work each. A chunk of all tiles is a temporary array.
    False: Tilings(
        increment=Tiling(queries=1, chunk_keys=512, abreast=_ALL),
        initiation=(Tiling(queries=64, chunk_keys=256, abreast=_ALL),),
    ),
}


def _tilings(n_tokens: int, *, follow_lengths: bool) -> Tilings:
    return _TILINGS[follow_lengths].within(n_tokens)


class Tiles(NamedTuple):
    """The tiles of one kind, `abreast` in each of the n trips; all int32."""

    row: jax.Array  # [n, abreast] the tile's row; R for no tile
    start: jax.Array  # [n, abreast] index of the tile's first token
    n_trips: jax.Array  # [] trips that have a tile


class AttentionWork(NamedTuple):
    """The tiles of an iteration, made once for all layers."""

    increment: Tiles
    initiation: tuple[Tiles, ...]  # by size, as in Tilings


def attention_work(
    row_start: jax.Array, kv_length: jax.Array, n_tokens: int, *, follow_lengths: bool
) -> AttentionWork:
    """Cut the rows into tiles: `row_start` [R + 1], `kv_length` [R] int32, of a bucket of `n_tokens`."""
    return tiles_of_rows(row_start, kv_length, n_tokens, _tilings(n_tokens, follow_lengths=follow_lengths))


def tiles_of_rows(
    row_start: jax.Array,
    kv_length: jax.Array,
    n_tokens: int,
    tilings: Tilings,
    only: jax.Array | None = None,
) -> AttentionWork:
    """Cut the rows, or `only` some [R] bool, into tiles of these sizes, which `within` has bounded."""
    n_rows = kv_length.shape[0]
    input_length = jnp.diff(row_start)
    if only is not None:
        input_length = jnp.where(only, input_length, 0)
    single = input_length == 1

    # Sorted by length, because the tiles of one trip take as long as the longest.
    order = jnp.argsort(jnp.where(single, -kv_length, 1)).astype(jnp.int32)
    increment_row = jnp.where(single[order], order, n_rows)
    increment_start = row_start[order]

    def trips(row: jax.Array, start: jax.Array, n: jax.Array, tiling: Tiling) -> Tiles:
        abreast = min(tiling.abreast, len(row))
        short = -len(row) % abreast
        row = jnp.pad(row, (0, short), constant_values=n_rows).reshape(-1, abreast)
        return Tiles(row, jnp.pad(start, (0, short)).reshape(-1, abreast), -(-n // abreast))

    initiation: list[Tiles] = []
    begin, left = row_start[:-1], jnp.where(single, 0, input_length)  # [R] tokens not in a tile yet
    for i, tiling in enumerate(tilings.initiation):
        queries = tiling.queries
        # The remainder goes into smaller tiles, unless these would fill a tile of this size.
        spare = queries if i + 1 == len(tilings.initiation) else tilings.initiation[i + 1].queries
        tiles_of_row = (left + spare - 1) // queries
        tiles_before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(tiles_of_row)])
        # Each row with tiles has at least two tokens, and at most one tile that is not full.
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
    work: AttentionWork | None,
    *,
    follow_lengths: bool,
    scale: float | None = None,
    window: int | None = None,
    chunked: bool = False,
    soft_cap: float | None = None,
    slopes: jax.Array | None = None,
    causal: bool = True,
    relative: jax.Array | None = None,
    sinks: jax.Array | None = None,
    value_size: int | None = None,
    positions: jax.Array | None = None,
) -> jax.Array:
    """Attention of each request's query tokens to its own keys, up to each query's position if `causal`.

    q [T, G, K, D]; cache blocks [n_blocks, K, B, D]; block_table [R, max_blocks], row_start [R + 1] and
    kv_length [R] int32. A row's queries are the last positions of its `kv_length`. `work` is `attention_work`
    of the same arrays and `follow_lengths`, or None if T is R and row r has token r alone. Sums and softmax
    are float32; the result [T, G, K, D] has q's dtype, with zeros for padding tokens and for rows without a
    key.

    A score is `scale` (by default D ** -0.5) times q.k; `soft_cap` c makes it c * tanh(score / c). Then ALiBi
    adds `slopes` [G, K] times (key position - query position), and a `relative` bias [2 M + 1, K] float32
    adds its row (key position - query position) + M, the first or the last row for keys further away; G is
    then 1. With a `window` a query sees its own position and the window - 1 before it, or if that is
    `chunked` those from the last multiple of the window on; blocks outside are not read. `sinks` [G, K]
    float32 are scores of one more key per head, which has no value. Without `causal` a query sees all keys of
    its row, which may be fewer than its queries, or with a window those up to window - 1 after it, and there
    are no slopes. `positions` [T] int32 are the queries' where these are not a row's last ones. In a cache
    without values a value is the first `value_size` elements of its key; the result has that size in place of
    D. In a cache of eight bits the codes are multiplied, and scores and weights by their scales.
    """
    n_tokens, n_groups, n_kv_heads, head_size = q.shape
    assert causal or (not chunked and slopes is None)
    assert relative is None or n_groups == 1
    assert (value_size is None) is (cache.values is not None)
    n_values = head_size if value_size is None else value_size
    # One axis for all heads, so that XLA lays the tiles out alike with one group and with several.
    heads = q.reshape(n_tokens, -1, head_size)  # [T, G * K, D]
    scaled = (heads.astype(jnp.float32) * (head_size**-0.5 if scale is None else scale)).astype(q.dtype)

    def attend_tiles(
        tile: jax.Array, table: jax.Array, position: jax.Array, last_key: jax.Array, tiling: Tiling
    ) -> jax.Array:
        """Attend from tiles [I, G * K, Q, D]: [I, Q, G * K, n_values]."""
        attended = _attend(
            tile.reshape(-1, n_groups, n_kv_heads, tiling.queries, head_size).swapaxes(1, 2),
            cache,
            table,
            position,
            last_key,
            chunk_keys=tiling.chunk_keys,
            follow_lengths=follow_lengths,
            window=window,
            both_sides=not causal,
            chunked=chunked,
            soft_cap=soft_cap,
            slopes=slopes,
            relative=relative,
            sinks=sinks,
            n_values=n_values,
        )
        attended = attended.swapaxes(1, 2).reshape(*tile.shape[:3], n_values)
        return attended.swapaxes(1, 2).astype(heads.dtype)

    tilings = _tilings(n_tokens, follow_lengths=follow_lengths)
    if work is None:
        last_key = kv_length[:, None] - 1  # of padding rows -1: they see none
        out = attend_tiles(scaled[:, :, None], block_table, last_key, last_key, tilings.increment)
        return out.reshape(*q.shape[:3], n_values)

    def attend(out: jax.Array, tiles: Tiles, tiling: Tiling) -> jax.Array:
        n_queries = tiling.queries

        def trip(i: jax.Array, out: jax.Array) -> jax.Array:
            row, start = tiles.row[i], tiles.start[i]  # [I]
            index = start[:, None] + jnp.arange(n_queries, dtype=jnp.int32)  # [I, Q]
            end = row_start.at[row + 1].get(mode="fill", fill_value=0)[:, None]
            in_row = index < end
            length = kv_length.at[row].get(mode="fill", fill_value=0)[:, None]
            position = length - end + index  # [I, Q] the query's position
            if positions is not None:
                position = positions.at[index].get(mode="clip")
            last = position if causal else length - 1
            if not causal and window is not None:
                last = jnp.minimum(last, position + window - 1)
            last_key = jnp.where(in_row, last, -1)  # [I, Q]
            tile = scaled.at[index].get(mode="clip").swapaxes(1, 2)  # [I, G * K, Q, D]
            attended = attend_tiles(tile, block_table.at[row].get(mode="clip"), position, last_key, tiling)
            where = jnp.where(in_row, index, n_tokens)
            return out.at[where].set(attended, mode="drop")

        return lax.fori_loop(0, tiles.n_trips if follow_lengths else len(tiles.row), trip, out)

    out = jnp.zeros((*heads.shape[:2], n_values), heads.dtype)
    out = attend(out, work.increment, tilings.increment)
    if n_tokens > 1:  # a bucket of one token has no row of several
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
    both_sides: bool,
    chunked: bool,
    soft_cap: float | None,
    slopes: jax.Array | None,
    relative: jax.Array | None,
    sinks: jax.Array | None,
    n_values: int,
) -> jax.Array:
    """Attention of I tiles at once, with a running softmax over chunks of C keys.

    queries [I, K, G, Q, D], scaled, at `position` [I, Q]; table [I, max_blocks]; last_key [I, Q]: the last
    key that each query sees, -1 for none. Returns [I, K, G, Q, n_values] float32, with zeros for a query that
    sees no key.
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
        first_seen = jnp.where(last_key >= 0, position, jnp.iinfo(jnp.int32).max).min(axis=1)
        first_seen -= first_seen % window if chunked else window - 1
        first_block = jnp.where(n_seen > 0, jnp.maximum(first_seen, 0) // block_size, 0)[:, None]  # [I, 1]
        n_reached = n_seen - first_block[:, 0] * block_size
        after = window - 1 if both_sides else 0
        most_blocks = -(-(window + n_queries - 2 + after) // block_size) + 1
        n_chunks = min(n_chunks, -(-most_blocks // blocks))
    last_key = jnp.tile(last_key, (1, per_head))[:, None, :, None]  # [I, 1, G * Q, 1]
    own_key = jnp.tile(position, (1, per_head))[:, None, :, None]  # the query's own, if it sees any

    def by_query_of(heads: jax.Array) -> jax.Array:
        """Repeat a number of each head [G, K] for each query: [1, K, G * Q]."""
        return heads.T.repeat(n_queries, axis=1)[None]

    slope = None if slopes is None else by_query_of(slopes)[..., None]

    def fetch(pool: jax.Array, ids: jax.Array) -> jax.Array:
        """Read blocks `ids` [I, blocks] of [n_blocks, K, B, D]: [I, K, C, D]."""
        found = pool.at[ids].get(mode="clip")  # [I, blocks, K, B, D]
        found = as_numbers(found) if cache.code is None else code_numbers(found, queries.dtype)
        return found.swapaxes(1, 2).reshape(n_tiles, n_kv_heads, chunk, head_size)

    def fetch_scales(pool: jax.Array, ids: jax.Array) -> jax.Array:
        """Read the scales of blocks `ids` [I, blocks] of [n_blocks, K, B]: [I, K, 1, C]."""
        found = pool.at[ids].get(mode="clip")
        return found.swapaxes(1, 2).reshape(n_tiles, n_kv_heads, 1, chunk)

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
        if cache.key_scales is not None:
            scores = scores * fetch_scales(cache.key_scales, ids)
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
            seen = seen & (by_query >= own_key - (own_key % window if chunked else window - 1))
        scores = jnp.where(seen, scores, _MASKED)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        shrink = jnp.exp(top - new_top)
        weights = jnp.exp(scores - new_top[..., None])
        # Slots after the row's last key may hold another row's inf or NaN, and 0 * NaN is NaN.
        exists = (key < n_seen[:, None])[:, None, :, None]
        found = keys[..., :n_values] if cache.values is None else fetch(cache.values, ids)
        values = jnp.where(exists, found, 0)
        factors = weights
        if cache.value_scales is not None:
            factors = weights * jnp.where(exists.swapaxes(2, 3), fetch_scales(cache.value_scales, ids), 0)
        weighted = jnp.einsum(
            "ikqc,ikcd->ikqd", factors.astype(values.dtype), values, preferred_element_type=jnp.float32
        )
        return new_top, total * shrink + weights.sum(axis=-1), sums * shrink[..., None] + weighted

    flat = queries.shape[:3]
    start = (
        jnp.full(flat, _MASKED, jnp.float32) if sinks is None else jnp.broadcast_to(by_query_of(sinks), flat),
        jnp.full(flat, 0 if sinks is None else 1, jnp.float32),
        jnp.zeros((*flat, n_values), jnp.float32),
    )
    trips = -(-n_reached.max() // chunk) if follow_lengths else n_chunks
    _, total, sums = lax.fori_loop(0, trips, step, start)
    # A query that sees no key has weighted all keys equally; its sums mean nothing.
    attended = jnp.where(last_key >= 0, sums / jnp.maximum(total, 1e-30)[..., None], 0.0)
    return attended.reshape(n_tiles, n_kv_heads, per_head, n_queries, n_values)
