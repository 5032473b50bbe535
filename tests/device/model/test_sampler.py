"""The samplers against exact distributions (chi-square) and against plain numpy."""

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.model.sampler import IN_PROMPT, adjust, allow, greedy, keep, logprobs, sample

N_DRAWS = 20_000
N_TOGETHER = 2000  # rows of one call
plain = jax.jit(lambda *rows: sample(*rows, cut=False))
full = jax.jit(lambda *rows: sample(*rows, cut=True))
compiled_logprobs = jax.jit(logprobs, static_argnums=2)
# For thousands of rows running takes longer than compiling, so these are optimized (tests/xla_flags.py).
OPTIMIZED = {"xla_backend_optimization_level": 3}
of_many_rows = {cut: jax.jit(partial(sample, cut=cut), compiler_options=OPTIMIZED) for cut in (False, True)}


@dataclass(frozen=True)
class Cut:
    """Sampling parameters; the defaults are neutral."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, eq=False)
class Changes:
    """Adjustments of logits [V] before the choice; `neutral` changes nothing."""

    prompt: np.ndarray  # [V] bool, what is in the prompt
    counts: np.ndarray  # [V] int, how often it is in the output
    bias: np.ndarray  # [V]
    allowed: np.ndarray  # [V] bool
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


def neutral(vocab: int) -> Changes:
    nowhere = np.zeros(vocab, bool)
    return Changes(nowhere, nowhere.astype(int), nowhere.astype(float), ~nowhere)


def parts_that_act(given: Any, idle: Any) -> list[str]:
    """The names of the fields in which two values differ."""
    names = [field.name for field in fields(given)]
    return [name for name in names if not np.array_equal(getattr(given, name), getattr(idle, name))]


@partial(jax.jit, static_argnames="cut", compiler_options=OPTIMIZED)
def whole(
    logits: jax.Array, changes: tuple[jax.Array, ...], words: jax.Array, *choice: jax.Array, cut: bool
) -> jax.Array:
    """Apply all adjustments to logits, in order."""
    return sample(allow(adjust(logits, *changes), words), *choice, cut=cut)


def draws(logits: np.ndarray, cut: Cut, changes: Changes | None = None, *, seeds: bool = True) -> np.ndarray:
    """Counts [V] of N_DRAWS draws, over seeds or over one seed's token indices."""
    vocab, n = len(logits), N_TOGETHER
    counts = np.zeros(vocab, int)

    def each_row(value: Any, dtype: Any = jnp.float32) -> jax.Array:
        array = jnp.asarray(value, dtype)
        return jnp.broadcast_to(array, (n, *array.shape))

    parameters = (
        each_row(cut.temperature),
        each_row(cut.top_k, jnp.int32),
        each_row(cut.top_p),
        each_row(cut.min_p),
    )
    for start in range(0, N_DRAWS, n):
        changing = jnp.arange(start, start + n, dtype=jnp.int32)
        zero, fixed = jnp.zeros(n, jnp.int32), jnp.full(n, 7, jnp.int32)
        key = (changing, zero, fixed) if seeds else (fixed, zero, changing)
        cuts = bool(cut.top_k) or cut.top_p < 1 or cut.min_p > 0
        if changes is None:
            tokens = of_many_rows[cuts](each_row(logits), *parameters, *key)
        else:
            bits = np.pad(changes.allowed, (0, -vocab % 32)).reshape(-1, 32).astype(np.uint32)
            words = (bits << np.arange(32, dtype=np.uint32)).sum(axis=1, dtype=np.uint32).view(np.int32)
            on_logits = (
                each_row(changes.counts + IN_PROMPT * changes.prompt, jnp.int32),
                each_row(changes.bias),
                each_row(changes.repetition),
                each_row(changes.frequency),
                each_row(changes.presence),
            )
            tokens = whole(
                each_row(logits), on_logits, each_row(words, jnp.int32), *parameters, *key, cut=cuts
            )
        counts += np.bincount(tokens, minlength=vocab)
    return counts


