"""The experts of a mixture in one call in C, against float64 and against single products."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.native import products
from orca_jax.native.products import has_mixture_form, native_linear, native_mixture
from tests.device.native.native_form import needs_native, other_lanes

BFLOAT16 = ml_dtypes.bfloat16
native, steady = jax.jit(native_mixture), jax.jit(partial(native_mixture, steady=True))

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def arrays(seed: int, n_tokens: int, hidden: int, size: int, n_experts: int, top_k: int) -> Arrays:
    """x, weights, up and down; experts' results are about as large as x."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_tokens, hidden))
    up = rng.standard_normal((n_experts, 2, size, hidden)) / np.sqrt(hidden)
    down = rng.standard_normal((n_experts, hidden, size)) / np.sqrt(size)
    x, weights, up, down = (each.astype(np.float32) for each in (x, rng.random((n_tokens, top_k)), up, down))
    return x, weights, up, down


def truth(
    x: np.ndarray, weights: np.ndarray, chosen: np.ndarray, up: np.ndarray, down: np.ndarray
) -> np.ndarray:
    """The result in float64, expert by expert."""
    x, weights, up, down = (each.astype(np.float64) for each in (x, weights, up, down))
    y = np.zeros(x.shape)
    for token, experts in enumerate(chosen):
        for weight, expert in zip(weights[token], experts, strict=True):
            if 0 <= expert < len(down):
                gate, other = up[expert] @ x[token]
                y[token] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * other))
    return y


def check(form: Any, chosen: np.ndarray, given: Arrays, dtype: Any) -> None:
    x, weights, up, down = given
    x, up, down = (each.astype(dtype) for each in (x, up, down))
    found = np.asarray(form(x, weights, jnp.asarray(chosen, jnp.int32), up, down)).astype(np.float64)
    true = truth(x, weights, chosen, up, down)
    bound = 1e-5 if dtype == np.float32 else 0.04
    np.testing.assert_allclose(found, true, rtol=bound, atol=bound)


# Experts of tokens: all one's; none's; of each some; of one few and of another many.
CHOICES = [
    np.full((3, 2), 4),
    np.full((5, 1), 6),
    np.arange(42).reshape(14, 3) % 8 - 1,
    np.repeat([[0, 5], [5, 2]], [70, 6], axis=0),
    np.array([[3, 1]]),
]


@needs_native
@pytest.mark.parametrize("chosen", CHOICES, ids=["one", "none", "some", "many", "a token"])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_each_token_gets_its_experts(chosen: np.ndarray, dtype: Any) -> None:
    given = arrays(1, len(chosen), 80, 112, 6, chosen.shape[1])
    for form in (native, steady):
        check(form, chosen, given, dtype)


@needs_native
@settings(max_examples=30, deadline=None)
@given(
    n_tokens=st.sampled_from([1, 2, 7, 8, 9, 33, 120]),
    hidden=st.integers(1, 12),
    size=st.integers(1, 20),
    n_experts=st.integers(1, 12),
    top_k=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_mixtures_of_any_sizes_are_right(
    n_tokens: int, hidden: int, size: int, n_experts: int, top_k: int, seed: int
) -> None:
    chosen = np.random.default_rng(seed).integers(-1, n_experts + 2, (n_tokens, top_k))
    given = arrays(seed, n_tokens, 16 * hidden, 16 * size, n_experts, top_k)
    check(native, chosen, given, np.float32)


@needs_native
@pytest.mark.parametrize("n_tokens", [1, 8, 9, 100])
def test_products_are_those_of_linear_layers_to_the_bit(n_tokens: int) -> None:
    """The result of a single expert of weight 1 is `down` times the activated first product."""
    x, _, up, down = (jnp.asarray(each) for each in arrays(3, n_tokens, 208, 336, 3, 1))
    ones, chosen = jnp.ones((n_tokens, 1)), jnp.full((n_tokens, 1), 1, jnp.int32)
    up = up.at[:, 0].set(0).at[:, 0, :, 0].set(200)  # the gate is 200 x[0], and silu of it the same or 0
    x = x.at[:, 0].set(1)
    inner = 200 * native_linear(x, up[1, 1])
    assert np.array_equal(native(x, ones, chosen, up, down), native_linear(inner, down[1]))


@needs_native
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_steady_results_depend_on_the_token_alone(dtype: Any) -> None:
    x, weights, up, down = arrays(4, 60, 80, 112, 3, 2)
    x, up, down = (each.astype(dtype) for each in (x, up, down))
    chosen = np.random.default_rng(0).integers(0, 3, (60, 2)).astype(np.int32)
    whole = np.asarray(steady(x, weights, chosen, up, down))
    for n in (1, 5, 20):
        some = np.asarray(steady(x[:n], weights[:n], chosen[:n], up, down))
        assert np.array_equal(some, whole[:n]), n


@needs_native
@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_the_form_for_the_other_register_width(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "target", partial(products.target, LANES=other_lanes()))
    for chosen in CHOICES:
        check(native_mixture, chosen, arrays(5, len(chosen), 48, 304, 6, chosen.shape[1]), dtype)


@needs_native
def test_extreme_gates_and_not_a_number() -> None:
    """A gate's sigmoid goes to 0 or 1 without a warning or a NaN; a token with NaN harms no other."""
    x, weights, up, down = arrays(6, 20, 32, 48, 4, 2)
    x[3], x[7] = np.nan, 1e4
    chosen = np.random.default_rng(1).integers(0, 4, (20, 2))
    found = np.asarray(native(x, weights, jnp.asarray(chosen, jnp.int32), up, down))
    assert np.isnan(found[3]).all() and np.isfinite(np.delete(found, 3, 0)).all()
    x[3] = 0
    with np.errstate(over="ignore"):
        true = truth(x, weights, chosen, up, down)
    np.testing.assert_allclose(np.delete(found, 3, 0), np.delete(true, 3, 0), rtol=1e-4, atol=1e-4)


@needs_native
def test_large_experts_are_split_over_threads() -> None:
    chosen = np.stack([np.arange(150) % 3, np.full(150, 3)], axis=1)
    for _ in range(5):
        check(native, chosen, arrays(7, 150, 528, 720, 4, 2), np.float32)


def test_shapes_without_a_form() -> None:
    def has(hidden: int, size: int, halves: int = 2, dtype: Any = np.float32) -> bool:
        x, down = np.zeros((3, hidden), np.float32), np.zeros((2, hidden, size), dtype)
        up = np.zeros((2, halves, size, hidden), dtype)
        return has_mixture_form(*map(jnp.asarray, (x, up, down)))

    assert has(32, 48) and has(32, 48, dtype=BFLOAT16)
    assert not has(32, 40) and not has(40, 32) and not has(32, 48, 1) and not has(32, 48, dtype=np.float16)
