"""Split attention over the K/V blocks: whole blocks by cuDNN, the rest by XLA.

Through XLA, cuDNN's causal mask always begins at the first key, as if nothing were cached before the queries,
and so does a window; and cuDNN does not promise to ignore slots after an entry's last key. So cuDNN gets only
work without masks: for each tile of a row's queries, the blocks that every query of the tile sees whole.
These end before the block of the tile's first query and, with a window, begin after the first key that its
last query sees. XLA computes the keys before and after them, with masks, and with zeros for slots after the
row's last key. The two results are combined by the sums of their softmaxes.

Without a mask the G query heads of a key/value head can be G queries of one head, so cuDNN reads keys and
values once for all of them.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from orca_jax.cudnn.paged_attention import paged_attention
from orca_jax.cudnn.tiles import TilePlan

PagedAttention = Callable[..., tuple[jax.Array, jax.Array]]  # `paged_attention`, or its reference

_MASKED = -1e30  # a masked key's score; finite, so that inf - inf cannot arise


class Entries(NamedTuple):
    """Tiles of one size, each an entry: its queries, and the blocks that they attend to. All int32."""

    token: jax.Array  # [E, Q] index of each query; after a tile's last one it may be another row's
    position: jax.Array  # [E] position of the first query in its row
    length: jax.Array  # [E] the row's keys; 0 if the entry is unused
    n_far: jax.Array  # [E] number of blocks that cuDNN attends to
    table: jax.Array  # [E, max_blocks] cuDNN's blocks, filled up with the first one
    near: jax.Array  # [E, n] the blocks that XLA attends to
    near_key: jax.Array  # [E, n] position of each near block's first slot; past the row's keys if unused


class Work(NamedTuple):
    """One iteration's entries, made once for all layers with the same window."""

    single: Entries  # one for each row; used for rows of one token
    tiles: Entries | None
    place: jax.Array | None  # [T] each token's index in the results of both; None: the same as its row's


