"""Split attention over the K/V blocks, in pure JAX (ORCA 3.2: the one operation that is not batched).

Every request attends to its own keys and values, which lie in the blocks that the block table names. Two
loops share the work by phase: increment rows (one query token) go in groups, longest contexts side by side;
initiation rows (several) go in tiles of query tokens. Inside, both walk over the keys a chunk of blocks at
a time with a running softmax, so that no dense [T, context] array ever exists.

With `follow_lengths` the trip counts are the real lengths': right for the CPU, where a loop costs what it
does. Without it they are fixed by the shapes: a GPU's host would have to read a run-time trip count back at
each trip and so block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from orca_jax.model.kv_cache import LayerCache

# Measured on two cores: enough keys a trip to bury its overhead, few enough to stay in a near cache.
_CHUNK_KEYS = 64
_GROUP_ROWS = 8
_TILE_QUERIES = 64
_TILE_CHUNK_KEYS = 128
_NOTHING = -1e30  # the score of a key that is not there; finite, so that no inf - inf arises


class AttentionWork(NamedTuple):
    """What each loop does, made once per iteration and used by every layer. All int32."""

    group_rows: jax.Array  # [n_groups, _GROUP_ROWS] increment rows, longest first; R where there is none
    n_groups: jax.Array  # [] groups with a row in them
    tile_row: jax.Array  # [n_tiles] row of each tile of query tokens
    tile_start: jax.Array  # [n_tiles] index of its first token
    n_tiles: jax.Array  # []
    input_length: jax.Array  # [R] query tokens of each row


def attention_work(row_start: jax.Array, kv_length: jax.Array, n_tokens: int) -> AttentionWork:
    """Share out the rows: `row_start` [R + 1], `kv_length` [R], of a bucket of `n_tokens`."""
    n_rows = kv_length.shape[0]
    input_length = jnp.diff(row_start)
    single = input_length == 1

    order = jnp.argsort(jnp.where(single, -kv_length, 1)).astype(jnp.int32)
    width = min(_GROUP_ROWS, n_rows)
    n_groups = -(-n_rows // width)
    rows = (
        jnp.full(n_groups * width, n_rows, jnp.int32).at[:n_rows].set(jnp.where(single[order], order, n_rows))
    )

    queries = min(_TILE_QUERIES, n_tokens)
    tiles_of_row = jnp.where(single, 0, -(-input_length // queries))
    tiles_before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(tiles_of_row)])
    # Each row with tiles has two tokens or more, and at most one tile that is not full.
    most_tiles = max(1, n_tokens // queries + min(n_rows, n_tokens // 2))
    tile = jnp.arange(most_tiles, dtype=jnp.int32)
    tile_row = jnp.clip(jnp.searchsorted(tiles_before, tile, side="right") - 1, 0, n_rows - 1)
    return AttentionWork(
        group_rows=rows.reshape(n_groups, width),
        n_groups=-(-single.sum(dtype=jnp.int32) // width),
        tile_row=tile_row.astype(jnp.int32),
        tile_start=row_start[tile_row] + (tile - tiles_before[tile_row]) * queries,
        n_tiles=tiles_before[-1],
        input_length=input_length,
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
) -> jax.Array:
    """Causal attention of each request's query tokens to its own keys.

    q [T, N, D]; cache blocks [n_blocks, K, B, D] with N a multiple of K; block_table [R, max_blocks],
    row_start [R + 1] and kv_length [R] int32. A row's queries are the last positions of its `kv_length`.
    Sums and softmax are float32; the result [T, N, D] has q's dtype, and padding tokens get zeros.
    """
    n_tokens, _, head_size = q.shape
    n_groups = work.n_groups if follow_lengths else work.group_rows.shape[0]
    n_tiles = work.n_tiles if follow_lengths else work.tile_row.shape[0]
    scaled = (q.astype(jnp.float32) * head_size**-0.5).astype(q.dtype)

    def group(i: jax.Array, out: jax.Array) -> jax.Array:
        rows = work.group_rows[i]  # [G]
        there = rows < kv_length.shape[0]
        table = block_table.at[rows].get(mode="clip")  # [G, max_blocks]
        length = jnp.where(there, kv_length.at[rows].get(mode="clip"), 0)
        token = jnp.where(there, row_start.at[rows].get(mode="clip"), n_tokens)
        queries = scaled.at[token].get(mode="clip")[:, :, None, :]  # [G, N, 1, D]
        attended = _attend(
            queries, cache, table, length - 1, length, chunk_keys=_CHUNK_KEYS, follow_lengths=follow_lengths
        )
        return out.at[token].set(attended[:, :, 0].astype(out.dtype), mode="drop")

    def tile(i: jax.Array, out: jax.Array) -> jax.Array:
        row, start = work.tile_row[i], work.tile_start[i]
        n_queries = min(_TILE_QUERIES, n_tokens)
        first = jnp.minimum(start, n_tokens - n_queries)  # the slice must lie inside
        index = first + jnp.arange(n_queries)
        mine = (index >= start) & (index < row_start[row + 1]) & (i < work.n_tiles)
        position = kv_length[row] - work.input_length[row] + index - row_start[row]  # [Q]
        seen = jnp.max(jnp.where(mine, position + 1, 0))
        queries = lax.dynamic_slice_in_dim(scaled, first, n_queries).transpose(1, 0, 2)[None]  # [1, N, Q, D]
        attended = _attend(
            queries,
            cache,
            block_table[row][None],
            position[None],
            seen[None],
            chunk_keys=_TILE_CHUNK_KEYS,
            follow_lengths=follow_lengths,
        )[0].transpose(1, 0, 2)
        before = lax.dynamic_slice_in_dim(out, first, n_queries)
        merged = jnp.where(mine[:, None, None], attended.astype(out.dtype), before)
        return lax.dynamic_update_slice_in_dim(out, merged, first, 0)

    out = lax.fori_loop(0, n_groups, group, jnp.zeros_like(q))
    if n_tokens == 1:  # one token cannot be an initiation of several
        return out
    return lax.fori_loop(0, n_tiles, tile, out)


def _attend(
    queries: jax.Array,
    cache: LayerCache,
    table: jax.Array,
    position: jax.Array,
    seen: jax.Array,
    *,
    chunk_keys: int,
    follow_lengths: bool,
) -> jax.Array:
    """Running softmax over the chunks of G rows at once.

    queries [G, N, Q, D], scaled; table [G, max_blocks]; position [G] or [G, Q] of each query; seen [G] keys
    that the row's queries reach at most. Returns [G, N, Q, D] float32; zeros where nothing is seen.
    """
    n_rows, n_heads, n_queries, head_size = queries.shape
    n_kv_heads, block_size = cache.keys.shape[1:3]
    per_head = n_heads // n_kv_heads
    queries = queries.reshape(n_rows, n_kv_heads, per_head * n_queries, head_size)
    blocks = max(1, min(chunk_keys // block_size, table.shape[1]))
    chunk = blocks * block_size
    n_chunks = -(-table.shape[1] // blocks)
    table = jnp.pad(table, ((0, 0), (0, n_chunks * blocks - table.shape[1])))
    last_key = jnp.minimum(position.reshape(n_rows, n_queries), seen[:, None] - 1)
    last_key = jnp.tile(last_key, (1, per_head))[:, None, :, None]  # [G, 1, per_head * Q, 1]

    def fetch(pool: jax.Array, ids: jax.Array) -> jax.Array:
        """Blocks `ids` [G, blocks] of [n_blocks, K, B, D] as [G, K, C, D]."""
        found = pool.at[ids].get(mode="clip")  # [G, blocks, K, B, D]
        return found.swapaxes(1, 2).reshape(n_rows, n_kv_heads, chunk, head_size)

    def step(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, sums = carry
        ids = lax.dynamic_slice_in_dim(table, j * blocks, blocks, axis=1)
        scores = jnp.einsum(
            "gkqd,gkcd->gkqc", queries, fetch(cache.keys, ids), preferred_element_type=jnp.float32
        )
        key = j * chunk + jnp.arange(chunk)
        scores = jnp.where(key <= last_key, scores, _NOTHING)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        shrink = jnp.exp(top - new_top)
        weights = jnp.exp(scores - new_top[..., None])
        # What others left in the slots behind the row's own may be inf or NaN, and 0 * NaN is NaN.
        values = jnp.where((key < seen[:, None])[:, None, :, None], fetch(cache.values, ids), 0)
        weighted = jnp.einsum(
            "gkqc,gkcd->gkqd",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return new_top, total * shrink + weights.sum(axis=-1), sums * shrink[..., None] + weighted

    flat = queries.shape[:3]
    start = (
        jnp.full(flat, _NOTHING, jnp.float32),
        jnp.zeros(flat, jnp.float32),
        jnp.zeros(queries.shape, jnp.float32),
    )
    trips = -(-jnp.max(seen) // chunk) if follow_lengths else n_chunks
    _, total, sums = lax.fori_loop(0, trips, step, start)
    safe = jnp.where(total > 0, total, 1.0)
    reached = last_key >= 0
    return jnp.where(reached, sums / safe[..., None], 0.0).reshape(n_rows, n_heads, n_queries, head_size)
