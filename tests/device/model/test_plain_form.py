"""The plain form of latent attention, in C and in pure JAX, against a softmax for each query in float64."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.model.kv_cache import LayerCache
from orca_jax.model.latent import plain_attention
from orca_jax.native import plain_latent
from orca_jax.native.plain_latent import native_plain_latent, unsupported
from tests.device.model.ragged import Ragged, ragged
from tests.device.native.native_form import needs_native, other_lanes

MOST_TOKENS, MOST_ROWS, MOST_KEYS = 320, 6, 640
BFLOAT16 = ml_dtypes.bfloat16
SCALE = 0.17
FUNCTIONS = ["pure JAX", pytest.param("C", marks=needs_native)]


class Sizes(NamedTuple):
    """Sizes of a layer; the cache has blocks of `block` slots."""

    n_heads: int
    rank: int
    rotary: int
    plain: int
    value: int
    block: int


# In C every size is a multiple of 16.
SIZES = [Sizes(2, 48, 16, 32, 16, 16), Sizes(3, 16, 32, 16, 48, 8), Sizes(1, 512, 64, 128, 128, 16)]
ODD = Sizes(3, 12, 4, 6, 5, 8)


class Case(NamedTuple):
    """A batch: its rows, the queries [T, N, P + U], and the weight that makes keys and values."""

    rows: Ragged
    q: np.ndarray
    makes: np.ndarray  # [N, P + W, C]


def case_of(rows: list[tuple[int, int]], sizes: Sizes, seed: int, dtype: Any = np.float32) -> Case:
    """A random batch, in one of few shapes since each is compiled; `rows` are (new tokens, all tokens)."""
    n_padding = MOST_TOKENS - sum(n for n, _ in rows)
    own = ragged(
        seed, rows, n_padding=n_padding, n_heads=1, n_kv_heads=1, head_size=sizes.rank + sizes.rotary,
        block_size=sizes.block, n_rows=MOST_ROWS, n_blocks=MOST_ROWS * MOST_KEYS // sizes.block,
        max_blocks=MOST_KEYS // sizes.block,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((MOST_TOKENS, sizes.n_heads, sizes.plain + sizes.rotary))
    q[own.row_start[-1] :] = np.nan
    makes = rng.standard_normal((sizes.n_heads, sizes.plain + sizes.value, sizes.rank)) / np.sqrt(sizes.rank)
    return Case(own._replace(k_cache=own.k_cache.astype(dtype)), q.astype(dtype), makes.astype(dtype))


def truth(case: Case, sizes: Sizes) -> np.ndarray:
    """The result [T, N, W] by definition, with zeros for rows without a key and for padding."""
    rows, q, makes = case.rows, case.q.astype(np.float64), case.makes.astype(np.float64)
    out = np.zeros((MOST_TOKENS, sizes.n_heads, sizes.value))
    for r, length in enumerate(rows.kv_length):
        begin, end = rows.row_start[r], rows.row_start[r + 1]
        position = np.arange(length)
        blocks = rows.block_table[r, position // sizes.block]
        cached = rows.k_cache[blocks, 0, position % sizes.block].astype(np.float64)
        made = np.einsum("kc,nmc->nkm", cached[:, : sizes.rank], makes)
        for token in range(begin, end if length else begin):
            n_seen = length - (end - 1 - token)
            for head in range(sizes.n_heads):
                keys = np.concatenate(
                    [made[head, :n_seen, : sizes.plain], cached[:n_seen, sizes.rank :]], axis=1
                )
                scores = SCALE * (keys @ q[token, head])
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ made[head, :n_seen, sizes.plain :] / weights.sum()
    return out


@cache
def program(function: str, lanes: int = 0) -> Callable[..., jax.Array]:
    """The compiled operation; `lanes` chooses another register width."""
    if function == "C":
        return jax.jit(partial(native_plain_latent, scale=SCALE))

    def pure_jax(q: jax.Array, keys: jax.Array, *rows: Any) -> jax.Array:
        return plain_attention(q, LayerCache(keys, None), *rows, scale=SCALE)

    return jax.jit(pure_jax)


def attended(case: Case, function: str, lanes: int = 0) -> np.ndarray:
    rows = case.rows
    keys = rows.k_cache.view(np.uint16) if rows.k_cache.dtype == BFLOAT16 else rows.k_cache
    arrays = (case.q, keys, case.makes, rows.block_table, rows.row_start, rows.kv_length)
    return np.asarray(program(function, lanes)(*map(jnp.asarray, arrays)))


@st.composite
def row_lists(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Random rows: new tokens and all tokens; a row without a key has no query."""
    rows: list[tuple[int, int]] = []
    row = st.tuples(
        st.sampled_from([1, 2, 15, 47, 48, 49, 100, 130, 200]), st.sampled_from([0, 0, 1, 63, 127, 128, 300])
    )
    for n, before in draw(st.lists(row, min_size=1, max_size=MOST_ROWS)):
        if sum(m for m, _ in rows) + n <= MOST_TOKENS:
            rows.append((n, n + before))
    return rows


