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
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

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
    q = lax.optimization_barrier(q)  # made once, in the layout of the call, not in parts for other readers
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    results = [
        _attend(
            q, k_cache, v_cache, entries, factor, window, sinks, call, in_order=work.place is None
        ).reshape(-1, *q.shape[1:])
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
    *,
    in_order: bool,
) -> jax.Array:
    """Attend from all entries' queries: [E, Q, G, K, D] in q's dtype; unused queries may hold anything."""
    n_blocks, block_size = k_cache.shape[0], k_cache.shape[2]
    queries = q[:, None] if in_order else q.at[entries.token].get(mode="clip")  # [E, Q, G, K, D]
    n_entries, n_queries, group, n_kv_heads, head_size = queries.shape
    # An entry without such a block asks for one key of any block, and its answer is ignored: so nothing
    # depends on what cuDNN does without a key.
    n_keys = jnp.maximum(entries.n_far * block_size, 1)
    by_kv_head = queries.reshape(n_entries, n_queries * group, n_kv_heads, head_size)
    far, far_log = call(
        by_kv_head, k_cache, v_cache, n_keys, entries.table.clip(0, n_blocks - 1), scale=scale
    )
    any_far = (entries.n_far > 0)[:, None, None, None, None]
    far = jnp.where(any_far, far.reshape(queries.shape).astype(jnp.float32), 0)
    far_log = far_log.swapaxes(1, 2).reshape(*queries.shape[:-1], 1)  # [E, Q, G, K, 1]
    far_log = jnp.where(any_far, far_log, _MASKED)
    logs = [far_log] if sinks is None else [far_log, jnp.broadcast_to(sinks[..., None], far_log.shape)]
    if n_queries == 1:
        out = _with_near_of_one(queries, k_cache, v_cache, entries, scale, window, far, logs)
    else:
        near, near_top, near_sum = _near(queries, k_cache, v_cache, entries, scale, window)
        top = reduce(jnp.maximum, logs, near_top)
        weights = [jnp.exp(log - top) for log in logs]
        near_weight = jnp.exp(near_top - top)
        out = (far * weights[0] + near * near_weight) / (sum(weights) + near_sum * near_weight)
    return out.astype(q.dtype)


def _with_near_of_one(
    queries: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    entries: Entries,
    scale: float,
    window: int | None,
    far: jax.Array,
    logs: list[jax.Array],
) -> jax.Array:
    """Attention of one query an entry to its near blocks and to what `far` [E, 1, G, K, D] has attended to.

    `logs` [E, 1, G, K, 1] are the logarithms of the sums of far's weights and of others without a value.
    Elementwise products and sums become three kernels. With matrix products it would be nine, which move the
    operands of 16 keys back and forth.
    """
    exists, seen = _near_keys(entries, 1, k_cache.shape[2], window)
    n_keys, n_logs = seen.shape[-1], len(logs)

    def fetched(cache: jax.Array) -> jax.Array:
        """Read [E, 1, 1, K, C + n, D] float32, with zeros in the places of the n logs."""
        near = jnp.pad(_fetched(cache, entries, exists), ((0, 0), (0, 0), (0, n_logs), (0, 0)))
        return near[:, None, None].astype(jnp.float32)

    wide = queries.astype(jnp.float32)[..., None, :]
    scores = scale * (wide * fetched(k_cache)).sum(axis=-1)  # [E, 1, G, K, C + n]
    scores = jnp.where(jnp.pad(seen, ((0, 0), (0, 0), (0, n_logs)))[:, :, None, None], scores, _MASKED)
    for i, log in enumerate(logs):
        scores = jnp.where(jnp.arange(n_keys + n_logs) == n_keys + i, log, scores)
    # The barrier keeps the softmax one kernel, and lets the last one read the blocks itself.
    shares = lax.optimization_barrier(jax.nn.softmax(scores, axis=-1))
    near = (shares[..., None] * fetched(v_cache)).sum(axis=-2)
    return far * shares[..., n_keys : n_keys + 1] + near


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
    exists, seen = _near_keys(entries, queries.shape[1], k_cache.shape[2], window)
    keys, values = (_fetched(cache, entries, exists) for cache in (k_cache, v_cache))

    def product(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)

    scores = scale * product("eqgkd,ekcd->eqgkc", queries, keys)
    scores = jnp.where(seen[:, :, None, None], scores, _MASKED)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    sums = product("eqgkc,ekcd->eqgkd", weights.astype(v_cache.dtype), values)
    return sums, top, weights.sum(axis=-1, keepdims=True)


def _near_keys(
    entries: Entries, n_queries: int, block_size: int, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Whether each slot of an entry's near blocks has a key [E, C], and whether a query sees it [E, Q, C]."""
    first_key = entries.near_key[..., None]
    key = (first_key + jnp.arange(block_size, dtype=jnp.int32)).reshape(len(first_key), -1)  # [E, C]
    exists = key < entries.length[:, None]
    position = entries.position[:, None] + jnp.arange(n_queries, dtype=jnp.int32)  # [E, Q]
    seen = exists[:, None] & (key[:, None] <= position[:, :, None])  # [E, Q, C]
    if window is not None:
        seen &= key[:, None] > position[:, :, None] - window
    return exists, seen


def _fetched(cache: jax.Array, entries: Entries, exists: jax.Array) -> jax.Array:
    """Read the near blocks: [E, K, C, D], with zeros for keys that the row does not have: 0 * NaN is NaN."""
    blocks = cache.at[entries.near].get(mode="clip").swapaxes(1, 2)
    in_order = blocks.reshape(len(exists), cache.shape[1], -1, cache.shape[-1])
    return jnp.where(exists[:, None, :, None], in_order, 0)