def attention_work(
    block_table: jax.Array,
    row_start: jax.Array,
    kv_length: jax.Array,
    words: jax.Array,
    *,
    plan: TilePlan,
    block_size: int,
    window: int | None = None,
) -> Work:
    """The entries of block_table [R, max_blocks], row_start [R + 1], kv_length [R] and `words`, all int32.

    `words` are `tile_words` of the same rows and `plan`. With `window` a query sees its own position and the
    window - 1 before it.
    """

    def entries(row: jax.Array, start: jax.Array, n_queries: int) -> Entries:
        length = kv_length.at[row].get(mode="fill", fill_value=0)
        position = length - row_start.at[row + 1].get(mode="fill", fill_value=0) + start
        position = jnp.where(length > 0, position, 0)
        table = block_table.at[row].get(mode="clip")
        max_blocks = table.shape[1]
        column = jnp.arange(max_blocks, dtype=jnp.int32)
        # The most blocks that Q adjacent keys can be in.
        n_around = min((block_size + n_queries - 2) // block_size + 1, max_blocks)
        own_block = position // block_size
        near = own_block[:, None] + column[:n_around]
        if window is None:
            far = jnp.zeros_like(own_block)
        else:
            # The block of the first query's first key, and the first block that the last query sees whole.
            first = jnp.maximum(position - window + 1, 0) // block_size
            far = -(-jnp.maximum(position + n_queries - window, 0) // block_size)
            far = jnp.clip(far, first, own_block)
            edge = first[:, None] + column[:n_around]
            near = jnp.concatenate([jnp.where(edge < far[:, None], edge, max_blocks), near], axis=1)
        n_far = own_block - far
        wanted = far[:, None] + jnp.where(column < n_far[:, None], column, 0)
        return Entries(
            token=start[:, None] + jnp.arange(n_queries, dtype=jnp.int32),
            position=position,
            length=length,
            n_far=n_far,
            table=jnp.take_along_axis(table, wanted, axis=1, mode="clip"),
            near=jnp.take_along_axis(table, near, axis=1, mode="clip"),
            near_key=near * block_size,
        )

    tile_row, tile_start, place = plan.split(words)
    single = entries(jnp.arange(plan.n_rows, dtype=jnp.int32), row_start[:-1], 1)
    tiles = entries(tile_row, tile_start, plan.queries) if plan.n_tiles else None
    return Work(single, tiles, None if plan.one_each else place)


def split_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    work: Work,
    *,
    group: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    call: PagedAttention = paged_attention,
) -> jax.Array:
    """Causal attention of each request's query tokens to its own keys (ORCA 3.2).

    q [T, n, K, D]: its first `group` slices (G; by default all n) are the queries. Query head [g, k] uses
    key/value head k. k_cache, v_cache [n_blocks, K, B, D]; `work` is `attention_work` of the batch with the
    same `window`. `scale` is by default D ** -0.5; `sinks` [G, K] float32 are scores of one more key per
    head, which has no value. Returns [T, G, K, D] in q's dtype, with zeros for padding tokens. Slots that no
    query of a row sees never affect its result, even if they hold NaN. `call` is the reference on a CPU.
    """
    q = q if group is None else q[:, :group]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    results = [
        _attend(q, k_cache, v_cache, entries, factor, window, sinks, call).reshape(-1, *q.shape[1:])
        for entries in (work.single, work.tiles)
        if entries is not None
    ]
    if work.place is None:
        return results[0]  # rows without a token have no near key, and so zeros
    return jnp.concatenate(results).at[work.place].get(mode="fill", fill_value=0)


def _attend(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    entries: Entries,
    scale: float,
    window: int | None,
    sinks: jax.Array | None,
    call: PagedAttention,
) -> jax.Array:
    """Attend from all entries' queries: [E, Q, G, K, D] in q's dtype; unused queries may hold anything."""
    n_blocks, block_size = k_cache.shape[0], k_cache.shape[2]
    queries = q.at[entries.token].get(mode="clip")  # [E, Q, G, K, D]
    n_entries, n_queries, group, n_kv_heads, head_size = queries.shape
    # An entry without such a block asks for one key of any block, and its answer is ignored: so nothing
    # depends on what cuDNN does without a key.
    n_keys = jnp.maximum(entries.n_far * block_size, 1)
    by_kv_head = queries.reshape(n_entries, n_queries * group, n_kv_heads, head_size)
    far, far_log = call(
        by_kv_head, k_cache, v_cache, n_keys, entries.table.clip(0, n_blocks - 1), scale=scale
    )
    near, near_top, near_sum = _near(queries, k_cache, v_cache, entries, scale, window)
    any_far = (entries.n_far > 0)[:, None, None, None, None]
    far = far.reshape(queries.shape)
    far_log = far_log.swapaxes(1, 2).reshape(*queries.shape[:-1], 1)  # [E, Q, G, K, 1]
    far_log = jnp.where(any_far, far_log, _MASKED)
    top = jnp.maximum(far_log, near_top)
    if sinks is not None:
        top = jnp.maximum(top, sinks[..., None])
    far_weight, near_weight = jnp.exp(far_log - top), jnp.exp(near_top - top)
    sums = jnp.where(any_far, far.astype(jnp.float32), 0) * far_weight + near * near_weight
    total = far_weight + near_sum * near_weight
    if sinks is not None:
        total = total + jnp.exp(sinks[..., None] - top)
    return (sums / total).astype(q.dtype)


def _near(
    queries: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    entries: Entries,
    scale: float,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of queries [E, Q, G, K, D] to the blocks around those that cuDNN attends to.

    Returns float32: the weighted sums of values [E, Q, G, K, D], the highest scores and the weights' sums,
    both [E, Q, G, K, 1].
    """
    n_entries, n_queries, _, n_kv_heads, head_size = queries.shape
    block_size = k_cache.shape[2]
    first_key = entries.near_key[..., None]
    key = (first_key + jnp.arange(block_size, dtype=jnp.int32)).reshape(n_entries, -1)  # [E, C]
    exists = key < entries.length[:, None]
    position = entries.position[:, None] + jnp.arange(n_queries, dtype=jnp.int32)  # [E, Q]
    seen = exists[:, None] & (key[:, None] <= position[:, :, None])  # [E, Q, C]
    if window is not None:
        seen &= key[:, None] > position[:, :, None] - window

    def fetch(cache: jax.Array) -> jax.Array:
        """Read [E, K, C, D], with zeros for keys that the row does not have: 0 * NaN is NaN."""
        blocks = cache.at[entries.near].get(mode="clip").swapaxes(1, 2)
        in_order = blocks.reshape(n_entries, n_kv_heads, -1, head_size)
        return jnp.where(exists[:, None, :, None], in_order, 0)

    def product(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)

    scores = scale * product("eqgkd,ekcd->eqgkc", queries, fetch(k_cache))
    scores = jnp.where(seen[:, :, None, None], scores, _MASKED)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    sums = product("eqgkc,ekcd->eqgkd", weights.astype(v_cache.dtype), fetch(v_cache))
    return sums, top, weights.sum(axis=-1, keepdims=True)
