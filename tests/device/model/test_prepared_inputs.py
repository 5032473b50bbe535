"""Activations that a packed weight's form rounds to FP8 or takes in another order, against NumPy."""

from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from orca_jax.families.packed_form import PackedForm, fp8, w4
from orca_jax.model.layers import Matmul
from orca_jax.model.weight import PackedWeight, kind_of
from tests.packed_planes import literal_numbers, random_planes

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


def product(form: PackedForm, planes: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    weight = PackedWeight(form, {name: jnp.asarray(plane) for name, plane in planes.items()})
    return np.asarray(weight.product(jnp.asarray(x), Matmul()))


def activations() -> np.ndarray:
    x = np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32)
    x[2] *= 100
    x[4] = 0
    return x


@pytest.mark.parametrize("static", [None, 0.02])
def test_activations_are_rounded_to_fp8(static: float | None) -> None:
    """With a scale for each token, or with a static one, above whose 448 times they are cut."""
    plain, x = fp8(None), activations()
    planes = random_planes(plain, (24, 64), 0)
    scale = np.maximum(np.abs(x).max(1, keepdims=True), 1e-30) / np.float32(448)
    if static is not None:
        scale = np.float32(static)
        planes["input_scales"] = np.full(24, static, np.float32)
    numbers = np.clip(x / scale, -448, 448).astype(FLOAT8).astype(np.float32) * scale
    form = replace(plain, float_inputs="token" if static is None else "static")
    held = {name: plane for name, plane in planes.items() if name != "input_scales"}
    expected = numbers @ literal_numbers(plain, held).T
    found = product(form, planes, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(found - x @ literal_numbers(plain, held).T).max() > 1e-3


def test_activations_are_taken_in_the_order_of_the_planes() -> None:
    form, x = replace(w4(32), ordered=True), activations()
    planes = random_planes(w4(32), (24, 64), 0)
    numbers = literal_numbers(w4(32), planes)
    order = np.random.default_rng(2).permutation(64).astype(np.int32)
    expected = x[:, order] @ numbers.T
    np.testing.assert_allclose(product(form, planes | {"order": order}, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [w4(32, zeros=True), replace(w4(64), ordered=True)])
def test_weights_are_rounded_in_these_forms_too(form: PackedForm) -> None:
    dense = np.random.default_rng(3).normal(size=(8, 128)).astype(np.float32)
    arrays = kind_of(form).encoded(form, jnp.asarray(dense)).arrays
    planes = {name: np.asarray(array) for name, array in arrays.items()}
    assert {name: (one.shape, one.dtype) for name, one in planes.items()} == {
        name: (one.shape, one.dtype) for name, one in form.arrays((8, 128), np.float32).items()
    }
    numbers = literal_numbers(form, planes)
    steps = np.repeat(planes["scales"].astype(np.float32), form.block or 128, 1)
    assert (np.abs(numbers - dense) <= 0.51 * steps).all()
