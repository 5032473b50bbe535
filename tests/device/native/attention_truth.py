"""Random batches for the native attention, and its result by definition, in float64."""

from typing import Any, NamedTuple

import numpy as np

from tests.device.model.ragged import Ragged, ragged

MOST_TOKENS = 96
MOST_ROWS = 12
MOST_KEYS = 256


class Form(NamedTuple):
    """A compiled program's sizes, and the form of its scores."""

    group: int
    n_kv_heads: int
    head_size: int
    block_size: int
    scale: float | None = None
    window: int | None = None
    chunked: bool = False
    soft_cap: float | None = None
    alibi: bool = False
    causal: bool = True
    furthest: int | None = None  # M of a relative bias
    with_sinks: bool = False

    def slopes(self) -> np.ndarray | None:
        """ALiBi's slopes [G, K]; one is 0."""
        if not self.alibi:
            return None
        slopes = 0.5 ** np.arange(self.group * self.n_kv_heads)
        slopes[-1] = 0
        return slopes.reshape(self.group, self.n_kv_heads).astype(np.float32)

    def relative(self) -> np.ndarray | None:
        """A relative bias [2 M + 1, K]."""
        if self.furthest is None:
            return None
        shape = (2 * self.furthest + 1, self.n_kv_heads)
        return np.random.default_rng(self.furthest).normal(size=shape).astype(np.float32)

    def first_seen(self, position: int) -> int:
        """The first key that a query at `position` sees."""
        if self.window is None:
            return 0
        return position // self.window * self.window if self.chunked else max(0, position + 1 - self.window)

    def sinks(self) -> np.ndarray | None:
        """Sinks [G, K]: one is far above all scores, one far below."""
        if not self.with_sinks:
            return None
        sinks = np.random.default_rng(self.group).normal(size=(self.group, self.n_kv_heads))
        sinks.flat[0], sinks.flat[-1] = 40, -90
        return sinks.astype(np.float32)

    def options(self) -> dict[str, Any]:
        """The keyword arguments of native_split_attention."""
        return {
            "scale": self.scale,
            "window": self.window,
            "chunked": self.chunked,
            "soft_cap": self.soft_cap,
            "slopes": self.slopes(),
            "causal": self.causal,
            "relative": self.relative(),
            "sinks": self.sinks(),
        }


def batch_of(rows: list[tuple[int, int]], form: Form, *, seed: int) -> Ragged:
    """A random batch, in one of few shapes since each is compiled; blocks outside the window hold NaN."""
    batch = ragged(
        seed,
        rows,
        n_padding=MOST_TOKENS - sum(n for n, _ in rows),
        n_heads=form.group * form.n_kv_heads,
        n_kv_heads=form.n_kv_heads,
        head_size=form.head_size,
        block_size=form.block_size,
        n_rows=MOST_ROWS,
        n_blocks=MOST_ROWS * MOST_KEYS // form.block_size,
        max_blocks=MOST_KEYS // form.block_size,
    )
    for (n, length), table in zip(rows, batch.block_table, strict=False):
        first_seen = form.first_seen(length - n)
        for cache in (batch.k_cache, batch.v_cache):
            cache[table[: first_seen // form.block_size]] = np.nan
    return batch._replace(q=batch.q.reshape(MOST_TOKENS, form.group, form.n_kv_heads, form.head_size))


def truth(batch: Ragged, form: Form) -> np.ndarray:
    """The result [T, G, K, D], query by query in float64."""
    out = np.zeros(batch.q.shape)
    scale = form.head_size**-0.5 if form.scale is None else form.scale
    slopes, relative, sinks = form.slopes(), form.relative(), form.sinks()
    for r, n_keys in enumerate(batch.kv_length):
        begin, end = batch.row_start[r], batch.row_start[r + 1]
        for token in range(begin, end):
            position = n_keys - end + token
            seen = np.arange(form.first_seen(position), position + 1)
            if not form.causal:
                seen = np.arange(n_keys)
            if not len(seen):
                continue
            blocks, slots = batch.block_table[r, seen // form.block_size], seen % form.block_size
            keys = batch.k_cache[blocks, :, slots].astype(np.float64)  # [P, K, D]
            values = batch.v_cache[blocks, :, slots].astype(np.float64)
            scores = scale * np.einsum("gkd,pkd->gkp", batch.q[token].astype(np.float64), keys)
            if form.soft_cap is not None:
                scores = form.soft_cap * np.tanh(scores / form.soft_cap)
            if slopes is not None:
                scores += slopes[:, :, None] * (seen - position)
            if relative is not None and form.furthest is not None:
                distance = np.clip(seen - position, -form.furthest, form.furthest)
                scores += relative[distance + form.furthest].T
            top = scores.max(axis=-1, keepdims=True)
            if sinks is not None:
                top = np.maximum(top, sinks[:, :, None])
            weights = np.exp(scores - top)
            total = weights.sum(axis=-1, keepdims=True)
            weights /= total if sinks is None else total + np.exp(sinks[:, :, None] - top)
            out[token] = np.einsum("gkp,pkd->gkd", weights, values)
    return out
