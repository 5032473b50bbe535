"""Random ragged batches for attention: rows of every phase over shuffled blocks, with NaN in unused slots."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Ragged(NamedTuple):
    """Arguments of attention as numpy arrays: q [T, N, D], caches [n_blocks, K, B, D], and int32 indices."""

    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    block_table: np.ndarray  # [R, max_blocks]
    row_start: np.ndarray  # [R + 1]
    kv_length: np.ndarray  # [R]


def ragged(
    seed: int,
    rows: Sequence[tuple[int, int]],
    *,
    n_padding: int = 0,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    n_shared: int = 0,
    n_rows: int | None = None,
    n_blocks: int | None = None,
    max_blocks: int | None = None,
) -> Ragged:
    """A random batch of `rows`: (input length, length with cached tokens). Rows of length 0 are added last.

    A row shares up to `n_shared` whole blocks with the previous row. Unused blocks and slots, and queries of
    padding, are NaN; unused ids in the table are those of any block, or of none. The numbers of rows, blocks
    and table columns are as given, or a few more than needed.
    """
    rng = np.random.default_rng(seed)
    n_empty = 2 if n_rows is None else n_rows - len(rows)
    inputs = np.array([n for n, _ in rows] + [0] * n_empty)
    kv_length = np.array([n for _, n in rows] + [0] * n_empty, np.int32)
    row_start = np.concatenate([[0], np.cumsum(inputs)]).astype(np.int32)
    needed = -(-kv_length // block_size)
    n_blocks = int(needed.sum()) + 5 if n_blocks is None else n_blocks
    max_blocks = max(1, needed.max()) if max_blocks is None else max_blocks
    ids = rng.permutation(n_blocks)
    table = rng.integers(-2, n_blocks + 2, (len(kv_length), max_blocks)).astype(np.int32)
    caches = [np.full((n_blocks, n_kv_heads, block_size, head_size), np.nan, np.float32) for _ in "kv"]
    first = 0
    for r, n in enumerate(needed):
        mine = ids[first : first + n].copy()
        first += n
        if r > 0:
            n_same = min(n_shared, kv_length[r] // block_size, kv_length[r - 1] // block_size)
            mine[:n_same] = table[r - 1, :n_same]
        table[r, :n] = mine
        for cache in caches:
            for i, block in enumerate(mine):
                filled = cache[block, :, : kv_length[r] - i * block_size]
                new = rng.standard_normal(filled.shape)
                filled[...] = np.where(np.isnan(filled), new, filled)
    q = rng.standard_normal((int(row_start[-1]) + n_padding, n_heads, head_size)).astype(np.float32)
    q[row_start[-1] :] = np.nan
    k_cache, v_cache = caches
    return Ragged(q, k_cache, v_cache, table, row_start, kv_length)


def dense(batch: Ragged) -> np.ndarray:
    """Attention by definition, query by query in float64: [T, N, D]."""
    _, n_heads, head_size = batch.q.shape
    group = n_heads // batch.k_cache.shape[1]
    block_size = batch.k_cache.shape[2]
    out = np.zeros(batch.q.shape)
    for r, n_keys in enumerate(batch.kv_length):
        begin, end = batch.row_start[r], batch.row_start[r + 1]
        for token in range(begin, end):
            n_seen = n_keys - (end - begin) + (token - begin) + 1
            place = [(batch.block_table[r, p // block_size], p % block_size) for p in range(n_seen)]
            for head in range(n_heads):
                keys = np.array([batch.k_cache[b, head // group, i] for b, i in place], np.float64)
                values = np.array([batch.v_cache[b, head // group, i] for b, i in place], np.float64)
                scores = keys @ batch.q[token, head].astype(np.float64) / np.sqrt(head_size)
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ values / weights.sum()
    return out
