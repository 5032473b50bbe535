"""Which keys an indexer selects, and attention to them, against plain loops."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.families.attention_config import Indexer, Latent, latent_attention
from orca_jax.families.rotary import Rotary
from orca_jax.model import selection
from orca_jax.model.kv_cache import LayerCache
from orca_jax.model.selection import Batch, IndexQueries, attend_to, best_keys, selecting

BLOCK, TOP_K, N_HEADS, SIZE, RANK, WIDTH = 4, 3, 2, 5, 6, 8
OWN = latent_attention(
    Latent(rank=RANK, rotary_size=WIDTH - RANK, plain_size=4, value_size=4, query_rank=4),
    n_heads=3,
    rotary=Rotary(size=2),
    indexer=Indexer(n_heads=N_HEADS, head_size=SIZE, top_k=TOP_K),
)


@pytest.fixture(autouse=True)
def small_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score a few keys in a trip, so that the best of earlier trips meet later keys."""
    monkeypatch.setattr(selection, "_FEWEST_KEYS", 8)


def numbers(rng: np.random.Generator, *shape: int, whole: bool = False) -> np.ndarray:
    """Random numbers; `whole` ones, so that many scores are equal."""
    return (rng.integers(-1, 2, shape) if whole else rng.standard_normal(shape)).astype("f4")


def selected_one_by_one(q: np.ndarray, w: np.ndarray, keys: np.ndarray, top_k: int) -> list[int]:
    """The positions of the best keys [n, SIZE] of one query, the earlier of equal ones first."""
    scores = [sum(w[h] * max(float(q[h] @ key), 0.0) for h in range(len(w))) for key in keys]
    return sorted(range(len(keys)), key=lambda i: (-scores[i], i))[:top_k]


N_ROWS, N_TOKENS, N_BLOCKS = 5, 64, 60


@partial(jax.jit, static_argnames="follow_lengths")
def run(
    rows: tuple[jax.Array, ...], asked: IndexQueries, q: jax.Array, cache: LayerCache, *, follow_lengths: bool
) -> tuple[jax.Array, ...]:
    """Returns the selection, the results, the tokens that select, and whether any does."""
    table, row_start, kv_length = rows
    batch = Batch(table, row_start, kv_length, kv_length > TOP_K, N_TOKENS, False, follow_lengths)
    own = selecting(batch, TOP_K, BLOCK, None)
    chosen = own.select(asked, cache)
    return chosen, own.to(q, cache, chosen, OWN), own.mine, own.some


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=5),
    follow_lengths=st.booleans(),
    whole=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_select_and_see_their_best_keys(
    lengths: list[tuple[int, int]], follow_lengths: bool, whole: bool, seed: int
) -> None:
    """Rows of `lengths`, keys and new tokens, in shuffled blocks; those with more than TOP_K keys select."""
    rng = np.random.default_rng(seed)
    rows = [(n_keys, min(n_keys, n_new)) for n_keys, n_new in lengths]
    rows += [(0, 0)] * (N_ROWS - len(rows))
    row_start = np.cumsum([0, *(n_new for _, n_new in rows)])
    table = rng.permutation(N_BLOCKS)[: N_ROWS * 10].reshape(N_ROWS, 10)
    index_keys = numbers(rng, N_BLOCKS, 1, BLOCK, SIZE, whole=whole)
    vectors = numbers(rng, N_BLOCKS, 1, BLOCK, WIDTH)
    asked = IndexQueries(
        jnp.asarray(numbers(rng, N_TOKENS, N_HEADS, SIZE, whole=whole)),
        jnp.asarray(numbers(rng, N_TOKENS, N_HEADS, whole=whole)),
    )
    q = numbers(rng, N_TOKENS, 3, WIDTH)
    arrays = tuple(jnp.asarray(each, jnp.int32) for each in (table, row_start, [n for n, _ in rows]))
    cache = LayerCache(jnp.asarray(vectors), None, index_keys=jnp.asarray(index_keys))
    chosen, found, own_mine, own_some = map(
        np.asarray, run(arrays, asked, jnp.asarray(q), cache, follow_lengths=follow_lengths)
    )
    expected, mine = np.zeros_like(found), np.zeros(N_TOKENS, bool)
    for r, (n_keys, n_new) in enumerate(rows):
        if n_keys <= TOP_K:
            continue
        of_row = (
            np.concatenate([index_keys[b, 0] for b in table[r]]),
            np.concatenate([vectors[b, 0] for b in table[r]]),
        )
        for i in range(n_new):
            token, seen = row_start[r] + i, n_keys - n_new + i + 1
            best = selected_one_by_one(
                np.asarray(asked.queries[token]), np.asarray(asked.weights[token]), of_row[0][:seen], TOP_K
            )
            assert sorted(p for p in chosen[token].tolist() if p >= 0) == sorted(best)
            scores = q[token] @ of_row[1][best].T * OWN.scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            expected[token] = weights / weights.sum(axis=1, keepdims=True) @ of_row[1][best][:, :RANK]
            mine[token] = True
    np.testing.assert_array_equal(own_mine, mine)
    assert own_some == mine.any()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_query_reads_nothing_but_what_is_selected() -> None:
    """NaN in every other vector, in index keys after the query, and in blocks of other rows."""
    index_keys = np.full((6, 1, BLOCK, SIZE), np.nan, "f4")
    vectors = np.full((6, 1, BLOCK, WIDTH), np.nan, "f4")
    table = jnp.array([[4, 1]])
    index_keys[[4, 1], 0] = 0.0
    index_keys[1, 0, 2:] = np.nan  # positions 6 and 7, after the query
    for block, slot, size in ((4, 1, 3.0), (4, 3, 2.0), (1, 1, 1.0)):  # positions 1, 3 and 5
        index_keys[block, 0, slot], vectors[block, 0, slot] = size, size
    asked = IndexQueries(jnp.ones((1, 1, N_HEADS, SIZE)), jnp.ones((1, 1, N_HEADS)))
    chosen = best_keys(asked, jnp.asarray(index_keys), table, jnp.array([[5]]), TOP_K, follow_lengths=False)
    assert chosen.tolist() == [[[1, 3, 5]]]
    block = jnp.take_along_axis(table[:, None], chosen // BLOCK, axis=2)
    found = attend_to(jnp.zeros((1, 1, 3, WIDTH)), jnp.asarray(vectors)[block, 0, chosen % BLOCK],
                      chosen >= 0, RANK, 1.0)  # fmt: skip
    np.testing.assert_allclose(found, np.full((1, 1, 3, RANK), 2.0), rtol=1e-6)


def test_a_query_with_fewer_keys_than_are_selected_has_them_all() -> None:
    rng = np.random.default_rng(3)
    asked = IndexQueries(jnp.asarray(numbers(rng, 1, 2, N_HEADS, SIZE)), jnp.ones((1, 2, N_HEADS)))
    keys = jnp.asarray(numbers(rng, 1, 1, BLOCK, SIZE))
    chosen = best_keys(asked, keys, jnp.array([[0]]), jnp.array([[1, -1]]), TOP_K, follow_lengths=True)
    assert sorted(chosen[0, 0].tolist()) == [-1, 0, 1] and chosen[0, 1].tolist() == [-1, -1, -1]
    nothing = attend_to(jnp.ones((2, WIDTH)), jnp.full((TOP_K, WIDTH), np.nan), chosen[0, 1] >= 0, RANK, 1.0)
    np.testing.assert_array_equal(nothing, np.zeros((2, RANK)))
