"""Split attention by cuDNN: how a flat batch is mapped onto its calls. The CPU has a reference of the call.

What cuDNN itself does with such a call no test here sees: that needs one of the GPUs.
"""

import json
from functools import partial
from typing import Any

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
from orca_jax.cudnn.split_attention import attention_work
from orca_jax.cudnn.tiles import QUERIES, TilePlan, tile_words
from orca_jax.execution.attention_backend import Cudnn
from orca_jax.families.attention_config import Attention
from orca_jax.iteration.flat_batch import FlatArrays, FlatLayout
from orca_jax.model.kv_cache import LayerCache
from orca_jax.pallas.split_attention_reference import split_attention_reference
from tests.device.model.ragged import Ragged, dense, ragged

N_TOKENS, N_ROWS, MOST_KEYS = 160, 9, 200
ROW = st.one_of(
    st.integers(1, MOST_KEYS).map(lambda n: (1, n)),
    st.integers(2, 130).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, MOST_KEYS))),
)
SIZES = ((4, 2, 8, 16), (2, 2, 16, 4), (4, 1, 8, 128))  # N, K, D, B


def strict(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    kv_length: jax.Array,
    table: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """The reference, NaN in all entries where one asks for what the call does not have.

    That is an entry without a key, and an id that is no block, such as `ragged` has behind a row's own.
    """
    out, log_sum = paged_attention_reference(q, k_cache, v_cache, kv_length, table, scale=scale)
    fine = (kv_length >= 1).all() & (table >= 0).all() & (table < len(k_cache)).all()
    return jnp.where(fine, out, jnp.nan), log_sum


@partial(jax.jit, static_argnames=("path", "layout"))
def attend(batch: Ragged, words: jax.Array, path: Cudnn, layout: FlatLayout) -> jax.Array:
    q, k_cache, v_cache, block_table, row_start, kv_length = map(jnp.asarray, batch)
    arrays = flat_arrays(block_table, row_start, kv_length)
    # The path leaves the order of heads to cuDNN's mapping, which is tested with groups side by side.
    own = Attention(n_heads=q.shape[1], n_kv_heads=q.shape[1], head_size=q.shape[2])
    return path.bind(layout, arrays, words)(q[:, None], LayerCache(k_cache, v_cache), own, None)[:, 0]


def flat_arrays(block_table: Any, row_start: Any, kv_length: Any) -> FlatArrays:
    """The three parts that attention reads."""
    nothing = FlatArrays(*[None] * len(FlatArrays._fields))
    return nothing._replace(block_table=block_table, row_start=row_start, kv_length=kv_length)


reference = jax.jit(split_attention_reference)


def attended(batch: Ragged) -> np.ndarray:
    """By the path, as a stage runs it: what the host makes, then what is traced."""
    layout = FlatLayout(len(batch.q), *batch.block_table.shape)
    path = Cudnn(batch.k_cache.shape[2], call=strict)
    words = path.words(layout, flat_arrays(batch.block_table, batch.row_start, batch.kv_length))
    assert words.shape == (path.n_words(layout),) and words.dtype == np.int32
    return np.asarray(attend(batch, jnp.asarray(words), path, layout))


def fitting(rows: list[tuple[int, int]], n_tokens: int) -> list[tuple[int, int]]:
    """As many of the rows as fit into the bucket."""
    taken: list[tuple[int, int]] = []
    for row in rows:
        if sum(n for n, _ in taken) + row[0] <= n_tokens:
            taken.append(row)
    return taken


@settings(max_examples=25)
@given(
    st.lists(ROW, min_size=1, max_size=N_ROWS),
    st.sampled_from(SIZES),
    st.integers(0, 2),
    st.integers(0, 2**31),
)
def test_it_equals_the_reference_on_ragged_batches(
    rows: list[tuple[int, int]], size: tuple[int, int, int, int], n_shared: int, seed: int
) -> None:
    n_heads, n_kv_heads, head_size, block_size = size
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
    expected = np.asarray(reference(*map(jnp.asarray, batch)))
    np.testing.assert_allclose(attended(batch), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("rows", "n_padding"),
    [
        ([(1, 1)], 0),
        ([(1, 17)], 0),  # one key behind a whole block
        ([(2, 2)], 1),
        ([(QUERIES, QUERIES), (QUERIES + 1, QUERIES + 60), (1, 16), (1, 32)], 3),
    ],
)
def test_small_and_edge_batches_equal_the_definition(rows: list[tuple[int, int]], n_padding: int) -> None:
    batch = ragged(
        7, rows, n_padding=n_padding, n_rows=min(len(rows) + 1, sum(n for n, _ in rows) + n_padding)
    )
    np.testing.assert_allclose(attended(batch), dense(batch), atol=2e-5, rtol=2e-5)


def test_what_cudnn_is_asked_worked_by_hand() -> None:
    # Blocks of 4 slots. Row 0 has one token and 9 keys; row 1 has 70 tokens, behind 6; row 2 is padding.
    table = np.array([[5, 8, 3, 0, 0], [7, 1, 2, 4, 6], [0, 0, 0, 0, 0]], np.int32)
    row_start, kv_length = np.array([0, 1, 71, 71], np.int32), np.array([9, 76, 0], np.int32)
    plan = TilePlan(80, 3)
    words = tile_words(row_start, plan)
    worked = jax.jit(attention_work, static_argnames=("plan", "block_size"))
    work = worked(table, row_start, kv_length, words, plan=plan, block_size=4)
    single, tiles = work.single, work.tiles
    assert tiles is not None
    # Row 0's query is at position 8, in its third block: cuDNN has the first two, and then no other row's.
    assert single.n_before[0] == 2 and single.table[0].tolist() == [5, 8, 5, 5, 5]
    assert single.near[0].tolist() == [3]
    # Row 1's tiles begin at positions 6 and 70, in the blocks 1 and 17; three fit into 80 tokens of 3 rows.
    assert tiles.token[:2, 0].tolist() == [1, 65] and tiles.position.tolist()[:2] == [6, 70]
    assert tiles.n_before.tolist() == [1, 17, 0, 0] and tiles.length.tolist() == [76, 76, 0, 0]
    assert tiles.table[0].tolist() == [7] * 5 and tiles.near[0, :2].tolist() == [1, 2]
    # Results: three single ones, then 64 a tile.
    assert work.place[:2].tolist() == [0, 3] and work.place[70] == 3 + 69
    assert set(work.place[71:].tolist()) == {3 + 4 * QUERIES}


@settings(max_examples=60)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=40), st.integers(0, 70))
def test_every_token_has_its_own_place(inputs: list[int], n_padding: int) -> None:
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


