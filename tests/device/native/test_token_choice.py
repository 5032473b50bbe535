"""The choice of tokens in C: against float64, and against the sampler in JAX."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.model.sampler import greedy, sample, uniform
from orca_jax.native import token_choice
from orca_jax.native.token_choice import native_choice
from tests.device.native.native_form import needs_native, other_lanes

pytestmark = needs_native

N_REPORTED = 20
FLOAT32 = np.finfo(np.float32)
native = jax.jit(partial(native_choice, max_top=N_REPORTED))
in_jax = jax.jit(partial(sample, cut=False))
numbers = jax.jit(uniform)


@dataclass(frozen=True)
class Chosen:
    """The results by name."""

    tokens: np.ndarray  # [R]
    reported_tokens: np.ndarray  # [R]
    logprobs: np.ndarray  # [R]
    top_ids: np.ndarray  # [R, N_REPORTED]
    top: np.ndarray  # [R, N_REPORTED]


def choose(
    logits: np.ndarray,
    *,
    raw: np.ndarray | None = None,
    known: Sequence[int] | np.ndarray | int = -1,
    temperature: Sequence[float] | np.ndarray | float = 0.0,
    min_p: Sequence[float] | np.ndarray | float = 0.0,
    number: np.ndarray | float = 0.0,
    n_top: Sequence[int] | np.ndarray | int = N_REPORTED,
    call: Callable[..., tuple[jax.Array, jax.Array]] = native,
) -> Chosen:
    logits = np.asarray(logits, np.float32)
    raw = logits if raw is None else raw

    def rows(value: object, dtype: type) -> jax.Array:
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), len(logits)))

    own = jnp.asarray(logits)
    others = (rows(temperature, np.float32), rows(min_p, np.float32), rows(number, np.float32))
    tokens, words = map(
        np.asarray,
        call(
            own,
            own if raw is logits else jnp.asarray(raw),
            rows(known, np.int32),
            *others,
            rows(n_top, np.int32),
        ),
    )
    ids, values = np.split(words[:, 2:], 2, axis=1)
    return Chosen(tokens, words[:, 0], words[:, 1].view(np.float32), ids, values.view(np.float32))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-softmax [R, V] in float64, exact even where one token has nearly all the probability."""
    far = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    weights = np.exp(far)
    weights[np.arange(len(far)), far.argmax(axis=1)] = 0
    return far - np.log1p(weights.sum(axis=1, keepdims=True))


def check_logprobs(logits: np.ndarray, chosen: Chosen, n_top: int) -> None:
    """Check log-probabilities of the tokens and of the most likely, equal ones in order."""
    expected = log_softmax(logits)
    n, vocab = logits.shape
    np.testing.assert_allclose(
        chosen.logprobs, expected[np.arange(n), chosen.reported_tokens], rtol=1e-6, atol=1e-14
    )
    n_filled = min(n_top, vocab)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :n_filled]
    in_order = np.take_along_axis(expected, order, axis=1)
    finite = np.isfinite(in_order)
    np.testing.assert_allclose(chosen.top[:, :n_filled], in_order, rtol=1e-6, atol=1e-14)
    np.testing.assert_array_equal(chosen.top_ids[:, :n_filled], np.where(finite, order, 0))
    assert (chosen.top_ids[:, n_filled:] == 0).all() and (chosen.top[:, n_filled:] == -np.inf).all()


