"""The CPU's products of experts in C, against float64 and against the pure-JAX form."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.model.layers import grouped_by_tiles, grouped_matmul
from orca_jax.native import products
from orca_jax.native.products import native_grouped, native_linear
from tests.device.native.native_form import needs_native, other_lanes

BFLOAT16 = ml_dtypes.bfloat16
HALF_UNIT = 2.0**-8  # of a bfloat16, relative
native, steady = jax.jit(native_grouped), jax.jit(partial(native_grouped, steady=True))
in_jax, by_tiles = jax.jit(grouped_matmul), jax.jit(grouped_by_tiles)

# Of experts: none has tokens, one has all, most have none, few and many side by side.
SIZES = [[0, 0, 0], [0, 57, 0], [0, 0, 0, 0, 1, 0, 9], [8, 9, 1, 0, 40, 2], [1] * 12, [130, 3, 0, 49], [5]]


def arrays(seed: int, n_rows: int, n_in: int, n_out: int, n_experts: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal((n_rows, n_in)), rng.standard_normal((n_experts, n_out, n_in))
    return x.astype(np.float32), weight.astype(np.float32)


def check(given: np.ndarray, x: np.ndarray, weight: np.ndarray, sizes: list[int]) -> None:
    """Check each group's product against float64, and the zeros after the last group."""
    first = 0
    exact, exact_weight = x.astype(np.float64), weight.astype(np.float64)
    for expert, size in enumerate(sizes):
        rows = slice(first, first + size)
        true = exact[rows] @ exact_weight[expert].T
        bound = 1e-6 * np.abs(exact[rows]) @ np.abs(exact_weight[expert]).T + 1e-6
        if given.dtype == BFLOAT16:
            bound += HALF_UNIT * np.abs(true)
        assert (np.abs(given[rows].astype(np.float64) - true) <= bound).all(), expert
        first += size
    assert not given[first:].astype(np.float32).any()


@needs_native
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    ("x_dtype", "dtype"), [(np.float32, np.float32), (np.float32, BFLOAT16), (BFLOAT16, BFLOAT16)]
)
def test_each_group_is_multiplied_by_its_weight(sizes: list[int], x_dtype: Any, dtype: Any) -> None:
    x, weight = arrays(len(sizes), sum(sizes) + 5, 80, 50, len(sizes))
    x, weight = x.astype(x_dtype), weight.astype(dtype)
    x[sum(sizes) :] = np.nan  # as what was never written may be
    for form in (native, steady):
        check(np.asarray(form(x, weight, jnp.array(sizes, jnp.int32))), x, weight, sizes)


@pytest.mark.parametrize("form", [in_jax, by_tiles], ids=["of CPUs", "of GPUs"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_pure_jax_forms(sizes: list[int], form: Callable[..., jax.Array]) -> None:
    x, weight = arrays(len(sizes), sum(sizes) + 5, 80, 50, len(sizes))
    x[sum(sizes) :] = 1e30
    check(np.asarray(form(x, weight, jnp.array(sizes, jnp.int32))), x, weight, sizes)


@needs_native
@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 0, 1, 2, 7, 8, 9, 16, 47, 48, 49, 100]), min_size=1, max_size=9),
    vectors_in=st.integers(1, 40),
    n_out=st.integers(16, 300),
    rest=st.integers(0, 20),
    seed=st.integers(0, 2**31),
)
def test_products_of_any_sizes_are_right(
    sizes: list[int], vectors_in: int, n_out: int, rest: int, seed: int
) -> None:
    x, weight = arrays(seed, max(1, sum(sizes) + rest), 16 * vectors_in, n_out, len(sizes))
    check(np.asarray(native(x, weight, jnp.array(sizes, jnp.int32))), x, weight, sizes)


@needs_native
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_a_group_is_a_linear_layer_to_the_bit(dtype: Any) -> None:
    sizes = [3, 0, 20, 8, 9]
    x, weight = (each.astype(dtype) for each in arrays(7, sum(sizes), 784, 333, len(sizes)))
    given = np.asarray(native(x, weight, jnp.array(sizes, jnp.int32)))
    starts = np.cumsum([0, *sizes])
    for expert, (first, size) in enumerate(zip(starts, sizes, strict=False)):
        if size:
            alone = native_linear(jnp.asarray(x[first : first + size]), jnp.asarray(weight[expert]))
            assert np.array_equal(given[first : first + size], alone), expert


@needs_native
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_steady_products_depend_on_the_token_alone(dtype: Any) -> None:
    x, weight = (each.astype(dtype) for each in arrays(8, 60, 784, 333, 3))
    alone = np.asarray(steady(x[:1], weight, jnp.array([0, 1, 0], jnp.int32)))[0]
    for sizes in ([0, 5, 2], [0, 8, 30], [0, 9, 1], [0, 50, 10]):
        assert np.array_equal(np.asarray(steady(x, weight, jnp.array(sizes, jnp.int32)))[0], alone), sizes


@needs_native
@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_the_form_for_the_other_register_width(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "target", partial(products.target, LANES=other_lanes()))
    for sizes in SIZES:
        x, weight = arrays(len(sizes), sum(sizes) + 5, 80, 50, len(sizes))
        weight = weight.astype(dtype)
        found = native_grouped(jnp.asarray(x), jnp.asarray(weight), jnp.array(sizes, jnp.int32))
        check(np.asarray(found), x, weight, sizes)


@needs_native
def test_absurd_sizes_stay_within_the_arrays() -> None:
    x, weight = arrays(9, 20, 32, 16, 4)
    given = np.asarray(native(x, weight, jnp.array([-3, 7, 1 << 30, 5], jnp.int32)))
    check(given, x, weight, [0, 7, 13, 0])


@needs_native
def test_large_groups_are_split_over_threads() -> None:
    x, weight = arrays(2, 300, 1040, 705, 3)
    sizes = [100, 0, 195]
    check(np.asarray(native(x, weight, jnp.array(sizes, jnp.int32))), x, weight, sizes)
