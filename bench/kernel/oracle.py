"""Attention in float64 on the host, and errors relative to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """The arguments of attention as numpy arrays: q [T, N, D], caches [n_blocks, K, B, D], and int32 indices."""

    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    block_table: np.ndarray  # [R, max_blocks]
    row_start: np.ndarray  # [R + 1]
    kv_length: np.ndarray  # [R]


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of a result: |out - true| / |true| over the whole array, and the largest absolute difference."""

    relative: float
    largest: float


def random_batch(
    rng: np.random.Generator,
    rows: Sequence[tuple[int, int]],
    *,
    n_tokens: int,
    n_heads: int,
    n_kv_heads: int,
    head_size: int,
    block_size: int,
    max_blocks: int,
    n_blocks: int,
    dtype: np.dtype,
) -> Batch:
    """Rows (query tokens, keys) over shuffled blocks; every second row shares some with the previous row.

    Unused blocks and slots are NaN, and so are padding queries after the last row. Block ids after a row's
    own are valid but arbitrary. Random numbers are rounded to `dtype`.
    """
    kv_length = np.array([n for _, n in rows], np.int32)
    row_start = np.concatenate([[0], np.cumsum([n for n, _ in rows])]).astype(np.int32)
    needed = -(-kv_length // block_size)
    assert needed.sum() <= n_blocks and needed.max() <= max_blocks and row_start[-1] <= n_tokens
    ids = iter(rng.permutation(n_blocks))
    table = rng.integers(0, n_blocks, (len(rows), max_blocks)).astype(np.int32)
    used = np.zeros((n_blocks, block_size), bool)
    for r, n in enumerate(needed):
        # Only whole blocks of both rows are shared: slots after a row's end stay unused.
        n_same = min(kv_length[r], kv_length[r - 1]) // block_size if r % 2 else 0
        table[r, :n_same] = table[r - 1, :n_same]
        table[r, n_same:n] = [next(ids) for _ in range(n - n_same)]
        for i in range(n):
            used[table[r, i], : kv_length[r] - i * block_size] = True
    shape = (n_blocks, n_kv_heads, block_size, head_size)
    caches = [
        np.where(used[:, None, :, None], rng.standard_normal(shape, np.float32), np.nan).astype(dtype)
        for _ in "kv"
    ]
    q = rng.standard_normal((n_tokens, n_heads, head_size), np.float32)
    q[row_start[-1] :] = np.nan
    return Batch(q.astype(dtype), caches[0], caches[1], table, row_start, kv_length)


def attend_float64(batch: Batch) -> np.ndarray:
    """Attention of every row: [T, N, D] float64, with zeros for padding."""
    n_tokens, n_heads, head_size = batch.q.shape
    n_kv_heads, block_size = batch.k_cache.shape[1:3]
    out = np.zeros((n_tokens, n_heads, head_size))
    for r, n_keys in enumerate(batch.kv_length):
        begin, end = batch.row_start[r], batch.row_start[r + 1]
        if begin == end:
            continue
        blocks = batch.block_table[r, : -(-n_keys // block_size)]
        for k in range(n_kv_heads):
            mine = slice(k * n_heads // n_kv_heads, (k + 1) * n_heads // n_kv_heads)
            keys, values = (
                pool[blocks, k].reshape(-1, head_size)[:n_keys] for pool in (batch.k_cache, batch.v_cache)
            )
            first = n_keys - (end - begin)
            out[begin:end, mine] = attend_row(batch.q[begin:end, mine], keys, values, first=first)
    return out


def attend_row(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, *, first: int) -> np.ndarray:
    """Queries [n, G, D] at positions from `first` on, over keys and values [L, D]; returns [n, G, D] float64."""
    scores = np.einsum("ngd,ld->ngl", queries.astype(np.float64), keys.astype(np.float64))
    scores /= np.sqrt(queries.shape[-1])
    seen = np.arange(len(keys)) <= first + np.arange(len(queries))[:, None]
    scores = np.where(seen[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("ngl,ld->ngd", weights, values.astype(np.float64))


def errors(out: np.ndarray, true: np.ndarray) -> Errors:
    """The errors of `out` relative to `true`, of the same shape; infinite if a value is not finite."""
    difference = out.astype(np.float64) - true
    if not np.isfinite(difference).all():
        return Errors(float("inf"), float("inf"))
    norm = np.linalg.norm(true)
    return Errors(float(np.linalg.norm(difference) / norm), float(np.abs(difference).max()))
