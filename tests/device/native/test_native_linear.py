"""The CPU's linear layers in C, against the product in float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.execution import matmul_backend
from orca_jax.execution.matmul_backend import choose_products
from orca_jax.model.layers import matmul
from orca_jax.native import compiler, custom_call, products
from orca_jax.native.compiler import NotBuilt
from orca_jax.native.products import has_form, native_linear
from tests.device.native.native_form import has_tiles, needs_native, other_lanes

CPU = jax.devices("cpu")[0]
product_jitted = jax.jit(native_linear, static_argnames="steady")
BFLOAT16 = ml_dtypes.bfloat16
HALF_UNIT = 2.0**-8  # of a bfloat16, relative


def arrays(seed: int, n_tokens: int, n_in: int, n_out: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal((n_tokens, n_in)), rng.standard_normal((n_out, n_in))
    return x.astype(np.float32), weight.astype(np.float32)


def product(
    x: np.ndarray, weight: np.ndarray, n_tokens: int | None = None, *, steady: bool = False
) -> np.ndarray:
    count = jnp.array([len(x) if n_tokens is None else n_tokens], jnp.int32)
    return np.asarray(product_jitted(x, weight, count, steady=steady))


@needs_native
@settings(max_examples=80)
@given(
    n_tokens=st.integers(1, 130),
    vectors_in=st.integers(1, 100),
    n_out=st.integers(16, 400),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_equals_the_product_and_is_zero_after_the_real_tokens(
    n_tokens: int, vectors_in: int, n_out: int, share: float, seed: int
) -> None:
    x, weight = arrays(seed, n_tokens, 16 * vectors_in, n_out)
    n_real = round(share * n_tokens)
    x[n_real:] = np.nan  # as what was never written may be
    given = product(x, weight, n_real)
    true = x[:n_real].astype(np.float64) @ weight.astype(np.float64).T
    bound = 1e-6 * np.abs(x[:n_real]) @ np.abs(weight.T) + 1e-6
    assert (np.abs(given[:n_real] - true) <= bound).all()
    assert not given[n_real:].any()


@needs_native
@settings(max_examples=40)
@given(
    n_tokens=st.integers(1, 110),
    vectors_in=st.integers(1, 80),
    n_out=st.integers(16, 200),
    x_dtype=st.sampled_from([np.float32, BFLOAT16]),
    seed=st.integers(0, 2**31),
)
def test_bfloat16_weights_have_float32_sums(
    n_tokens: int, vectors_in: int, n_out: int, x_dtype: Any, seed: int
) -> None:
    x, weight = arrays(seed, n_tokens, 16 * vectors_in, n_out)
    x, weight = x.astype(x_dtype), weight.astype(BFLOAT16)
    given = product(x, weight)
    true = x.astype(np.float64) @ weight.astype(np.float64).T
    assert given.dtype == x_dtype
    bound = 1e-6 * np.abs(x.astype(np.float64)) @ np.abs(weight.astype(np.float64)).T + 1e-6
    if x_dtype == BFLOAT16:
        bound += HALF_UNIT * np.abs(true)
    assert (np.abs(given.astype(np.float64) - true) <= bound).all()


@needs_native
def test_bfloat16_results_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    sums = [1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3.0e38, 3.4e38, np.inf, np.nan]
    weight = np.zeros((16, 16), np.float32)
    weight[: len(sums), 0] = sums
    for n_tokens in (1, 9):
        x = np.zeros((n_tokens, 16), BFLOAT16)
        x[:, 0] = 1
        given = product(x, weight)
        expected = np.broadcast_to(weight[:, 0].astype(BFLOAT16), given.shape)
        assert np.array_equal(given.astype(np.float32), expected.astype(np.float32), equal_nan=True)


@needs_native
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(BFLOAT16, marks=pytest.mark.long)])
def test_the_form_for_the_other_register_width(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "target", partial(products.target, LANES=other_lanes()))
    for n_tokens in (1, 3, 6, 7, 8, 9, 28, 40, 101):
        x, weight = arrays(n_tokens, n_tokens, 1040 if n_tokens < 40 else 1552, 77)
        weight = weight.astype(dtype)
        true = x.astype(np.float64) @ weight.astype(np.float64).T
        np.testing.assert_allclose(native_linear(jnp.asarray(x), jnp.asarray(weight)), true, atol=2e-4)


@needs_native
@pytest.mark.parametrize("macros", [{"PAIRS": 0}, {"TILES": 0}, {"STATE_OF_TILES": 63}])
def test_the_forms_without_pairs_or_tiles_or_leave_to_use_them(
    macros: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "target", partial(products.target, **macros))
    for n_tokens in (1, 8, 9, 28, 40, 101):
        x, weight = (array.astype(BFLOAT16) for array in arrays(n_tokens, n_tokens, 1040, 77))
        true = x.astype(np.float64) @ weight.astype(np.float64).T
        given = np.asarray(native_linear(jnp.asarray(x), jnp.asarray(weight))).astype(np.float64)
        np.testing.assert_allclose(given, true, rtol=HALF_UNIT, atol=2e-4)


@needs_native
@pytest.mark.skipif(not has_tiles(), reason="no AMX")
def test_in_tiles_a_token_has_the_same_bits_with_any_number_of_others() -> None:
    x, weight = (array.astype(BFLOAT16) for array in arrays(1, 210, 784, 333))
    whole = product(x, weight)
    for n in (1, 2, 8, 9, 16, 17, 33, 49, 60, 193):
        assert np.array_equal(product(x[:n], weight), whole[:n]), n


@needs_native
def test_the_token_count_defaults_to_all_tokens() -> None:
    x, weight = arrays(0, 20, 64, 48)
    assert np.array_equal(product_jitted(x, weight), product(x, weight))
    assert np.array_equal(product(x, weight, 1000), product(x, weight))


# Sizes of which every token, or of the `steady` product every token, is computed in one form.
MOST_FEW = 6 if other_lanes() == 16 else 8
FEW_ALL, ONE_PANEL, MANY_ALL = (1, 2, 3, 5, MOST_FEW), (7, 8), (9, 13, 16, 31, 48, 64)
MANY_STEADY = (MOST_FEW + 1, 9, 16, 20, 31, 48, 49, 97, 128)
FORMS = [(FEW_ALL, False), (ONE_PANEL, False), (MANY_ALL, False), (FEW_ALL, True), (MANY_STEADY, True)]


@needs_native
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
@pytest.mark.parametrize(("sizes", "steady"), FORMS)
def test_a_token_has_the_same_bits_whatever_the_others(
    sizes: tuple[int, ...], steady: bool, dtype: Any
) -> None:
    x, weight = (array.astype(dtype) for array in arrays(1, max(sizes), 784, 333))
    alone = product(x, weight, steady=steady)[0]
    for n in sizes:
        for at in {0, n // 2, n - 1}:
            others = np.random.default_rng(n).standard_normal((n, 784)).astype(dtype)
            others[at] = x[0]
            assert np.array_equal(product(others, weight, steady=steady)[at], alone), (n, at)


@needs_native
@pytest.mark.skipif(other_lanes() == 16, reason="no AVX-512: a last vector that is half full costs no more")
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_up_to_twelve_last_tokens_take_the_form_for_few_tokens(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "target", partial(products.target, TILES=0))
    multiply = jax.jit(lambda x, weight: native_linear(x, weight))
    steady = jax.jit(lambda x, weight: native_linear(x, weight, steady=True))
    x, weight = (array.astype(dtype) for array in arrays(1, 60, 784, 333))
    many = np.asarray(multiply(x[:48], weight))
    few = np.concatenate([multiply(x[48:56], weight), multiply(x[52:], weight)[4:]])
    assert not np.array_equal(few, steady(x, weight)[48:])
    for n in range(1, 13):
        assert np.array_equal(multiply(x[: 48 + n], weight), np.concatenate([many, few[:n]])), n


@needs_native
def test_large_products_are_split_over_threads() -> None:
    x, weight = arrays(2, 300, 1040, 2305)
    np.testing.assert_allclose(product(x, weight), x.astype(np.float64) @ weight.T, atol=4e-4)
    np.testing.assert_allclose(product(x[:4], weight), x[:4].astype(np.float64) @ weight.T, atol=4e-4)


def zeros(n_in: int, n_out: int) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros((3, n_in)), jnp.zeros((n_out, n_in))


def test_shapes_without_a_form_run_in_xla() -> None:
    assert has_form(*zeros(16, 16)) and has_form(*zeros(768, 50257))
    assert not has_form(*(array.astype(jnp.float16) for array in zeros(16, 16)))
    assert not has_form(*zeros(24, 64)) and not has_form(*zeros(64, 15)) and not has_form(*zeros(0, 64))
    x, weight = arrays(3, 5, 24, 64)
    chosen = choose_products(CPU, np.float32).bind(None)
    np.testing.assert_allclose(chosen(jnp.array(x), jnp.array(weight)), x @ weight.T, atol=1e-4)


@needs_native
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_cpu_with_a_compiler_runs_it(dtype: Any) -> None:
    chosen = choose_products(CPU, dtype)
    assert chosen.native
    assert chosen.describe_with("attention") == "attention; native products"
    x, weight = (jnp.array(array, dtype) for array in arrays(4, 5, 64, 48))
    assert np.array_equal(chosen.bind(None)(x, weight), product_jitted(x, weight))


def test_an_unsupported_dtype_is_reported_and_runs_in_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    half = choose_products(CPU, jnp.float16)
    assert not half.native and "weights are float16" in half.description
    assert half.bind(None) is matmul

    def none(x_dtype: Any, weight_dtype: Any, *, steady: bool) -> str:
        raise NotBuilt("no C compiler was found")

    monkeypatch.setattr(matmul_backend, "linear_target", none)
    assert choose_products(CPU, np.float32).description == "XLA's products: no C compiler was found"


def test_a_processor_without_avx_has_no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_PROCESSOR", ())
    with pytest.raises(NotBuilt, match=r"no C compiler was found|needs a processor with AVX-512"):
        custom_call.target("linear", THAT_NOTHING_ELSE_HAS_SET=1)


def test_a_gpu_uses_xlas_products_without_a_message() -> None:
    class Gpu:
        platform = "gpu"

    chosen = choose_products(Gpu(), np.float32)
    assert not chosen.native and chosen.describe_with("kernel") == "kernel"
    assert chosen.bind(None).packed is None
