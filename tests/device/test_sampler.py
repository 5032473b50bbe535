"""The samplers against exact distributions (chi-square) and against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.model.sampler import greedy, sample

N_DRAWS = 20_000
plain = jax.jit(lambda *rows: sample(*rows, cut=False))
full = jax.jit(lambda *rows: sample(*rows, cut=True))


def draws(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, *, seeds: bool, cut: bool
) -> np.ndarray:
    """Counts [V] of N_DRAWS draws, over seeds or over the token indices of one seed."""
    vocab = len(logits)
    n = 2000
    counts = np.zeros(vocab, int)
    for start in range(0, N_DRAWS, n):
        changing = jnp.arange(start, start + n, dtype=jnp.int32)
        fixed = jnp.full(n, 7, jnp.int32)
        rows = (
            jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n, vocab)),
            jnp.full(n, temperature, jnp.float32),
            jnp.full(n, top_k, jnp.int32),
            jnp.full(n, top_p, jnp.float32),
            changing if seeds else fixed,
            jnp.zeros(n, jnp.int32),
            fixed if seeds else changing,
        )
        counts += np.bincount((full if cut else plain)(*rows), minlength=vocab)
    return counts


def exact(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities [V] in float64: temperature, the k most likely, of those the fewest that make p."""
    p = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    enough = np.searchsorted(np.cumsum(p[order]), top_p) + 1
    if top_p < 1:
        p[order[enough:]] = 0
    return p / p.sum()


def chi_square(counts: np.ndarray, p: np.ndarray) -> tuple[float, int]:
    """The statistic, cells that expect under 5 draws taken as one, and its degrees of freedom."""
    assert counts[p == 0].sum() == 0
    expected = N_DRAWS * p
    big = expected >= 5
    cells = np.append(counts[big], counts[~big].sum()), np.append(expected[big], expected[~big].sum())
    there = cells[1] > 0
    return float((((cells[0] - cells[1]) ** 2)[there] / cells[1][there]).sum()), int(there.sum()) - 1


@pytest.mark.parametrize(
    ("vocab", "temperature", "top_k", "top_p"),
    [(11, 1.0, 0, 1.0), (700, 0.7, 0, 1.0), (300, 1.3, 5, 1.0), (300, 1.0, 0, 0.6), (700, 1.5, 40, 0.8)],
)
@pytest.mark.parametrize("seeds", [True, False])
def test_draws_follow_the_exact_distribution(
    vocab: int, temperature: float, top_k: int, top_p: float, seeds: bool
) -> None:
    logits = np.random.default_rng(vocab).normal(0, 2, vocab)
    p = exact(logits, temperature, top_k, top_p)
    cut = bool(top_k) or top_p < 1
    statistic, freedom = chi_square(draws(logits, temperature, top_k, top_p, seeds=seeds, cut=cut), p)
    # Five deviations above the mean of a chi-square: the draws are seeded, so it passes always or never.
    assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 5
    if top_p == 1:  # the same tokens are kept at another temperature: a slip in it would show
        wrong = exact(logits, temperature * 1.1, top_k, top_p)
        assert chi_square(np.round(N_DRAWS * wrong), p)[0] > statistic


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    top_k=st.integers(0, 60),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
)
def test_only_tokens_that_top_k_and_top_p_keep_are_drawn(seed: int, top_k: int, top_p: float) -> None:
    rng = np.random.default_rng(seed)
    n, vocab = 64, 50
    logits = rng.normal(0, 3, (n, vocab)).astype(np.float32)
    seeds = rng.integers(-(2**31), 2**31, (2, n)).astype(np.int32)
    tokens = full(
        jnp.asarray(logits),
        jnp.full(n, 1.0),
        jnp.full(n, top_k, jnp.int32),
        jnp.full(n, top_p, jnp.float32),
        *seeds,
        jnp.arange(n, dtype=jnp.int32),
    )
    for row, token in zip(logits.astype(np.float64), np.asarray(tokens), strict=True):
        # A hair more than p, for sums in float32: at worst one more token is kept.
        kept = exact(row, 1.0, top_k, min(top_p * 1.0001, 1.0))
        assert kept[token] > 0


def test_greedy_takes_the_first_of_equals_and_rows_of_temperature_0_are_greedy() -> None:
    logits = jnp.array([[1.0, 3.0, 3.0, 2.0], [-jnp.inf, -5.0, -7.0, -5.0], [0.0, 0.0, 0.0, 9.0]])
    assert greedy(logits).tolist() == [1, 1, 3]
    zero = jnp.zeros(3, jnp.int32)
    for program in (plain, full):
        tokens = program(logits, jnp.zeros(3), zero, jnp.ones(3), zero, zero, zero)
        assert tokens.tolist() == [1, 1, 3]


def test_a_row_does_not_depend_on_its_neighbours_or_its_place() -> None:
    rng = np.random.default_rng(0)
    n, vocab = 16, 333
    rows = (
        rng.normal(0, 2, (n, vocab)).astype(np.float32),
        rng.choice([0.0, 0.5, 1.0, 2.0], n).astype(np.float32),
        rng.choice([0, 1, 20], n).astype(np.int32),
        rng.choice([0.3, 0.9, 1.0], n).astype(np.float32),
        *rng.integers(0, 2**31, (3, n)).astype(np.int32),
    )
    together = np.asarray(full(*rows))
    alone = [int(full(*(part[i : i + 1] for part in rows))[0]) for i in range(n)]
    order = rng.permutation(n)
    assert together.tolist() == alone
    np.testing.assert_array_equal(full(*(part[order] for part in rows)), together[order])


def test_each_part_of_the_key_changes_the_draw() -> None:
    n = 200
    flat = jnp.zeros((n, 1000))
    one, zero, count = jnp.ones(n), jnp.zeros(n, jnp.int32), jnp.arange(n, dtype=jnp.int32)
    for key in ((count, zero, zero), (zero, count, zero), (zero, zero, count)):
        assert len(set(plain(flat, one, zero, one, *key).tolist())) > 150
