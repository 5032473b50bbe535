"""Attention with grouped heads, windows and soft caps by definition: in float64, query by query."""

from typing import NamedTuple

import numpy as np

from tests.device.model.ragged import Ragged


class Scores(NamedTuple):
    """The options of scores, as keyword arguments of `split_attention`."""

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None


def by_group(q: np.ndarray, n_kv_heads: int) -> np.ndarray:
    """Reshape [T, N, D], in which a group's heads are adjacent, to [T, G, K, D]."""
    n_tokens, n_heads, head_size = q.shape
    return q.reshape(n_tokens, n_kv_heads, n_heads // n_kv_heads, head_size).swapaxes(1, 2)


def forget(batch: Ragged, window: int, block_size: int) -> Ragged:
    """Put NaN into the blocks that are outside the windows of all queries of a row."""
    table, n_blocks = batch.block_table.copy(), len(batch.k_cache)
    caches = [np.concatenate([cache, np.full_like(cache[:1], np.nan)]) for cache in batch[1:3]]
    first_query = batch.kv_length - np.diff(batch.row_start)
    for r, n in enumerate(np.maximum(first_query - window + 1, 0) // block_size):
        table[r, :n] = n_blocks
    return batch._replace(k_cache=caches[0], v_cache=caches[1], block_table=table)


def definition(batch: Ragged, scores: Scores, sinks: np.ndarray | None = None) -> np.ndarray:
    """The result [T, G, K, D] float64 for a batch whose q is [T, G, K, D]; zeros for padding.

    `sinks` [G, K] are scores that join the sums of the heads' softmaxes.
    """
    out = np.zeros(batch.q.shape)
    block_size, head_size = batch.k_cache.shape[2:]
    for r, n_keys in enumerate(batch.kv_length):
        begin, end = batch.row_start[r], batch.row_start[r + 1]
        for token in range(begin, end):
            position = n_keys - (end - begin) + (token - begin)
            first = 0 if scores.window is None else max(0, position - scores.window + 1)
            seen = np.arange(first, position + 1)
            at = batch.block_table[r, seen // block_size], slice(None), seen % block_size
            keys, values = (
                batch.k_cache[at].astype(np.float64),
                batch.v_cache[at].astype(np.float64),
            )  # [L, K, D]
            s = np.einsum("gkd,lkd->gkl", batch.q[token].astype(np.float64), keys)
            s *= head_size**-0.5 if scores.scale is None else scores.scale
            if scores.soft_cap is not None:
                s = scores.soft_cap * np.tanh(s / scores.soft_cap)
            weights = np.exp(s)
            total = weights.sum(axis=-1, keepdims=True)
            if sinks is not None:
                total += np.exp(sinks.astype(np.float64))[:, :, None]
            out[token] = np.einsum("gkl,lkd->gkd", weights / total, values)
    return out
