"""Recurrences over a token-major array, beside the same a token at a time in NumPy."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.execution.matmul_backend import Products
from orca_jax.model.causal_convolution import causal_convolution
from orca_jax.model.recurrence import Kept, Rows
from tests.device.native.native_form import needs_native

N_STATES = 7
CHANNELS = 3


# Fixed, so that each width is compiled once.
N_TOKENS, N_ROWS = 28, 6


def rows_of(lengths: Sequence[int], states: Sequence[int], starts: Sequence[bool]) -> Rows:
    """The Rows of an iteration, padded to N_ROWS rows and N_TOKENS tokens."""
    free = N_ROWS - len(lengths)
    row_start = np.cumsum([0, *lengths, *[0] * free]).astype(np.int32)
    row_of_token = np.full(N_TOKENS, N_ROWS)
    row_of_token[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    return Rows(
        jnp.asarray(row_start),
        jnp.asarray(row_of_token, jnp.int32),
        jnp.asarray([*states, *[N_STATES] * free], jnp.int32),
        jnp.asarray([*starts, *[True] * free]),
    )


@partial(jax.jit, static_argnames="native")
def convolution(
    x: Any, weight: Any, bias: Any, state: Any, rows: Rows, native: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The sums and the new states, by the native kernel or by XLA."""
    kernels = Products(native=native).recurrent
    y, new = causal_convolution(x, weight, bias, state[:, None], rows._replace(kernels=kernels))
    return y, new[:, 0]


KERNELS = [False, pytest.param(True, marks=needs_native)]


@given(
    st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=4),
    st.permutations(range(N_STATES)),
    st.sampled_from([2, 4]),
    st.booleans(),
)
@pytest.mark.parametrize("native", KERNELS)
def test_a_convolution_of_rows_equals_one_a_token_at_a_time(
    native: bool, rows: list[tuple[int, bool]], states: list[int], width: int, bias: bool
) -> None:
    rng = np.random.default_rng(width)
    lengths, starts = [n for n, _ in rows], [start for _, start in rows]
    x = rng.normal(size=(N_TOKENS, CHANNELS)).astype(np.float32)
    x[sum(lengths) :] = np.nan
    weight = rng.normal(size=(CHANNELS, width)).astype(np.float32)
    addend = rng.normal(size=CHANNELS).astype(np.float32) if bias else None
    state = rng.normal(size=(N_STATES, width - 1, CHANNELS)).astype(np.float32)
    given_rows = rows_of(lengths, states[: len(rows)], starts)
    y, new = convolution(x, weight, addend, state, given_rows, native)

    wanted_state, wanted, token = state.copy(), [], 0
    for length, start, place in zip(lengths, starts, states, strict=False):
        before = np.zeros_like(state[place]) if start else state[place]
        for _ in range(length):
            window = np.concatenate([before, x[token : token + 1]])  # [W, C]
            wanted.append((window * weight.T).sum(axis=0) + (0 if addend is None else addend))
            before, token = window[1:], token + 1
        wanted_state[place] = before
    np.testing.assert_allclose(y[: sum(lengths)], wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(new, wanted_state)


@pytest.mark.parametrize("native", KERNELS)
@pytest.mark.parametrize("width", [2, 4])
def test_the_state_after_each_draft_of_a_convolution_is_kept(width: int, native: bool) -> None:
    """The second row is drafted, of four tokens; the first is a prompt's chunk."""
    rng = np.random.default_rng(width)
    x = rng.normal(size=(N_TOKENS, CHANNELS)).astype(np.float32)
    weight = rng.normal(size=(CHANNELS, width)).astype(np.float32)
    state = rng.normal(size=(N_STATES, width - 1, CHANNELS)).astype(np.float32)
    places = [place for place in range(N_STATES) if place not in (1, 3)][:3]
    token = jnp.array([5, 6, 7, 8, 8, 8])
    at = jnp.array([*places, *[N_STATES] * 3])
    rows = rows_of([5, 4], [1, 3], [True, False])
    arrays = jnp.array(x), jnp.array(weight), None, jnp.array(state)
    _, new = convolution(*arrays, rows._replace(kept=Kept(token, at, 3)), native)
    _, without = convolution(*arrays, rows)
    expected = np.array(without)
    for n, place in enumerate(places, 1):
        expected[place] = np.concatenate([state[3], x[5 : 5 + n]])[n:]
    np.testing.assert_array_equal(new, expected)