@pytest.mark.parametrize("function", FUNCTIONS)
@settings(max_examples=10, deadline=None)
@given(rows=row_lists(), sizes=st.sampled_from(SIZES[:2]), seed=st.integers(0, 2**31), skipped=st.booleans())
def test_equals_a_softmax_for_each_query(
    function: str, rows: list[tuple[int, int]], sizes: Sizes, seed: int, skipped: bool
) -> None:
    case = case_of(rows, sizes, seed)
    if skipped:
        case.rows.kv_length[0] = 0
    np.testing.assert_allclose(attended(case, function), truth(case, sizes), atol=3e-5, rtol=3e-5)


ROWS = [(1, 9), (200, 341), (64, 64), (5, 133)]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_deepseek_v3s_sizes(function: str) -> None:
    case = case_of(ROWS, SIZES[2], seed=5)
    np.testing.assert_allclose(attended(case, function), truth(case, SIZES[2]), atol=5e-5, rtol=5e-5)


def test_any_sizes_in_pure_jax() -> None:
    case = case_of(ROWS, ODD, seed=6)
    np.testing.assert_allclose(attended(case, "pure JAX"), truth(case, ODD), atol=3e-5, rtol=3e-5)
    sizes = {"rank": 16, "rotary_size": 16, "plain_size": 16}
    assert "a value_size in steps of 16, not of 5" in str(unsupported("float32", **sizes, value_size=5))
    assert "float16" in str(unsupported("float16", **sizes, value_size=16))
    assert unsupported("bfloat16", **sizes, value_size=16) is None


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bfloat16_is_within_its_rounding(function: str) -> None:
    """Pure JAX rounds keys and values, as any model of that dtype does; C does not."""
    case = case_of(ROWS, SIZES[0], seed=7, dtype=BFLOAT16)
    found = attended(case, function)
    assert found.dtype == BFLOAT16
    error = 2.0**-8 if function == "C" else 0.05
    np.testing.assert_allclose(
        found.astype(np.float64), truth(case, SIZES[0]), atol=1e-4 + error / 4, rtol=error
    )


@needs_native
def test_the_other_register_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_latent, "target", partial(plain_latent.target, LANES=other_lanes()))
    case = case_of(ROWS, SIZES[1], seed=8)
    found = attended(case, "C", other_lanes())
    np.testing.assert_allclose(found, truth(case, SIZES[1]), atol=3e-5, rtol=3e-5)


@needs_native
def test_pieces_of_a_row_have_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces here have 64 queries, where the engine's have 2,048."""
    monkeypatch.setattr(plain_latent, "target", partial(plain_latent.target, PIECE=64))
    case = case_of(ROWS, SIZES[0], seed=9)
    found = attended(case, "C", 64)
    np.testing.assert_allclose(found, truth(case, SIZES[0]), atol=3e-5, rtol=3e-5)


@needs_native
def test_a_row_has_the_same_bits_whatever_its_neighbours() -> None:
    sizes = SIZES[0]
    alone, among = case_of([(70, 150)], sizes, seed=1), case_of([(5, 8), (70, 150), (1, 10)], sizes, seed=1)
    among.q[5:75] = alone.q[:70]
    assert np.array_equal(among.makes, alone.makes)
    for position in range(150):
        here, there = (each.rows.block_table[i, position // 16] for i, each in enumerate((alone, among)))
        among.rows.k_cache[there, :, position % 16] = alone.rows.k_cache[here, :, position % 16]
    assert np.array_equal(attended(alone, "C")[:70], attended(among, "C")[5:75])