def spread_logits(seed: int, vocab: int) -> np.ndarray:
    """Logits from nearly equal to far apart, and a row whose largest has nearly all the probability."""
    rng = np.random.default_rng(seed)
    spread = np.array([[0.01], [1.0], [3.0], [5.0], [30.0], [1000.0], [3.0], [0.0]])
    logits = (rng.normal(0, 1, (8, vocab)) * spread).astype(np.float32)
    logits[6, vocab // 2] = 40
    return logits


VOCABS = [1, 11, 255, 256, 257, 700, 6000]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("n_top", [0, 1, 5, 20])
def test_logprobs_equal_log_softmax_for_the_token_and_the_most_likely(vocab: int, n_top: int) -> None:
    logits = spread_logits(vocab + n_top, vocab)
    tokens = np.random.default_rng(vocab).integers(0, vocab, len(logits)).astype(np.int32)
    chosen = choose(logits, known=tokens, n_top=n_top)
    assert chosen.tokens.tolist() == chosen.reported_tokens.tolist() == tokens.tolist()
    check_logprobs(logits, chosen, n_top)
    best = choose(logits, n_top=n_top)
    assert best.tokens.tolist() == logits.argmax(axis=1).tolist()
    check_logprobs(logits, best, n_top)


def test_logprobs_of_equal_of_large_and_of_minus_infinite_logits() -> None:
    rng = np.random.default_rng(1)
    equal = rng.integers(-2, 3, (8, 6000)).astype(np.float32)
    equal[0] = 1.5
    equal[1] = np.where(np.arange(6000) % 300 == 7, 4.0, 0.0)  # one in each of several groups
    check_logprobs(equal, choose(equal), N_REPORTED)
    exact = (rng.integers(-4000, 4000, (8, 700)) / 256).astype(np.float32)
    check_logprobs(exact + np.float32(4096), choose(exact + np.float32(4096)), N_REPORTED)
    huge = (rng.normal(0, 1, (8, 700)) * 1e37).astype(np.float32)
    check_logprobs(huge, choose(huge), N_REPORTED)
    some = rng.normal(0, 3, (8, 700)).astype(np.float32)
    some[rng.random((8, 700)) < 0.5] = -np.inf
    some[:4, 3:] = -np.inf
    some[:, 300] = 1
    check_logprobs(some, choose(some), N_REPORTED)


def check_draws(
    logits: np.ndarray, temperature: np.ndarray, min_p: np.ndarray, seed: int, chosen: Callable[..., Chosen]
) -> None:
    """Check draws against the running sum in float64 and, away from its steps, against the sampler in JAX."""
    n = len(logits)
    keys = np.random.default_rng(seed).integers(-(2**31), 2**31, (3, n)).astype(np.int32)
    number = np.asarray(numbers(*keys))
    tokens = chosen(logits, temperature=temperature, min_p=min_p, number=number).tokens
    zero, one = np.zeros(n, np.int32), np.ones(n, np.float32)
    theirs = np.asarray(in_jax(logits, temperature, zero, one, min_p, *keys))
    for r in range(n):
        if temperature[r] == 0:
            assert tokens[r] == theirs[r] == logits[r].argmax()
            continue
        weights = np.exp((logits[r].astype(np.float64) - logits[r].max()) / temperature[r])
        assert weights[tokens[r]] >= min_p[r] * (1 - 1e-5)
        if (np.abs(weights - min_p[r]) < 1e-5 * min_p[r]).any():
            continue  # rounding says which are drawn
        weights[weights < min_p[r]] = 0
        steps = np.cumsum(weights) / weights.sum()
        at, near = tokens[r], 2e-6
        assert steps[at] - weights[at] / weights.sum() - near <= number[r] <= steps[at] + near, r
        if (np.abs(steps - number[r]) > near).all():
            assert tokens[r] == theirs[r], r


@settings(max_examples=30)
@given(
    vocab=st.sampled_from(VOCABS),
    temperature=st.sampled_from([0.0, 1e-30, 1e-3, 0.7, 1.0, 1.0, 2.0, 100.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.05, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_draws_are_those_of_the_sampler_in_jax(
    vocab: int, temperature: float, min_p: float, seed: int
) -> None:
    logits = spread_logits(seed, vocab)
    n = len(logits)
    check_draws(logits, np.full(n, temperature, np.float32), np.full(n, min_p, np.float32), seed, choose)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_draws_follow_the_distribution(temperature: float) -> None:
    """Each token gets its probability's share of 4,096 evenly spread numbers, to within one."""
    logits = np.random.default_rng(2).normal(0, 2, 600).astype(np.float32)
    n = 4096
    even = ((np.arange(n) + 0.5) / n).astype(np.float32)
    tokens = choose(np.tile(logits, (n, 1)), temperature=temperature, number=even, n_top=-1).tokens
    weights = np.exp(logits.astype(np.float64) / temperature)
    expected = n * weights / weights.sum()
    assert (np.abs(np.bincount(tokens, minlength=600) - expected) <= 1.001).all()
    assert (np.diff(tokens) >= 0).all()


def test_the_largest_number_below_one_draws_a_token_with_weight() -> None:
    logits = np.full((2, 700), -np.inf, np.float32)
    logits[0, :5], logits[1, 300:400] = 0, np.linspace(-1, 1, 100)
    for temperature in (1.0, 0.5):
        chosen = choose(logits, temperature=temperature, number=np.nextafter(np.float32(1), np.float32(0)))
        assert chosen.tokens.tolist() == [4, 399]
        assert choose(logits, temperature=temperature, number=0.0).tokens.tolist() == [0, 300]


def test_a_rows_bits_depend_on_the_row_alone() -> None:
    """Neither neighbours, nor how the token was chosen, nor what else is reported matters."""
    rng = np.random.default_rng(3)
    n, vocab = 40, 3000  # shared out to threads
    logits = rng.normal(0, 3, (n, vocab)).astype(np.float32)
    temperature = rng.choice([0.0, 0.5, 1.0], n).astype(np.float32)
    min_p = rng.choice([0.0, 0.1], n).astype(np.float32)
    number = rng.random(n).astype(np.float32)
    together = choose(logits, temperature=temperature, min_p=min_p, number=number)
    for i in range(n):
        row = slice(i, i + 1)
        drawn = partial(choose, temperature=temperature[row], min_p=min_p[row], number=number[row])
        alone = drawn(logits[row])
        scored = choose(logits[row], known=together.tokens[row])
        apart = drawn(logits[row], raw=logits[row].copy())
        few, unreported = drawn(logits[row], n_top=3), drawn(logits[row], n_top=-1)
        for one in (alone, scored, apart, few, unreported):
            assert one.tokens[0] == together.tokens[i]
        for one in (alone, scored, apart):
            for name in ("logprobs", "top_ids", "top"):
                assert getattr(one, name)[0].tobytes() == getattr(together, name)[i].tobytes()
        assert few.logprobs.tobytes() == together.logprobs[row].tobytes()
        assert few.top[0, :3].tobytes() == together.top[i, :3].tobytes()
        assert (few.top[0, 3:] == -np.inf).all() and (few.top_ids[0, 3:] == 0).all()
        assert unreported.logprobs[0] == -np.inf and (unreported.top == -np.inf).all()


def test_log_probabilities_are_of_the_raw_logits() -> None:
    raw = spread_logits(4, 700)
    logits = raw.copy()
    logits[:, :600] = -np.inf
    chosen = choose(logits, raw=raw, temperature=1.0, number=0.4)
    assert (chosen.tokens >= 600).all()
    check_logprobs(raw, chosen, N_REPORTED)


NASTY = [FLOAT32.max, FLOAT32.min, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("vocab", [1, 300])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_logits_of_any_kind_give_a_token_of_the_vocabulary_and_no_nan(vocab: int, temperature: float) -> None:
    rng = np.random.default_rng(vocab)
    rows = [np.full(vocab, value) for value in NASTY]
    for value in NASTY:
        for share in (0.01, 0.5):
            row = rng.normal(0, 3, vocab)
            row[rng.random(vocab) < share] = value
            row[-1] = value
            rows.append(row)
    logits = np.stack(rows).astype(np.float32)
    for number in (0.0, 0.5, 0.999999):
        for min_p in (0.0, 0.2):
            chosen = choose(logits, temperature=temperature, number=number, min_p=min_p)
            assert ((chosen.tokens >= 0) & (chosen.tokens < vocab)).all()
            assert ((chosen.top_ids >= 0) & (chosen.top_ids < vocab)).all()
            assert (chosen.logprobs <= 0).all() and (chosen.top <= 0).all()
            none = ~np.isfinite(np.fmax.reduce(logits, axis=1))
            assert (chosen.logprobs[none] == -np.inf).all() and (chosen.top[none] == -np.inf).all()
            if temperature == 0:
                some = ~np.isnan(logits).any(axis=1)
                assert chosen.tokens[some].tolist() == greedy(jnp.asarray(logits[some])).tolist()


def test_a_forced_token_outside_the_vocabulary_has_no_probability() -> None:
    logits = spread_logits(5, 300)
    chosen = choose(logits, known=[300, 1 << 30, 299, 0, 0, 0, 0, 0])
    assert (chosen.logprobs[:2] == -np.inf).all() and np.isfinite(chosen.logprobs[2:]).all()


def test_the_form_for_the_other_register_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_choice, "target", partial(token_choice.target, LANES=other_lanes()))
    other = partial(choose, call=partial(native_choice, max_top=N_REPORTED))
    rng = np.random.default_rng(6)
    for vocab in VOCABS:
        logits = spread_logits(vocab, vocab)
        check_logprobs(logits, other(logits), N_REPORTED)
        temperature = rng.choice([0.0, 0.7, 1.0], 8).astype(np.float32)
        check_draws(logits, temperature, rng.choice([0.0, 0.1], 8).astype(np.float32), vocab, other)
