"""Split attention against a dense softmax per request in float64, over random ragged batches."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.model.attention import attention_work, split_attention
from orca_jax.model.kv_cache import LayerCache, as_numbers, dtype_on_cpu, write


@dataclass
class Ragged:
    """Requests as (query tokens, cached keys), and the sizes of the batch."""

    rows: list[tuple[int, int]]
    n_tokens: int
    n_rows: int
    n_kv_heads: int
    per_head: int
    head_size: int
    block_size: int
    seed: int
    scale: float | None = None
    window: int | None = None
    chunked: bool = False
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False

    def first_seen(self, position: int) -> int:
        """The first key that a query at `position` sees."""
        if self.window is None:
            return 0
        return position // self.window * self.window if self.chunked else max(0, position - self.window + 1)


MOST_KEYS = 256
SIZES = [(1, 2, 4, 8), (3, 1, 20, 16), (2, 2, 8, 128)]  # key/value heads, query heads of each, D, B


@st.composite
def ragged(draw: st.DrawFn) -> Ragged:
    n_tokens = draw(st.sampled_from([8, 160]))
    row = st.one_of(
        st.tuples(st.just(1), st.integers(0, MOST_KEYS - 1)),
        st.tuples(st.integers(2, n_tokens), st.sampled_from([0, 0, 1, 37])),
    )
    rows: list[tuple[int, int]] = []
    for n_queries, before in draw(st.lists(row, min_size=1, max_size=11)):
        if sum(n for n, _ in rows) + n_queries <= n_tokens:
            rows.append((n_queries, before))
    sizes = draw(st.sampled_from(SIZES))
    window = draw(st.sampled_from([None, None, 1, 3, 16, 50, 1000]))
    return Ragged(
        rows,
        n_tokens,
        min(n_tokens, 11),
        *sizes,
        seed=draw(st.integers(0, 2**31)),
        scale=draw(st.sampled_from([None, None, 0.4])),
        window=window,
        chunked=window is not None and draw(st.booleans()),
        soft_cap=draw(st.sampled_from([None, None, 2.0])),
        alibi=draw(st.sampled_from([False, False, True])),
        sinks=draw(st.booleans()),
    )


attend_jitted = jax.jit(
    split_attention, static_argnames=("follow_lengths", "scale", "window", "chunked", "soft_cap")
)
work_jitted = jax.jit(attention_work, static_argnums=2, static_argnames="follow_lengths")


def attend(case: Ragged, *, follow_lengths: bool, one_each: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(computed, expected), both [T, G, K, D]; every slot that no row may see holds NaN."""
    rng = np.random.default_rng(case.seed)
    n_real = sum(q for q, _ in case.rows)
    n_tokens, n_rows = case.n_tokens, case.n_rows
    lengths = [q + before for q, before in case.rows]
    blocks = [-(-length // case.block_size) for length in lengths]
    most_blocks = -(-MOST_KEYS // case.block_size)
    order = rng.permutation(n_rows * most_blocks + 1).astype(np.int32)
    table = np.full((n_rows, most_blocks), order[-1], np.int32)
    shape = (len(order), case.n_kv_heads, case.block_size, case.head_size)
    keys, values = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    shape = (n_tokens, case.per_head, case.n_kv_heads, case.head_size)
    q = rng.standard_normal(shape).astype(np.float32)
    slopes = rng.uniform(0, 0.5, shape[1:3]).astype(np.float32) if case.alibi else None
    sinks = rng.normal(0, 5, shape[1:3]).astype(np.float32) if case.sinks else None
    scale = 1 / np.sqrt(case.head_size) if case.scale is None else case.scale
    expected = np.zeros(q.shape)
    token = taken = 0
    for r, ((n_queries, before), n_blocks) in enumerate(zip(case.rows, blocks, strict=True)):
        table[r, :n_blocks] = order[taken : taken + n_blocks]
        taken += n_blocks
        length = n_queries + before
        own = rng.standard_normal((2, length, case.n_kv_heads, case.head_size)).astype(np.float32)
        for position in range(length):
            block, offset = table[r, position // case.block_size], position % case.block_size
            keys[block, :, offset], values[block, :, offset] = own[:, position]
        wide = own.astype(np.float64)
        for i in range(before, length):
            first = case.first_seen(i)
            seen = wide[:, first : i + 1]
            scores = scale * np.einsum("gkd,ckd->gkc", q[token].astype(np.float64), seen[0])
            if case.soft_cap is not None:
                scores = case.soft_cap * np.tanh(scores / case.soft_cap)
            if slopes is not None:
                scores += slopes[:, :, None] * (np.arange(first, i + 1) - i)
            weights = np.exp(scores)
            total = weights.sum(axis=2, keepdims=True)
            weights /= total if sinks is None else total + np.exp(sinks.astype(np.float64))[:, :, None]
            expected[token] = np.einsum("gkc,ckd->gkd", weights, seen[1])
            token += 1
        for block in range(case.first_seen(before) // case.block_size):
            table[r, block] = order[-1]  # no query sees it: not this row's any more
    row_start = np.full(n_rows + 1, n_real, np.int32)
    row_start[: len(case.rows) + 1] = np.cumsum([0] + [n for n, _ in case.rows])
    kv_length = np.zeros(n_rows, np.int32)
    kv_length[: len(case.rows)] = lengths
    work = None
    if not one_each:
        arrays = jnp.asarray(row_start), jnp.asarray(kv_length)
        work = work_jitted(*arrays, n_tokens, follow_lengths=follow_lengths)
    computed = attend_jitted(
        jnp.asarray(q),
        LayerCache(jnp.asarray(keys), jnp.asarray(values)),
        jnp.asarray(table),
        jnp.asarray(row_start),
        jnp.asarray(kv_length),
        work,
        follow_lengths=follow_lengths,
        scale=case.scale,
        window=case.window,
        chunked=case.chunked,
        soft_cap=case.soft_cap,
        slopes=None if slopes is None else jnp.asarray(slopes),
        sinks=None if sinks is None else jnp.asarray(sinks),
    )
    return np.asarray(computed), expected


@settings(max_examples=16)
@given(case=ragged(), follow_lengths=st.booleans())
def test_equals_a_dense_softmax_for_each_request(case: Ragged, follow_lengths: bool) -> None:
    computed, expected = attend(case, follow_lengths=follow_lengths)
    np.testing.assert_allclose(computed, expected, atol=2e-5, rtol=2e-5)


@settings(max_examples=12)
@given(case=ragged(), before=st.lists(st.integers(0, MOST_KEYS - 1), min_size=1, max_size=8))
def test_decode_without_tiles_equals_a_dense_softmax(case: Ragged, before: list[int]) -> None:
    """Each row is one token; the rows after the last are padding."""
    case = replace(case, rows=[(1, n) for n in before], n_tokens=8, n_rows=8)
    computed, expected = attend(case, follow_lengths=False, one_each=True)
    np.testing.assert_allclose(computed, expected, atol=2e-5, rtol=2e-5)
    assert not computed[len(before) :].any()


@pytest.mark.parametrize("follow_lengths", [True, False])
def test_full_tiles_and_groups_with_partial_ones(follow_lengths: bool) -> None:
    rows = [(1, 70)] * 9 + [(128, 0), (129, 3), (2, 0), (63, 64), (1, 0)]
    case = Ragged(rows, 340, 16, 2, 2, 8, 16, seed=5)
    computed, expected = attend(case, follow_lengths=follow_lengths)
    np.testing.assert_allclose(computed, expected, atol=2e-5, rtol=2e-5)


def test_the_work_of_an_iteration_worked_by_hand() -> None:
    # Rows: 3 tokens, 1 token at length 9, 150 tokens, 1 token at length 40, and padding.
    row_start = jnp.array([0, 3, 4, 154, 155, 155], jnp.int32)
    kv_length = jnp.array([3, 9, 150, 40, 0], jnp.int32)
    work = attention_work(row_start, kv_length, 160, follow_lengths=True)
    assert work.increment.n_trips == 1
    assert work.increment.row.tolist() == [[3, 1, 5, 5, 5]]  # the longer context first; 5 is no row
    assert work.increment.start[0, :2].tolist() == [154, 3]
    large, small = work.initiation  # tiles of 128 queries, and of 32 for what is left
    assert large.n_trips == 1
    assert large.row[:, 0].tolist() == [2, 5, 5, 5, 5, 5]
    assert large.start[0, 0] == 4
    assert small.n_trips == 1
    assert small.row[0].tolist() == [0, 2, 5, 5]
    assert small.start[0, :2].tolist() == [0, 132]
    (at_once,) = attention_work(row_start, kv_length, 160, follow_lengths=False).initiation  # tiles of 64
    assert at_once.row.tolist() == [[0, 2, 2, 2, 5, 5, 5]]


@pytest.mark.parametrize(
    ("n_queries", "n_large", "n_small"),
    [(2, 0, 1), (96, 0, 3), (97, 1, 0), (128, 1, 0), (129, 1, 1), (224, 1, 3), (225, 2, 0), (300, 2, 2)],
)
def test_small_tiles_take_what_would_leave_a_large_one_mostly_empty(
    n_queries: int, n_large: int, n_small: int
) -> None:
    row_start = jnp.array([0, n_queries, n_queries, n_queries], jnp.int32)
    kv_length = jnp.array([n_queries, 0, 0], jnp.int32)
    large, small = attention_work(row_start, kv_length, 320, follow_lengths=True).initiation
    assert ((large.row == 0).sum(), (small.row == 0).sum()) == (n_large, n_small)
    assert small.start.ravel()[:n_small].tolist() == [128 * n_large + 32 * i for i in range(n_small)]


def test_writing_to_the_cache_drops_padding_and_leaves_the_rest() -> None:
    empty = jnp.full((3, 2, 4, 5), -1.5)
    keys = jnp.arange(3 * 2 * 5, dtype=jnp.float32).reshape(3, 2, 5)
    cache = write(LayerCache(empty, empty), keys, -keys, jnp.array([6, 12, 1], jnp.int32))  # 12: nowhere
    expected = np.full((3, 2, 4, 5), -1.5)
    expected[1, :, 2], expected[0, :, 1] = keys[0], keys[2]
    np.testing.assert_array_equal(cache.keys, expected)
    np.testing.assert_array_equal(cache.values, np.where(expected == -1.5, -1.5, -expected))


def test_a_cpu_writes_bfloat16_without_converting_the_cache() -> None:
    """XLA's scatter of bfloat16 would make a float32 copy of each cache, whatever is written."""
    numbers = jax.random.normal(jax.random.key(0), (3, 2, 4, 16), jnp.bfloat16)
    stored = jax.lax.bitcast_convert_type(numbers, dtype_on_cpu(jnp.bfloat16))
    before = stored.copy()
    new = jax.random.normal(jax.random.key(1), (3, 2, 16), jnp.bfloat16)
    cache, slots = LayerCache(stored, before), jnp.array([6, 12, 1], jnp.int32)
    compiled = jax.jit(write, donate_argnums=0).lower(cache, new, new, slots).compile()
    assert "f32[" not in str(compiled.as_text())
    written = compiled(cache, new, -new, slots)
    expected = write(LayerCache(numbers, numbers), new, -new, slots)
    assert written.dtype == expected.dtype == jnp.bfloat16
    for found, wanted in zip(written.both, expected.both, strict=True):
        np.testing.assert_array_equal(as_numbers(found), wanted)
