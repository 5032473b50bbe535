"""The kernel of packed products on GPUs, interpreted, against the literal numbers of each form in float64."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from orca_jax.families.packed_form import PackedForm, w4, w8
from orca_jax.pallas.packed_product import MOST_TOKENS, packed_product, unsupported
from tests.packed_planes import EVERY_FORM, literal_numbers, random_planes

BFLOAT16 = ml_dtypes.bfloat16
FORMS = {name: form for name, form in EVERY_FORM.items() if not form.integer_inputs}


def check(form: PackedForm, n_out: int, n_in: int, n_tokens: int, **options: Any) -> None:
    """Compare with float64: terms that are exact there, and sums that float32 rounds."""
    planes = random_planes(form, (n_out, n_in), seed=n_in)
    x = np.random.default_rng(n_tokens).normal(size=(n_tokens, n_in)).astype(BFLOAT16)
    numbers = literal_numbers(form, planes).astype(BFLOAT16).astype(np.float64)
    exact, size = x.astype(np.float64) @ numbers.T, np.abs(x.astype(np.float64)) @ np.abs(numbers.T)
    on_device = {name: jnp.asarray(plane) for name, plane in planes.items()}
    y = packed_product(jnp.asarray(x), form, on_device, interpret=True, **options)
    assert y.shape == (n_tokens, n_out) and y.dtype == jnp.bfloat16
    # The result is rounded once to bfloat16, whose numbers are 2 ** -8 apart.
    error = np.abs(np.asarray(y).astype(np.float64) - exact)
    assert (error <= 2**-8 * np.abs(exact) + 1e-6 * size).all(), error.max()


@pytest.mark.parametrize("name", FORMS)
def test_a_product_with_each_form(name: str) -> None:
    """Rows that are no whole tile, tokens that are no whole tile, and two parts of the inputs."""
    check(FORMS[name], 45, 2048, 5, n_cores=2)


@pytest.mark.parametrize("name", ["Q4_1", "Q5_K", "w8", "fp8-blocks"])
@pytest.mark.parametrize("n_tokens", [1, 16, 17, 64, 65, MOST_TOKENS])
def test_each_tile_of_tokens(name: str, n_tokens: int) -> None:
    check(FORMS[name], 32, 512, n_tokens)


@pytest.mark.parametrize(
    ("name", "n_in"), [("Q4_0", 32), ("Q4_0", 96), ("w4-zeros", 64), ("Q8_0", 160), ("fp8", 96), ("w4", 320)]
)
def test_inputs_of_which_few_are_read_at_a_time(name: str, n_in: int) -> None:
    check(FORMS[name], 40, n_in, 3)


@pytest.mark.parametrize("group", [32, 64, 128, 256, 512])
def test_each_size_of_a_group(group: int) -> None:
    check(w4(group, zeros=True), 32, 1024, 2)
    check(w8(group, zeros=True), 32, 1024, 2)


def test_an_experts_weight_and_several_axes_of_outputs() -> None:
    form = FORMS["Q4_0"]
    planes = {name: jnp.asarray(plane) for name, plane in random_planes(form, (3, 16, 64), seed=1).items()}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)), jnp.bfloat16)
    flat = {name: plane.reshape(48, -1) for name, plane in planes.items()}
    assert (
        packed_product(x, form, planes, interpret=True) == packed_product(x, form, flat, interpret=True)
    ).all()


def test_a_row_depends_on_nothing_else_in_the_batch() -> None:
    form = FORMS["Q4_K"]
    planes = {name: jnp.asarray(plane) for name, plane in random_planes(form, (32, 512), seed=2).items()}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 512)), jnp.bfloat16)
    others = x.at[1:].set(jnp.nan)
    y, beside = (packed_product(each, form, planes, interpret=True) for each in (x, others))
    assert (y[0] == beside[0]).all()


def test_what_the_kernel_does_not_support() -> None:
    x = jnp.zeros((4, 256), jnp.bfloat16)
    form = FORMS["Q4_0"]
    assert unsupported(x, form) is None
    assert "float32" in (unsupported(x.astype(jnp.float32), form) or "")
    assert "257 tokens" in (unsupported(jnp.zeros((MOST_TOKENS + 1, 256), jnp.bfloat16), form) or "")
    assert "no multiple of 256" in (unsupported(x[:, :224], FORMS["Q6_K"]) or "")
    assert "no multiple of 32" in (unsupported(x[:, :40], FORMS["w8"]) or "")
    assert "48 inputs" in (unsupported(x, replace(FORMS["w8-zeros"], block=48)) or "")
    assert "integers" in (unsupported(x, EVERY_FORM["w8a8"]) or "")
