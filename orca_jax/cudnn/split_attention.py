"""Split attention over the K/V blocks: whole blocks by cuDNN, the rest by XLA.

The one causal mask that XLA can ask cuDNN for begins at the first key, as if nothing had been cached before
the queries. And cuDNN does not promise to leave alone what lies behind an entry's last key. So cuDNN gets
what needs neither: for each tile of a row's queries, all blocks before the one that its first query is in.
Every query of the tile sees all of their keys, and all of them are the row's own. XLA does the keys from
there on, a block for a row of one token and a few for a tile: masked causally, and without what others left
behind them. The two results are weighed by the sums of their softmaxes.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from orca_jax.cudnn.paged_attention import paged_attention
from orca_jax.cudnn.tiles import TilePlan

PagedAttention = Callable[..., tuple[jax.Array, jax.Array]]  # `paged_attention`, or its reference

_NOTHING = -1e30  # the score of a key that is not there; finite, so that no inf - inf arises


class Entries(NamedTuple):
    """Tiles of one size: for each entry where its queries are, and which blocks it attends to. All int32."""

    token: jax.Array  # [E, Q] index of each query; behind a tile's last it may be of another row
    position: jax.Array  # [E] of the first query in its row
    length: jax.Array  # [E] keys of its row; 0 where there is no row
    n_before: jax.Array  # [E] whole blocks before the one of the first query
    table: jax.Array  # [E, max_blocks] those, then the row's first block over again
    near: jax.Array  # [E, n] the blocks from there on


class Work(NamedTuple):
    """An iteration's, made once and used by every layer."""

    single: Entries  # a row each, for rows of one token
    tiles: Entries | None
    place: jax.Array  # [T] where each token's result is among both; their number for padding


def attention_work(
    block_table: jax.Array,
    row_start: jax.Array,
    kv_length: jax.Array,
    words: jax.Array,
    *,
    plan: TilePlan,
    block_size: int,
) -> Work:
    """From block_table [R, max_blocks], row_start [R + 1], kv_length [R] and `words`, all int32.

    `words` are `tile_words` of the same rows and `plan`.
    """

    def entries(row: jax.Array, start: jax.Array, n_queries: int) -> Entries:
        length = kv_length.at[row].get(mode="fill", fill_value=0)
        position = length - row_start.at[row + 1].get(mode="fill", fill_value=0) + start
        position = jnp.where(length > 0, position, 0)
        n_before = position // block_size
        table = block_table.at[row].get(mode="clip")
        column = jnp.arange(table.shape[1], dtype=jnp.int32)
        n_near = min((block_size + n_queries - 2) // block_size + 1, table.shape[1])
        near = n_before[:, None] + column[:n_near]
        return Entries(
            token=start[:, None] + jnp.arange(n_queries, dtype=jnp.int32),
            position=position,
            length=length,
            n_before=n_before,
            table=jnp.where(column < n_before[:, None], table, table[:, :1]),
            near=jnp.take_along_axis(table, near, axis=1, mode="clip"),
        )

    tile_row, tile_start, place = plan.split(words)
    single = entries(jnp.arange(plan.n_rows, dtype=jnp.int32), row_start[:-1], 1)
    return Work(single, entries(tile_row, tile_start, plan.queries) if plan.n_tiles else None, place)


def split_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    work: Work,
    *,
    call: PagedAttention = paged_attention,
) -> jax.Array:
    """Causal attention of each request's query tokens to its own keys (ORCA 3.2).

    q [T, N, D]; k_cache, v_cache [n_blocks, K, B, D] with N a multiple of K; `work` is `attention_work` of
    the batch. Softmax and sums are float32. Returns [T, N, D] of q's dtype, with zeros for padding tokens.
    What lies in slots of no row, or of other rows, never reaches a row's result, be it NaN. `call` is the
    reference on a CPU.
    """
    results = [
        _attend(q, k_cache, v_cache, entries, call).reshape(-1, *q.shape[1:])
        for entries in (work.single, work.tiles)
        if entries is not None
    ]
    return jnp.concatenate(results).at[work.place].get(mode="fill", fill_value=0)


def _attend(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, entries: Entries, call: PagedAttention
) -> jax.Array:
    """[E, Q, N, D] of q's dtype; anything at all for a query that is not there."""
    n_blocks, block_size = k_cache.shape[0], k_cache.shape[2]
    scale = q.shape[-1] ** -0.5
    queries = q.at[entries.token].get(mode="clip")  # [E, Q, N, D]
    # An entry without such a block asks for one key, whatever it is, and its answer is left out: so nothing
    # rests on what cuDNN does with no key at all.
    n_far = jnp.maximum(entries.n_before * block_size, 1)
    far, far_log = call(queries, k_cache, v_cache, n_far, entries.table.clip(0, n_blocks - 1), scale=scale)
    near, near_top, near_sum = _near(queries, k_cache, v_cache, entries, scale)
    any_far = (entries.n_before > 0)[:, None, None, None]
    far_log = jnp.where(any_far, far_log.swapaxes(1, 2)[..., None], _NOTHING)  # [E, Q, N, 1]
    top = jnp.maximum(far_log, near_top)
    far_weight, near_weight = jnp.exp(far_log - top), jnp.exp(near_top - top)
    sums = jnp.where(any_far, far.astype(jnp.float32), 0) * far_weight + near * near_weight
    return (sums / (far_weight + near_sum * near_weight)).astype(q.dtype)


def _near(
    queries: jax.Array, k_cache: jax.Array, v_cache: jax.Array, entries: Entries, scale: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [E, Q, N, D] and the keys from their own block on.

    Returns float32: the weighted sums of values [E, Q, N, D], the highest scores and the weights' sums, both
    [E, Q, N, 1].
    """
    n_entries, n_queries, n_heads, head_size = queries.shape
    n_kv_heads, block_size = k_cache.shape[1:3]
    grouped = queries.reshape(n_entries, n_queries, n_kv_heads, n_heads // n_kv_heads, head_size)
    key = entries.n_before[:, None] * block_size + jnp.arange(entries.near.shape[1] * block_size)  # [E, C]
    there = key < entries.length[:, None]
    position = entries.position[:, None] + jnp.arange(n_queries)  # [E, Q]
    seen = there[:, None] & (key[:, None] <= position[:, :, None])  # [E, Q, C]

    def fetch(cache: jax.Array) -> jax.Array:
        """[E, K, C, D], with zeros where the row has no key: 0 * NaN is NaN."""
        blocks = cache.at[entries.near].get(mode="clip").swapaxes(1, 2)
        in_order = blocks.reshape(n_entries, n_kv_heads, -1, head_size)
        return jnp.where(there[:, None, :, None], in_order, 0)

    def product(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)

    scores = scale * product("eqkgd,ekcd->eqkgc", grouped, fetch(k_cache))
    scores = jnp.where(seen[:, :, None, None], scores, _NOTHING)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    sums = product("eqkgc,ekcd->eqkgd", weights.astype(v_cache.dtype), fetch(v_cache))

    def by_head(x: jax.Array) -> jax.Array:
        return x.reshape(n_entries, n_queries, n_heads, -1)

    return by_head(sums), by_head(top), by_head(weights.sum(axis=-1, keepdims=True))
