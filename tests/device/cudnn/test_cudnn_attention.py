"""Split attention by cuDNN: a flat batch is mapped to calls, which a reference computes on the CPU.

No test here runs cuDNN itself, which needs a GPU.
"""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]

from orca_jax.cudnn.paged_attention import graph, refusal, unsupported
from orca_jax.cudnn.paged_attention_reference import paged_attention_reference
from orca_jax.cudnn.split_attention import attention_work, split_attention
from orca_jax.cudnn.tiles import QUERIES, TilePlan, tile_words
from orca_jax.pallas.split_attention_reference import split_attention_reference
from tests.device.model.ragged import Ragged, ragged
from tests.device.pallas.grouped import Scores, by_group, definition, forget

N_TOKENS, N_ROWS, MOST_KEYS = 160, 9, 200
ROW = st.one_of(
    st.integers(1, MOST_KEYS).map(lambda n: (1, n)),
    st.integers(2, 130).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, MOST_KEYS))),
)
PLAIN = Scores()
FORMS = (  # N, K, D, B
    ((4, 2, 8, 16), PLAIN),
    ((2, 2, 16, 4), Scores(window=3)),
    ((4, 2, 8, 16), Scores(scale=0.7, window=50)),
    ((4, 1, 8, 128), Scores(window=130)),
)


