"""Which product of packed weights a GPU gets, and XLA's of codes with a scale for each row."""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from orca_jax.execution import matmul_backend
from orca_jax.execution.matmul_backend import choose_products
from orca_jax.model.packed_weight import product_of_codes, rounded
from orca_jax.pallas.packed_product import MOST_TOKENS
from tests.packed_planes import EVERY_FORM, literal_numbers, random_planes

# The forms whose codes XLA's products read, and the kernel's, by compute capability.
OF_CODES = {"8.0": {"w8", "w8a8"}, "9.0": {"w8", "w8a8", "fp8"}, "10.0": {"w8", "w8a8", "fp8"}}


class Gpu:
    platform = "gpu"
    core_count = 108

    def __init__(self, compute_capability: str) -> None:
        self.compute_capability = compute_capability


@pytest.mark.parametrize("capability", OF_CODES)
@pytest.mark.parametrize("name", EVERY_FORM)
def test_each_form_has_a_product_that_reads_packed_codes(
    monkeypatch: pytest.MonkeyPatch, capability: str, name: str
) -> None:
    """XLA's or, for few tokens, the kernel; many tokens of other forms are left to an unpacked weight."""
    form, launched = EVERY_FORM[name], list[int]()

    def kernel(x: Any, form: Any, planes: Any, *, n_cores: int) -> Any:
        launched.append(n_cores)
        return jnp.zeros((len(x), 16), x.dtype)

    monkeypatch.setattr(matmul_backend, "packed_product", kernel)
    packed = choose_products(Gpu(capability), jnp.bfloat16).bind(None).packed
    assert packed is not None
    planes = {name: jnp.asarray(plane) for name, plane in random_planes(form, (16, 256), seed=0).items()}
    few, many = (packed(jnp.ones((n, 256), jnp.bfloat16), form, planes, None) for n in (2, MOST_TOKENS + 1))
    of_codes = name in OF_CODES[capability]
    assert few is not None and few.shape == (2, 16)
    assert launched == ([] if of_codes else [108])
    assert (many is not None) == of_codes


def test_other_gpus_unpack() -> None:
    assert choose_products(Gpu("7.5"), jnp.bfloat16).bind(None).packed is None


@pytest.mark.parametrize("name", ["w8", "fp8", "w8a8"])
def test_the_product_of_codes(name: str) -> None:
    form = EVERY_FORM[name]
    planes = random_planes(form, (24, 96), seed=3)
    x = np.random.default_rng(0).normal(size=(5, 96)).astype(ml_dtypes.bfloat16)
    y = product_of_codes(jnp.asarray(x), form, {name: jnp.asarray(plane) for name, plane in planes.items()})
    assert y is not None and y.dtype == jnp.bfloat16
    wide = x.astype(np.float32)
    if form.integer_inputs:
        scale = np.abs(wide).max(axis=1, keepdims=True) / np.float32(127)
        wide = np.rint(wide / scale) * scale
        assert np.allclose(wide, rounded(jnp.asarray(x)).astype(jnp.float32), rtol=2**-8)
    numbers = literal_numbers(form, planes).astype(np.float64)
    exact, size = wide.astype(np.float64) @ numbers.T, np.abs(wide.astype(np.float64)) @ np.abs(numbers.T)
    error = np.abs(np.asarray(y).astype(np.float64) - exact)
    assert (error <= 2**-8 * np.abs(exact) + 1e-6 * size).all(), error.max()


@pytest.mark.parametrize("name", sorted({*EVERY_FORM} - {"w8", "fp8", "w8a8"}))
def test_other_forms_have_no_such_product(name: str) -> None:
    form = EVERY_FORM[name]
    planes = {name: jnp.asarray(plane) for name, plane in random_planes(form, (8, 256), seed=0).items()}
    assert product_of_codes(jnp.ones((1, 256), jnp.bfloat16), form, planes) is None
