"""Attention in float64 on the host, and the errors of other results against it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """Attention's arguments in NumPy: q [T, G, K, D], caches [n_blocks, K, B, D], and int32 indices."""

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
    group: int,
    n_kv_heads: int,
    head_size: int,
    block_size: int,
    max_blocks: int,
    n_blocks: int,
    dtype: np.dtype,
) -> Batch:
    """Rows (query tokens, keys) over shuffled blocks; every second row shares blocks with the row before.

    Unused blocks and slots, and the padding's queries after the last row, are NaN. Unused entries of the
    block table are ids of random blocks. Values are rounded to `dtype`.
    """
    kv_length = np.array([n for _, n in rows], np.int32)
    row_start = np.concatenate([[0], np.cumsum([n for n, _ in rows])]).astype(np.int32)
    needed = -(-kv_length // block_size)
    assert needed.sum() <= n_blocks and needed.max() <= max_blocks and row_start[-1] <= n_tokens
    ids = iter(rng.permutation(n_blocks))
    table = rng.integers(0, n_blocks, (len(rows), max_blocks)).astype(np.int32)
    used = np.zeros((n_blocks, block_size), bool)
    for r, n in enumerate(needed):
        # Whole blocks of both: the slots after a row's end stay unused.
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
    q = rng.standard_normal((n_tokens, group, n_kv_heads, head_size), np.float32)
    q[row_start[-1] :] = np.nan
    return Batch(q.astype(dtype), caches[0], caches[1], table, row_start, kv_length)


def attend_float64(batch: Batch, *, window: int | None = None, soft_cap: float | None = None) -> np.ndarray:
    """The attention of every row, [T, G, K, D] float64; zeros for padding."""
    out = np.zeros(batch.q.shape)
    _, n_kv_heads, block_size, head_size = batch.k_cache.shape
    for r, n_keys in enumerate(batch.kv_length):
        begin, end = batch.row_start[r], batch.row_start[r + 1]
        if begin == end:
            continue
        blocks = batch.block_table[r, : -(-n_keys // block_size)]
        for k in range(n_kv_heads):
            keys, values = (
                pool[blocks, k].reshape(-1, head_size)[:n_keys] for pool in (batch.k_cache, batch.v_cache)
            )
            first = n_keys - (end - begin)
            queries = batch.q[begin:end, :, k]
            out[begin:end, :, k] = attend_row(
                queries, keys, values, first=first, window=window, soft_cap=soft_cap
            )
    return out


def attend_row(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    first: int,
    window: int | None = None,
    soft_cap: float | None = None,
) -> np.ndarray:
    """Queries [n, G, D] at positions `first` and on, over keys and values [L, D]: [n, G, D] float64."""
    scores = np.einsum("ngd,ld->ngl", queries.astype(np.float64), keys.astype(np.float64))
    scores /= np.sqrt(queries.shape[-1])
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    key, position = np.arange(len(keys)), first + np.arange(len(queries))[:, None]
    seen = (key <= position) & (key > position - (len(keys) if window is None else window))
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