def exact(logits: np.ndarray, cut: Cut) -> np.ndarray:
    """Probabilities [V] in float64 after temperature, then top-k, then top-p, then min-p."""
    p = np.exp((logits - logits.max()) / cut.temperature)
    order = np.argsort(-p)
    if cut.top_k:
        p[order[cut.top_k :]] = 0
    p /= p.sum()
    enough = np.searchsorted(np.cumsum(p[order]), cut.top_p) + 1
    if cut.top_p < 1:
        p[order[enough:]] = 0
    p[p < cut.min_p * p.max()] = 0
    return p / p.sum()


def exact_changes(logits: np.ndarray, changes: Changes) -> np.ndarray:
    """Adjusted logits [V] in float64, with -inf for masked tokens."""
    changed = logits + changes.bias
    for token in np.flatnonzero(changes.prompt | (changes.counts > 0)):
        above = changed[token] > 0
        changed[token] = changed[token] / changes.repetition if above else changed[token] * changes.repetition
    changed -= changes.frequency * changes.counts
    changed -= changes.presence * (changes.counts > 0)
    return np.where(changes.allowed, changed, -np.inf)


def chi_square(counts: np.ndarray, p: np.ndarray) -> tuple[float, int]:
    """The chi-square statistic and its degrees of freedom.

    Cells that expect under 5 draws are merged. Infinite if a token without probability was drawn.
    """
    expected = N_DRAWS * p
    big = expected >= 5
    cells = np.append(counts[big], counts[~big].sum()), np.append(expected[big], expected[~big].sum())
    possible = cells[1] > 0
    statistic = float((((cells[0] - cells[1]) ** 2)[possible] / cells[1][possible]).sum())
    return np.inf if counts[p == 0].sum() else statistic, int(possible.sum()) - 1


def bound(freedom: int) -> float:
    """Five deviations above the mean of a chi-square: the draws are seeded, so it passes always or never."""
    return freedom + 5 * np.sqrt(2 * freedom) + 5


def would_fail(wrong: np.ndarray, p: np.ndarray) -> bool:
    """Whether even the most regular draws from `wrong` would clearly fail the test."""
    statistic, freedom = chi_square(np.round(N_DRAWS * wrong), p)
    return statistic > 2 * bound(freedom)


# Of top_k, top_p and min_p together the one that keeps fewest acts: those that do here stand behind.
CUTS = [
    (11, Cut(), ()),
    (700, Cut(temperature=0.7), ()),
    (300, Cut(temperature=1.3, top_k=5), ("top_k",)),
    (300, Cut(top_p=0.6), ("top_p",)),
    (700, Cut(temperature=1.5, top_k=40, top_p=0.8), ("top_k", "top_p")),
    (300, Cut(min_p=0.05), ("min_p",)),
    (700, Cut(temperature=1.4, min_p=0.1), ("min_p",)),
    (300, Cut(temperature=1.2, top_k=30, min_p=0.08), ("min_p",)),
    (300, Cut(temperature=2.5, top_k=15, min_p=0.08), ("top_k",)),
    (300, Cut(temperature=1.2, top_p=0.8, min_p=0.1), ("min_p",)),
    (300, Cut(temperature=2.0, top_p=0.4, min_p=0.1), ("top_p",)),
    (700, Cut(temperature=1.5, top_k=60, top_p=0.85, min_p=0.08), ("top_k", "top_p")),
    (700, Cut(temperature=1.5, top_k=60, top_p=0.95, min_p=0.13), ("min_p",)),
]


@pytest.mark.parametrize(("vocab", "cut", "acting"), CUTS)
@pytest.mark.parametrize("seeds", [True, pytest.param(False, marks=pytest.mark.long)])
def test_draws_follow_the_exact_distribution(
    vocab: int, cut: Cut, acting: tuple[str, ...], seeds: bool
) -> None:
    logits = np.random.default_rng(vocab).normal(0, 2, vocab)
    p = exact(logits, cut)
    statistic, freedom = chi_square(draws(logits, cut, seeds=seeds), p)
    assert statistic < bound(freedom)
    assert would_fail(exact(logits, replace(cut, temperature=cut.temperature * 1.25)), p)
    for name in ("temperature", *acting) if cut.temperature != 1 else acting:
        assert would_fail(exact(logits, replace(cut, **{name: getattr(Cut(), name)})), p), name