def strict(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    kv_length: jax.Array,
    table: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """The reference, with NaN everywhere if an entry asks for something that the call does not support.

    That is an entry without a key, or an id that is not a block, which `ragged` puts after a row's own.
    """
    out, log_sum = paged_attention_reference(q, k_cache, v_cache, kv_length, table, scale=scale)
    fine = (kv_length >= 1).all() & (table >= 0).all() & (table < len(k_cache)).all()
    return jnp.where(fine, out, jnp.nan), log_sum


@partial(jax.jit, static_argnames=("plan", "scale", "window"))
def traced(
    batch: Ragged,
    words: jax.Array,
    sinks: np.ndarray | None,
    plan: TilePlan,
    scale: float | None,
    window: int | None,
) -> jax.Array:
    q, k_cache, v_cache, table, row_start, kv_length = map(jnp.asarray, batch)
    work = attention_work(
        table, row_start, kv_length, words, plan=plan, block_size=k_cache.shape[2], window=window
    )
    fused = jnp.pad(q, ((0, 0), (0, 2), (0, 0), (0, 0)), constant_values=jnp.nan)
    options = {"group": q.shape[1], "scale": scale, "window": window, "sinks": sinks}
    return split_attention(fused, k_cache, v_cache, work, **options, call=strict)


reference = jax.jit(split_attention_reference, static_argnames=("scale", "window"))


def attended(
    batch: Ragged, scores: Scores = PLAIN, sinks: np.ndarray | None = None, *, one_each: bool = False
) -> np.ndarray:
    """Attend for a batch whose q is [T, G, K, D]: compute the host's words, then run the traced part."""
    plan = TilePlan(len(batch.q), len(batch.kv_length), one_each)
    words = tile_words(batch.row_start, plan)
    assert words.shape == (plan.n_words,) and words.dtype == np.int32
    return np.asarray(traced(batch, jnp.asarray(words), sinks, plan, scores.scale, scores.window))


def fitting(rows: list[tuple[int, int]], n_tokens: int) -> list[tuple[int, int]]:
    """The first rows that fit in the bucket."""
    taken: list[tuple[int, int]] = []
    for row in rows:
        if sum(n for n, _ in taken) + row[0] <= n_tokens:
            taken.append(row)
    return taken


@settings(max_examples=12)
@given(
    st.lists(ROW, min_size=1, max_size=N_ROWS),
    st.sampled_from(FORMS),
    st.integers(0, 2),
    st.integers(0, 2**31),
)
def test_it_equals_the_reference_on_ragged_batches(
    rows: list[tuple[int, int]], form: tuple[tuple[int, int, int, int], Scores], n_shared: int, seed: int
) -> None:
    (n_heads, n_kv_heads, head_size, block_size), scores = form
    rows = fitting(rows, N_TOKENS)
    max_blocks = -(-MOST_KEYS // block_size)
    batch = ragged(
        seed,
        rows,
        n_padding=N_TOKENS - sum(n for n, _ in rows),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_size=head_size,
        block_size=block_size,
        n_shared=n_shared,
        n_rows=N_ROWS,
        n_blocks=N_ROWS * max_blocks,
        max_blocks=max_blocks,
    )
    batch = batch._replace(q=by_group(batch.q, n_kv_heads))
    if scores.window is not None:
        batch = forget(batch, scores.window, block_size)
    expected = np.asarray(reference(*map(jnp.asarray, batch), scale=scores.scale, window=scores.window))
    np.testing.assert_allclose(attended(batch, scores), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("window", [None, 3, 50])
def test_sinks_join_the_sums_of_softmaxes(window: int | None) -> None:
    batch = ragged(3, [(1, 1), (1, 60), (QUERIES + 3, QUERIES + 40), (5, 5)], n_padding=2, n_kv_heads=2)
    batch = batch._replace(q=by_group(batch.q, 2))
    sinks = np.random.default_rng(4).normal(0, 5, batch.q.shape[1:3]).astype(np.float32)
    scores = Scores(window=window)
    expected = definition(batch, scores, sinks)
    assert np.abs(expected - definition(batch, scores)).max() > 0.5
    np.testing.assert_allclose(attended(batch, scores, sinks), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("window", [None, 3, 50])
def test_with_one_token_a_row_tokens_need_no_places(window: int | None, block_size: int) -> None:
    lengths = [1, 3, 16, 17, 31, 32, 60]
    batch = ragged(
        5, [(1, n) for n in lengths], n_padding=2, n_rows=9, n_heads=6, n_kv_heads=2, block_size=block_size
    )
    batch = batch._replace(q=by_group(batch.q, 2))
    scores = Scores(window=window)
    for sinks in (None, np.random.default_rng(6).normal(0, 5, batch.q.shape[1:3]).astype(np.float32)):
        expected = definition(batch, scores, sinks)
        got = attended(batch, scores, sinks, one_each=True)
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=2e-5)


def test_scores_far_apart_do_not_overflow() -> None:
    batch = ragged(8, [(1, 49), (1, 60), (QUERIES, QUERIES + 40), (5, 37)], n_padding=2)
    batch = batch._replace(q=60 * by_group(batch.q, 2))
    np.testing.assert_allclose(attended(batch), definition(batch, PLAIN), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("rows", "n_padding"),
    [
        ([(1, 1)], 0),
        ([(1, 17)], 0),  # one key after a whole block
        ([(2, 2)], 1),
        ([(QUERIES, QUERIES), (QUERIES + 1, QUERIES + 60), (1, 16), (1, 32)], 3),
    ],
)
def test_small_and_edge_batches_equal_the_definition(rows: list[tuple[int, int]], n_padding: int) -> None:
    batch = ragged(
        7, rows, n_padding=n_padding, n_rows=min(len(rows) + 1, sum(n for n, _ in rows) + n_padding)
    )
    batch = batch._replace(q=by_group(batch.q, 2))
    np.testing.assert_allclose(attended(batch), definition(batch, PLAIN), atol=2e-5, rtol=2e-5)


def test_the_entries_of_a_batch_worked_by_hand() -> None:
    # Blocks of 4 slots. Row 0 has one token and 9 keys; row 1 has 70 tokens, after 6; row 2 is padding.
    table = np.array([[5, 8, 3, 0, 0], [7, 1, 2, 4, 6], [0, 0, 0, 0, 0]], np.int32)
    row_start, kv_length = np.array([0, 1, 71, 71], np.int32), np.array([9, 76, 0], np.int32)
    plan = TilePlan(80, 3)
    words = tile_words(row_start, plan)
    worked = jax.jit(attention_work, static_argnames=("plan", "block_size", "window"))
    work = worked(table, row_start, kv_length, words, plan=plan, block_size=4)
    single, tiles = work.single, work.tiles
    assert tiles is not None
    # Row 0's query is at position 8, in its third block: cuDNN gets the first two, and no block of another
    # row.
    assert single.n_far[0] == 2 and single.table[0].tolist() == [5, 8, 5, 5, 5]
    assert single.near[0].tolist() == [3] and single.near_key[0].tolist() == [8]
    # Row 1's tiles begin at positions 6 and 70, in the blocks 1 and 17. 80 tokens of 3 rows have up to 4
    # tiles.
    assert tiles.token[:2, 0].tolist() == [1, 65] and tiles.position.tolist()[:2] == [6, 70]
    assert tiles.n_far.tolist() == [1, 17, 0, 0] and tiles.length.tolist() == [76, 76, 0, 0]
    assert tiles.table[0].tolist() == [7] * 5 and tiles.near[0, :2].tolist() == [1, 2]
    # Results: three single ones, then 64 for each tile.
    assert work.place[:2].tolist() == [0, 3] and work.place[70] == 3 + 69
    assert set(work.place[71:].tolist()) == {3 + 4 * QUERIES}

    # With a window of 6 row 0 sees the keys 3 to 8: its first block in part, its second whole.
    single = worked(table, row_start, kv_length, words, plan=plan, block_size=4, window=6).single
    assert single.n_far[0] == 1 and single.table[0].tolist() == [8] * 5
    assert single.near[0].tolist() == [5, 3] and single.near_key[0].tolist() == [0, 8]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=40), st.integers(0, 70))
def test_no_two_tokens_share_a_place(inputs: list[int], n_padding: int) -> None:
    row_start = np.cumsum([0, *inputs]).astype(np.int32)
    n_tokens = int(row_start[-1]) + n_padding
    if n_tokens == 0:
        return
    plan = TilePlan(n_tokens, len(inputs))
    words = tile_words(row_start, plan)
    tile_row, tile_start, place = plan.split(words)
    assert len(words) == plan.n_words
    nowhere = plan.n_rows + plan.n_tiles * plan.queries
    assert (place[row_start[-1] :] == nowhere).all()
    for token in range(row_start[-1]):
        row = int(np.searchsorted(row_start, token, side="right")) - 1
        if inputs[row] == 1:
            assert place[token] == row
        else:
            tile, query = divmod(int(place[token]) - plan.n_rows, plan.queries)
            assert tile_row[tile] == row and tile_start[tile] + query == token


def test_the_reference_of_the_call_computes_attention_and_reads_whole_tables() -> None:
    rng = np.random.default_rng(4)
    q = rng.standard_normal((2, 3, 4, 8)).astype(np.float32)
    caches = rng.standard_normal((2, 5, 2, 4, 8)).astype(np.float32)
    kv_length, table = np.array([7, 4], np.int32), np.array([[2, 0], [4, 1]], np.int32)
    attended = jax.jit(partial(paged_attention_reference, scale=0.3))
    out, log_sum = attended(q, *caches, kv_length, table)
    for entry, length in enumerate(kv_length):
        keys, values = (
            caches[:, table[entry]].swapaxes(2, 3).reshape(2, 8, 2, 8)[:, :length].repeat(2, axis=2)
        )
        scores = 0.3 * np.einsum("qnd,cnd->nqc", q[entry], keys)
        weights = np.exp(scores)
        expected = np.einsum("nqc,cnd->qnd", weights / weights.sum(-1, keepdims=True), values)
        np.testing.assert_allclose(out[entry], expected, atol=1e-5)
        np.testing.assert_allclose(log_sum[entry], np.log(weights.sum(-1)), atol=1e-5)
    caches[1, 1] = np.nan  # after the second entry's keys
    out, _ = attended(q, *caches, kv_length, table)
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()


@pytest.mark.parametrize(("dtype", "n_queries"), [("bfloat16", 64), ("float16", 1)])
def test_xla_gets_the_text_that_jaxs_own_attention_sends(dtype: str, n_queries: int) -> None:
    with mlir.make_ir_context(), ir.Location.unknown():
        element = {"bfloat16": ir.BF16Type, "float16": ir.F16Type}[dtype].get()
        theirs = jax_cudnn.create_dot_product_attention_backend_config(
            8, 40, n_queries, 2048, element, 0.125, 42, 0.0, jax_cudnn.MaskType.PADDING,
            jax_cudnn.AttentionLayout.BNTH.value, None, 1, True, False,
        )  # fmt: skip
    assert json.loads(graph(jnp.dtype(dtype), 8, 40, n_queries, 2048, 0.125)) == json.loads(theirs)


def test_unsupported_sizes_are_refused_with_a_reason() -> None:
    assert unsupported(128, 16, "bfloat16", 8, 8) is None
    for sizes, reason in {
        (100, 16, "bfloat16", 8, 8): "head size is 100",
        (264, 16, "bfloat16", 8, 8): "up to 256",
        (128, 24, "bfloat16", 8, 8): "powers of two",
        (128, 16, "float32", 8, 8): "float32",
        (128, 16, "float16", 8, 3): "8 heads are not a multiple of its 3",
    }.items():
        assert reason in str(unsupported(*sizes))


def test_a_device_without_the_call_refuses() -> None:
    reason = refusal(jax.devices("cpu")[0], 64, 16, "bfloat16", 4, 4)
    assert reason is not None and "__cudnn$fmhaSoftmax" in reason