def test_the_reference_of_the_call_is_attention_and_reads_past_the_end() -> None:
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
    caches[1, 1] = np.nan  # behind the second entry's keys
    out, _ = attended(q, *caches, kv_length, table)
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()


@pytest.mark.parametrize(("dtype", "n_queries"), [("bfloat16", 64), ("float16", 1)])
def test_the_cudnn_call_has_the_same_configuration_as_jaxs_own(dtype: str, n_queries: int) -> None:
    with mlir.make_ir_context(), ir.Location.unknown():
        element = {"bfloat16": ir.BF16Type, "float16": ir.F16Type}[dtype].get()
        theirs = jax_cudnn.create_dot_product_attention_backend_config(
            8, 40, n_queries, 2048, element, 0.125, 42, 0.0, jax_cudnn.MaskType.PADDING,
            jax_cudnn.AttentionLayout.BNTH.value, None, 1, True, False,
        )  # fmt: skip
    assert json.loads(graph(jnp.dtype(dtype), 8, 40, n_queries, 2048, 0.125)) == json.loads(theirs)


def test_sizes_that_cudnn_has_none_for() -> None:
    assert unsupported(128, 16, "bfloat16", 8, 8) is None
    for sizes, message in {
        (100, 16, "bfloat16", 8, 8): "head size is 100",
        (264, 16, "bfloat16", 8, 8): "up to 256",
        (128, 24, "bfloat16", 8, 8): "powers of two",
        (128, 16, "float32", 8, 8): "float32",
        (128, 16, "float16", 8, 3): "8 heads are not a multiple of its 3",
    }.items():
        assert message in str(unsupported(*sizes))


def test_a_device_without_the_call_refuses() -> None:
    refused = refusal(jax.devices("cpu")[0], 64, 16, "bfloat16", 4, 4)
    assert refused is not None and "__cudnn$fmhaSoftmax" in refused