def changes_of(vocab: int, logits: np.ndarray, rng: np.random.Generator) -> Changes:
    """Random adjustments of the more likely tokens, where they show."""
    likely = rng.permutation(np.argsort(-logits)[:30])
    prompt, counts, bias = np.zeros(vocab, bool), np.zeros(vocab, int), np.zeros(vocab)
    prompt[likely[:14]] = True  # eight of them in the prompt alone
    counts[likely[8:22]] = rng.integers(1, 5, 14)
    bias[likely[5:29:3]] = rng.uniform(1, 2.5, 8) * np.tile([1, -1], 4)
    allowed = rng.random(vocab) < 0.7
    return Changes(prompt, counts, bias, allowed, repetition=1.5, frequency=0.6, presence=1.4)


@pytest.mark.long
def test_draws_with_penalties_and_masks_follow_the_exact_distribution() -> None:
    vocab = 300
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 1.5, vocab)
    idle, some = neutral(vocab), changes_of(vocab, logits, rng)
    negative = replace(some, repetition=0.6, frequency=-0.3, presence=-0.8)
    cases = [
        (replace(idle, bias=some.bias), Cut()),
        (replace(idle, prompt=some.prompt, counts=some.counts, repetition=1.8), Cut()),
        # all negative, where a penalty multiplies
        (replace(idle, prompt=some.prompt, counts=some.counts, bias=some.bias - 5, repetition=1.3), Cut()),
        (replace(idle, counts=some.counts, frequency=0.5), Cut()),
        (replace(idle, counts=some.counts, presence=-0.7), Cut()),
        (replace(idle, allowed=some.allowed), Cut(temperature=0.8)),
        (some, Cut(temperature=1.3)),
        (negative, Cut(temperature=1.3)),
        (some, Cut(temperature=1.3, top_k=40, top_p=0.9)),
        (some, Cut(temperature=1.3, min_p=0.15)),
    ]
    for changes, cut in cases:
        p = exact(exact_changes(logits, changes), cut)
        statistic, freedom = chi_square(draws(logits, cut, changes), p)
        assert statistic < bound(freedom), (parts_that_act(changes, idle), cut)
        for name in parts_that_act(changes, idle):
            without = replace(changes, **{name: getattr(idle, name)})
            assert would_fail(exact(exact_changes(logits, without), cut), p), (name, cut)
        for name in parts_that_act(cut, Cut()):
            other = replace(cut, **{name: getattr(Cut(), name)})
            assert would_fail(exact(exact_changes(logits, changes), other), p), (name, cut)
        if changes.prompt.any() and (changes.frequency or changes.presence):
            prompt_counted = replace(changes, counts=changes.counts + changes.prompt)
            assert would_fail(exact(exact_changes(logits, prompt_counted), cut), p), cut


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    top_k=st.integers(0, 60),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.01, 0.2, 0.9, 1.0]),
)
def test_only_tokens_that_the_filters_keep_are_drawn(
    seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    rng = np.random.default_rng(seed)
    n, vocab = 64, 50
    logits = rng.normal(0, 3, (n, vocab)).astype(np.float32)
    seeds = rng.integers(-(2**31), 2**31, (2, n)).astype(np.int32)
    tokens = full(
        jnp.asarray(logits),
        jnp.full(n, 1.0),
        jnp.full(n, top_k, jnp.int32),
        jnp.full(n, top_p, jnp.float32),
        jnp.full(n, min_p, jnp.float32),
        *seeds,
        jnp.arange(n, dtype=jnp.int32),
    )
    # A hair more than p and less than min_p, for sums and powers in float32: at worst one more token is kept.
    loose = Cut(top_k=top_k, top_p=min(top_p * 1.0001, 1.0), min_p=min_p * 0.9999)
    for row, token in zip(logits.astype(np.float64), np.asarray(tokens), strict=True):
        assert exact(row, loose)[token] > 0


def test_the_likeliest_token_is_always_kept_and_kept_weights_do_not_change() -> None:
    rng = np.random.default_rng(3)
    n, vocab = 200, 333
    logits = rng.normal(0, 4, (n, vocab)).astype(np.float32)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights[rng.random((n, vocab)) < 0.1] = 0  # some are not allowed
    weights[np.arange(n), logits.argmax(axis=1)] = 1
    top_k = rng.choice([0, 1, 10, 333, 1 << 30], n).astype(np.int32)
    top_p = rng.choice([1e-30, 0.5, 1.0], n).astype(np.float32)
    min_p = rng.choice([0.0, 1e-30, 0.5, 1.0], n).astype(np.float32)
    kept = np.asarray(jax.jit(keep)(weights, top_k, top_p, min_p))
    assert (kept[np.arange(n), logits.argmax(axis=1)] == 1).all()
    assert ((kept == 0) | (kept == weights)).all()
    keeps_all = (np.isin(top_k, [0, 333, 1 << 30])) & (top_p == 1) & (min_p == 0)
    np.testing.assert_array_equal(kept[keeps_all], weights[keeps_all])
    assert keeps_all.sum() > 5
    assert ((kept > 0).sum(axis=1)[(top_k == 1) | (top_p < 0.1) | (min_p == 1)] == 1).all()


def test_greedy_takes_the_first_of_equal_logits_as_do_rows_of_temperature_0() -> None:
    logits = jnp.array([[1.0, 3.0, 3.0, 2.0], [-jnp.inf, -5.0, -7.0, -5.0], [0.0, 0.0, 0.0, 9.0]])
    assert greedy(logits).tolist() == [1, 1, 3]
    zero = jnp.zeros(3, jnp.int32)
    for program in (plain, full):
        tokens = program(logits, jnp.zeros(3), zero, jnp.ones(3), jnp.zeros(3), zero, zero, zero)
        assert tokens.tolist() == [1, 1, 3]


def test_extreme_parameters_draw_only_allowed_tokens() -> None:
    """The smallest and largest value of each parameter, with logits far apart and with one token allowed."""
    n, vocab = 300, 50
    rng = np.random.default_rng(4)
    logits = (rng.normal(0, 1, (n, vocab)) * rng.choice([1e-3, 1.0, 1e4, 1e30], (n, 1))).astype(np.float32)
    logits[:100, 1:] = -np.inf
    cold = np.full(n, 1e-30, np.float32)
    key = rng.integers(-(2**31), 2**31, (3, n)).astype(np.int32)
    ones, zero, all_k = np.ones(n, np.float32), np.zeros(n, np.float32), np.zeros(n, np.int32)
    best = logits.argmax(axis=1)
    for parameters in (
        (cold, all_k, ones, zero),
        (ones, all_k, ones * np.float32(1e-38), zero),
        (ones * 100, all_k + 1, ones, zero),
        (ones * 100, all_k + (1 << 30), ones, ones),
    ):
        np.testing.assert_array_equal(full(logits, *parameters, *key), best)
    hot = np.asarray(plain(logits, ones * 100, all_k, ones, zero, *key))
    assert (hot[:100] == 0).all() and len(set(hot[100:].tolist())) > 20


def test_a_row_does_not_depend_on_its_neighbours_or_its_place() -> None:
    rng = np.random.default_rng(0)
    n, vocab = 16, 333
    rows = (
        rng.normal(0, 2, (n, vocab)).astype(np.float32),
        rng.choice([0.0, 0.5, 1.0, 2.0], n).astype(np.float32),
        rng.choice([0, 1, 20], n).astype(np.int32),
        rng.choice([0.3, 0.9, 1.0], n).astype(np.float32),
        rng.choice([0.0, 0.1, 0.5], n).astype(np.float32),
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
    ones, zero, count = jnp.ones(n), jnp.zeros(n, jnp.int32), jnp.arange(n, dtype=jnp.int32)
    for key in ((count, zero, zero), (zero, count, zero), (zero, zero, count)):
        assert len(set(plain(flat, ones, zero, ones, jnp.zeros(n), *key).tolist())) > 150


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100, 50_257])
def test_a_token_is_allowed_by_its_bit_alone(vocab: int) -> None:
    """Bit t % 32 of word t // 32, the sign bit as well; bits past the vocabulary do not matter."""
    rng = np.random.default_rng(vocab)
    words = rng.integers(-(2**31), 2**31, (4, -(-vocab // 32))).astype(np.int32)
    words[0], words[1] = -1, 0
    logits = rng.normal(0, 3, (4, vocab)).astype(np.float32)
    allowed = [[(int(row[t // 32]) >> (t % 32)) & 1 for t in range(vocab)] for row in words]
    expected = np.where(np.array(allowed) == 1, logits, -np.inf)
    np.testing.assert_array_equal(jax.jit(allow)(logits, words), expected)


# Reported log-probabilities.


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-softmax [R, V] in float64."""
    far = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return far - np.log(np.exp(far).sum(axis=1, keepdims=True))


def check_logprobs(logits: np.ndarray, n_top: int) -> None:
    """Check log-probabilities of tokens and of the n most likely against float64, equal ones in order."""
    n, vocab = logits.shape
    expected = log_softmax(logits)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :n_top]
    tokens = np.random.default_rng(vocab).integers(0, vocab, n).astype(np.int32)
    tokens[0] = vocab - 1
    chosen, ids, top = map(np.asarray, compiled_logprobs(logits, tokens, n_top, True))
    assert ids.shape == top.shape == (n, n_top) and ids.dtype == np.int32 and top.dtype == np.float32
    np.testing.assert_allclose(chosen, expected[np.arange(n), tokens], rtol=2e-6, atol=2e-6)
    n_filled = min(n_top, vocab)
    in_order = np.take_along_axis(expected, order, axis=1)
    np.testing.assert_allclose(top[:, :n_filled], in_order, rtol=2e-6, atol=2e-6)
    finite = np.isfinite(in_order)
    np.testing.assert_array_equal(ids[:, :n_filled][finite], order[finite])
    assert ((ids >= 0) & (ids < vocab)).all()
    assert (ids[:, n_filled:] == 0).all() and (top[:, n_filled:] == -np.inf).all()


@pytest.mark.parametrize("vocab", [1, 11, 256, 257, 700, 6000])
@pytest.mark.parametrize("n_top", [0, 1, 5, 20])
def test_logprobs_equal_log_softmax_for_the_token_and_the_most_likely(vocab: int, n_top: int) -> None:
    """This includes a vocabulary with fewer tokens than requested."""
    rng = np.random.default_rng(vocab + n_top)
    spread = np.array([[0.01], [1.0], [3.0], [3.0], [30.0], [1000.0]])
    check_logprobs((rng.normal(0, 1, (6, vocab)) * spread).astype(np.float32), n_top)


@pytest.mark.parametrize("vocab", [11, 700, 6000])
def test_logprobs_of_equal_logits_are_ordered_by_token_id(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-2, 3, (8, vocab)).astype(np.float32)
    logits[0] = 1.5  # all equal
    logits[1] = np.where(np.arange(vocab) % 300 == 7, 4.0, 0.0)  # one in each of several groups
    check_logprobs(logits, 20)


@pytest.mark.parametrize("vocab", [11, 700, 6000])
def test_logprobs_of_logits_that_are_minus_infinite(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (8, vocab)).astype(np.float32)
    logits[rng.random((8, vocab)) < 0.5] = -np.inf
    logits[:4, 3:] = -np.inf  # three tokens at most are left,
    logits[:2, :3] = [0.5, -np.inf, -2.0]
    logits[2:, vocab // 2] = 1.0  # and one at least
    check_logprobs(logits, 20)


@pytest.mark.parametrize("vocab", [1, 257, 6000])
def test_logprobs_of_tokens_have_the_same_bits_if_no_row_asks_for_the_likeliest(vocab: int) -> None:
    """Then no others are reported; if one row asks, all rows have them."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (6, vocab)).astype(np.float32)
    logits[0], logits[1, : vocab // 2], logits[2, 0] = -np.inf, -np.inf, np.nan
    tokens = rng.integers(0, vocab, 6).astype(np.int32)
    one = np.arange(6) == 4
    chosen, ids, top = map(np.asarray, compiled_logprobs(logits, tokens, 20, one))
    alone, no_ids, no_top = map(np.asarray, compiled_logprobs(logits, tokens, 20, ~one & one))
    assert alone.tobytes() == chosen.tobytes()
    assert (no_ids == 0).all() and (no_top == -np.inf).all()
    likeliest = np.argmax(logits[3:], axis=1)
    assert ids[3:, 0].tolist() == likeliest.tolist()
    best, *_ = compiled_logprobs(logits[3:], likeliest.astype(np.int32), 20, one[3:])
    np.testing.assert_allclose(top[3:, 0], best, rtol=2e-6, atol=2e-6)


def test_logprobs_of_large_logits_lose_no_digits() -> None:
    """A constant added to all logits changes only their rounding."""
    rng = np.random.default_rng(5)
    logits = (rng.integers(-4000, 4000, (6, 700)) / 256).astype(np.float32)  # exact with what is added
    check_logprobs(logits + np.float32(4096), 20)
    check_logprobs(logits - np.float32(32768), 20)
    check_logprobs((rng.normal(0, 1, (6, 700)) * 1e30).astype(np.float32), 20)


def kept_by_sorting(weights: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """The weights [V] that are left, from their sorted values: with all that equal the last."""
    kept = weights.copy()
    if 0 < top_k < len(kept):
        kept[kept < np.sort(kept)[-top_k]] = 0
    if top_p < 1:
        wanted = np.float32(top_p) * kept.sum(dtype=np.float32)
        values = np.unique(kept)[::-1]
        shares = np.array([kept[kept >= value].sum(dtype=np.float32) for value in values])
        kept[kept < values[np.argmax(shares >= wanted)]] = 0
    return kept


# Multiples of 2 ** -12, so that float32 sums of them are exact; and many of them equal.
exact_weights = st.lists(st.one_of(st.integers(0, 4096), st.integers(0, 3)), min_size=1, max_size=40)


@pytest.mark.parametrize("accelerator", [False, True])
@settings(max_examples=150)
@given(rows=st.lists(exact_weights, min_size=1, max_size=4), data=st.data())
def test_top_k_and_top_p_keep_what_sorting_keeps(
    accelerator: bool, rows: list[Any], data: st.DataObject
) -> None:
    """With a bit for each pass, as on a CPU, and with several, as on an accelerator."""
    weights = np.zeros((4, 41), np.float32)
    weights[:, 0] = 1  # the likeliest
    for i, row in enumerate(rows):
        weights[i, 1 : len(row) + 1] = np.array(row, np.float32) / 4096
    top_k = np.array(data.draw(st.lists(st.integers(0, 45), min_size=4, max_size=4)), np.int32)
    shares = st.sampled_from([2**-20, 0.125, 0.5, 0.875, 1 - 2**-10, 1.0])
    top_p = np.array(data.draw(st.lists(shares, min_size=4, max_size=4)), np.float32)
    kept = np.asarray(kept_on[accelerator](weights, top_k, top_p, np.zeros(4, np.float32)))
    for got, row, k, p in zip(kept, weights, top_k.tolist(), top_p.tolist(), strict=True):
        np.testing.assert_array_equal(got, kept_by_sorting(row, k, p))


@pytest.mark.parametrize("accelerator", [False, True])
def test_top_k_of_any_float_is_exact(accelerator: bool) -> None:
    """Weights from the least positive numbers to 1, neighbouring floats among them."""
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 0x3F800001, (200, 41)).astype(np.int32)
    bits[:, 20:] = bits[:, :1] + rng.integers(-2, 3, (200, 21)).astype(np.int32)
    weights = np.clip(bits, 0, 0x3F800000).view(np.float32)
    weights[:, 0] = 1
    # Programs take the least positive numbers for 0.
    weights[weights < np.finfo(np.float32).tiny] = 0
    top_k = rng.integers(0, 43, 200).astype(np.int32)
    kept = np.asarray(
        kept_on[accelerator](weights, top_k, np.ones(200, np.float32), np.zeros(200, np.float32))
    )
    for got, row, k in zip(kept, weights, top_k.tolist(), strict=True):
        np.testing.assert_array_equal(got, kept_by_sorting(row, k, 1.0))


def keep_on_an_accelerator(*arrays: Any) -> jax.Array:
    """`keep` as a GPU runs it."""

    def other(*arrays: Any, default: Any, **_: Any) -> Any:
        return default(*arrays)

    with mock.patch.object(jax.lax, "platform_dependent", other):
        return keep(*arrays)


kept_on = {False: jax.jit(keep), True: jax.jit(keep_on_an_accelerator)}
