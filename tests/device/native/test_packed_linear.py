"""Products of packed weights in C, against a plain statement of the same integers and against float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.execution.matmul_backend import choose_products
from orca_jax.families.packed_form import PackedForm, fp8
from orca_jax.model.packed_weight import unpacked
from orca_jax.model.weight import kind_of
from orca_jax.native import packed_products
from orca_jax.native.operations import PACKED_MOST
from orca_jax.native.packed_products import has_packed_form, native_packed, native_packed_grouped
from tests.device.native.native_form import multiplies_bfloat16, needs_native, other_lanes
from tests.packed_planes import EVERY_FORM, random_planes

CPU = jax.devices("cpu")[0]
BFLOAT16 = ml_dtypes.bfloat16
RUN = 32
EVERY = pytest.mark.parametrize("name", EVERY_FORM)
# Codes of four bits, of six, signed ones, a table's, signed ones with a scale for a token, and FP8.
EACH_KIND = ["Q4_1", "Q6_K", "Q8_0", "IQ4_NL", "w8a8", "fp8-blocks"]

# The product as other processors compute it: AVX2, AVX2 with VNNI, AVX-512 without it or without products of
# bfloat16; or in many small pieces.
BUILDS: dict[str, dict[str, int]] = {
    "narrow": {"LANES": 8, "VNNI": 0},
    "small": {"PANEL_INPUTS": 256, "ITEM_TOKENS": 24},
    **({"narrow vnni": {"LANES": 8}, "no vnni": {"VNNI": 0}} if other_lanes() == 8 else {}),
    **({"no bfloat16": {"PAIRS": 0}} if multiplies_bfloat16() else {}),
}

Planes = dict[str, np.ndarray]


@contextmanager
def built_with(**macros: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_products, "target", partial(packed_products.target, **macros))
        yield


def product(
    x: np.ndarray, form: PackedForm, planes: Planes, n_tokens: int | None = None, *, steady: bool = False
) -> np.ndarray:
    count = None if n_tokens is None else jnp.array([n_tokens], jnp.int32)
    on_device = {k: jnp.asarray(v) for k, v in planes.items()}
    return np.asarray(native_packed(jnp.asarray(x), form, on_device, count, steady=steady))


def as_taken(x: np.ndarray, form: PackedForm, macros: dict[str, int]) -> np.ndarray:
    """x [T, in] as the product takes it, in float64: rounded, but with FP8 codes only on some processors."""
    wide = x.astype(np.float32)
    if form.code == "fp8":
        pairs = multiplies_bfloat16() and macros.get("PAIRS", 1) and macros.get("LANES", 16) == 16
        return (wide.astype(BFLOAT16) if pairs else wide).astype(np.float64)
    run = x.shape[1] if form.integer_inputs else RUN
    runs = wide.reshape(len(x), x.shape[1] // run, run)
    scale = np.abs(runs).max(-1, keepdims=True) / np.float32(127)
    scale[scale < np.finfo(np.float32).tiny] = 0
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    return (np.rint(runs * inverse) * scale).reshape(x.shape).astype(np.float64)


def as_stated(
    x: np.ndarray, form: PackedForm, weight: np.ndarray, macros: dict[str, int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and the sum of its terms' magnitudes, by which float32 sums may differ."""
    taken, wide = as_taken(x, form, macros or {}), weight.T.astype(np.float64)
    return taken @ wide, np.abs(taken) @ np.abs(wide)


def weights(form: PackedForm, n_out: int, n_in: int, seed: int) -> tuple[Planes, np.ndarray]:
    planes = random_planes(form, (n_out, n_in), seed)
    return planes, numbers_of(form, planes)


def numbers_of(form: PackedForm, planes: Planes) -> np.ndarray:
    return np.asarray(unpacked(form, {k: jnp.asarray(v) for k, v in planes.items()}, jnp.float32))


def inputs(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def n_inputs(form: PackedForm, units: int) -> int:
    """`units` of the fewest inputs that can be multiplied."""
    return units * max(RUN, form.multiple)


# A scale times a code plus a minimum, of which the terms are larger than their sum.
TERMS = 8e-6


@needs_native
@settings(max_examples=25)
@given(
    name=st.sampled_from([*EACH_KIND, "Q4_K", "w4-zeros"]),
    units=st.integers(1, 5),
    n_out=st.integers(16, 50),
    n_tokens=st.integers(1, 30),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_equals_the_statement_and_is_zero_after_the_real_tokens(
    name: str, units: int, n_out: int, n_tokens: int, share: float, seed: int
) -> None:
    form = EVERY_FORM[name]
    n_in = n_inputs(form, units)
    planes, weight = weights(form, n_out, n_in, seed)
    x, n_real = inputs(seed, n_tokens, n_in), round(share * n_tokens)
    x[n_real:] = np.nan  # as what was never written may be
    given = product(x, form, planes, n_real)
    true, terms = as_stated(x[:n_real], form, weight)
    assert (np.abs(given[:n_real] - true) <= TERMS * terms + 1e-12).all()
    assert not given[n_real:].any()


@needs_native
@EVERY
def test_is_near_the_product_of_the_numbers(name: str) -> None:
    form = EVERY_FORM[name]
    n_in = n_inputs(form, 8)
    planes, weight = weights(form, 100, n_in, 1)
    x = inputs(2, 70, n_in)
    true = x.astype(np.float64) @ weight.T.astype(np.float64)
    given = product(x, form, planes)
    # Each input is off by at most half of its run's or token's scale.
    run = n_in if form.integer_inputs else RUN
    bound = np.repeat(np.abs(x.reshape(len(x), -1, run)).max(-1) / 254, run, 1) @ np.abs(weight.T)
    assert (np.abs(given - true) <= 1.001 * bound).all()
    assert np.sqrt(np.mean((given - true) ** 2)) < 0.01 * np.sqrt(np.mean(true**2))


@needs_native
@pytest.mark.parametrize(
    "name",
    [name if name in EACH_KIND else pytest.param(name, marks=pytest.mark.matrix) for name in EVERY_FORM],
)
@pytest.mark.parametrize("build", BUILDS)
def test_on_other_processors(name: str, build: str) -> None:
    form = EVERY_FORM[name]
    n_in = n_inputs(form, 4) + max(RUN, form.multiple)
    planes, weight = weights(form, 37, n_in, 3)
    x = inputs(4, 27, n_in)
    true, terms = as_stated(x, form, weight, BUILDS[build])
    with built_with(**BUILDS[build]):
        assert (np.abs(product(x, form, planes) - true) <= TERMS * terms).all()
        assert (np.abs(product(x[3:4], form, planes) - true[3]) <= TERMS * terms[3]).all()


@needs_native
@pytest.mark.parametrize("name", EACH_KIND)
def test_integers_do_not_overflow(name: str) -> None:
    form = EVERY_FORM[name]
    n_in = n_inputs(form, 2)
    planes, _ = weights(form, 32, n_in, 5)
    codes = planes["codes"].view(np.uint8)
    greatest = 0xFE if form.code == "fp8" else 0xFF  # 0xFF is NaN there
    codes[:8], codes[8:16], codes[16:24] = greatest, 0x00, 0x80
    if codes.dtype != planes["codes"].dtype:
        codes[24:] = 0x7F
    if "high" in planes:
        planes["high"][:24] = 0xFF
    weight = numbers_of(form, planes)
    x = np.full((3, n_in), 3.0, np.float32)
    x[1] = -3
    x[2, ::2] = -3
    for macros in ({}, *BUILDS.values()):
        true, terms = as_stated(x, form, weight, macros)
        with built_with(**macros):
            assert (np.abs(product(x, form, planes) - true) <= TERMS * terms).all(), macros


@needs_native
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q6_K", "w4-zeros", "w8-zeros", "w8a8", "fp8"])
def test_a_token_has_the_same_bits_whatever_the_others(name: str) -> None:
    form = EVERY_FORM[name]
    n_in = n_inputs(form, 4)
    planes, _ = weights(form, 75, n_in, 6)
    x = inputs(7, 300, n_in)
    alone = product(x[:1], form, planes, steady=True)[0]
    for n in (2, 3, 11, 12, 13, 40, 252, 253, 300):
        for at in {0, n // 2, n - 1}:
            others = inputs(n, n, n_in)
            others[at] = x[0]
            assert np.array_equal(product(others, form, planes, steady=True)[at], alone), (n, at)
    if form.code != "fp8":
        assert np.array_equal(product(x[:1], form, planes)[0], alone)


@needs_native
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "w8", "fp8"])
def test_bfloat16_tokens(name: str) -> None:
    form = EVERY_FORM[name]
    n_in = n_inputs(form, 4)
    planes, weight = weights(form, 44, n_in, 8)
    x = inputs(9, 20, n_in).astype(BFLOAT16)
    given = product(x, form, planes)
    true, terms = as_stated(x, form, weight)
    assert given.dtype == BFLOAT16
    assert (np.abs(given.astype(np.float64) - true) <= TERMS * terms + 2.0**-8 * np.abs(true)).all()


@needs_native
@pytest.mark.parametrize("name", ["Q4_1", "w8a8", "fp8"])
def test_tokens_of_zeros_tiny_huge_and_no_numbers(name: str) -> None:
    form = EVERY_FORM[name]
    planes, weight = weights(form, 32, 128, 10)
    x = inputs(11, 7, 128)
    x[0] = 0
    x[1] *= 1e-32
    x[2] = 1e-40  # all less than the least scale
    x[3] *= 1e30
    x[4, 5], x[5, 40] = np.nan, np.inf
    given = product(x, form, planes)
    assert not given[0].any() and np.abs(given[2]).max() < 1e-36
    assert not np.isfinite(given[4:6]).any()
    for t in (1, 3, 6):
        true, terms = as_stated(x[t : t + 1], form, weight)
        assert (np.abs(given[t] - true) <= TERMS * terms).all(), t


@needs_native
@pytest.mark.parametrize("macros", [{}, {"LANES": other_lanes()}] if other_lanes() == 8 else [{}])
def test_every_number_of_fp8_counts_the_smallest_too(macros: dict[str, int]) -> None:
    form = EVERY_FORM["fp8-blocks"]
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    x = np.eye(256, dtype=np.float32) * np.float32(1.5)
    planes = {
        "codes": np.tile(np.arange(256, dtype=np.uint8), (16, 1)),
        "scales": np.ones((16, 2), np.float32),
    }
    planes["scales"][3] = 1e-30
    with built_with(**macros):
        every = product(x, form, planes)
        alone = np.concatenate([product(x[i : i + 1], form, planes) for i in (1, 7, 8, 129, 254)])
    is_number = np.isfinite(numbers)
    np.testing.assert_array_equal(every[is_number, 0], 1.5 * numbers[is_number])
    np.testing.assert_array_equal(alone[:, 0], 1.5 * numbers[[1, 7, 8, 129, 254]])
    np.testing.assert_allclose(every[is_number, 3], 1.5e-30 * numbers[is_number], rtol=1e-6)
    assert (np.abs(every[~is_number, 0]) == 720).all()  # NaN


@needs_native
@pytest.mark.parametrize("macros", [{}, *BUILDS.values()])
@pytest.mark.parametrize("block", [32, 64, 96, 384, 576])
def test_scales_of_fp8_for_any_number_of_runs(block: int, macros: dict[str, int]) -> None:
    """Blocks end where panels do, within them, and after them."""
    form = fp8(block)
    planes, weight = weights(form, 40, 1152, 25)
    x = inputs(26, 14, 1152)
    true, terms = as_stated(x, form, weight, macros)
    with built_with(**macros):
        for n in (1, 2, 14):
            assert (np.abs(product(x[:n], form, planes) - true[:n]) <= TERMS * terms[:n]).all(), n


@needs_native
def test_large_products_are_split_over_threads() -> None:
    form = EVERY_FORM["Q8_0"]
    planes = random_planes(form, (2305, 1056), 12)
    weight = planes["codes"] * np.repeat(planes["scales"].astype(np.float32), RUN, 1)
    x = inputs(13, 600, 1056)
    for some in (x, x[:5]):
        true, terms = as_stated(some, form, weight)
        assert (np.abs(product(some, form, planes) - true) <= TERMS * terms).all()


@needs_native
def test_weights_of_several_axes_are_flattened() -> None:
    form = EVERY_FORM["w8"]
    planes, _ = weights(form, 48, 64, 14)
    x = inputs(15, 3, 64)
    shaped = {name: plane.reshape(3, 16, *plane.shape[1:]) for name, plane in planes.items()}
    assert np.array_equal(product(x, form, shaped), product(x, form, planes))


@needs_native
@pytest.mark.matrix(but=["Q6_K", "w4-zeros", "MXFP4", "fp8-blocks"])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q4_1", "w4-zeros", "w8", "MXFP4", "fp8-blocks"])
def test_groups_of_rows_have_the_results_of_their_weights(name: str) -> None:
    form = EVERY_FORM[name]
    n_in = n_inputs(form, 2)
    planes = {name: jnp.asarray(plane) for name, plane in random_planes(form, (5, 3, 16, n_in), 16).items()}
    x = inputs(17, 60, n_in)
    for sizes in ([13, 0, 1, 30, 2], [0, 0, 0, 0, 0], [0, 60, 0, 0, 0], [-1, 50, 0, 0, 50]):
        given = np.asarray(native_packed_grouped(jnp.asarray(x), form, planes, jnp.array(sizes, jnp.int32)))
        first = 0
        for i, size in enumerate(sizes):
            end = min(len(x), first + max(0, size))
            if end > first:
                of_group = {name: np.asarray(plane[i]) for name, plane in planes.items()}
                assert np.array_equal(given[first:end], product(x[first:end], form, of_group)), (sizes, i)
            first = end
        assert not given[first:].any()


@needs_native
def test_inputs_in_an_order_of_the_planes() -> None:
    form = replace(EVERY_FORM["w4"], ordered=True)
    planes, _ = weights(EVERY_FORM["w4"], 48, 64, 22)
    order = np.random.default_rng(23).permutation(64).astype(np.int32)
    held = {name: jnp.asarray(plane) for name, plane in (planes | {"order": order}).items()}
    x = inputs(24, 3, 64)
    found = choose_products(CPU, np.float32).bind(None)(jnp.asarray(x), kind_of(form)(form, held))
    assert np.array_equal(found, product(x[:, order], EVERY_FORM["w4"], planes))


def test_shapes_and_forms_that_it_does_not_support() -> None:
    x = jnp.zeros((3, 256))
    assert all(has_packed_form(x, form, 16) for form in EVERY_FORM.values())
    assert not has_packed_form(x, EVERY_FORM["Q4_0"], 15)
    assert not has_packed_form(x.astype(jnp.float16), EVERY_FORM["Q4_0"], 16)
    assert not has_packed_form(jnp.zeros((3, 128)), EVERY_FORM["Q4_K"], 16)
    assert not has_packed_form(jnp.zeros((3, 40)), EVERY_FORM["w8"], 16)


@needs_native
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_cpu_with_a_compiler_multiplies_packed_weights_with_it(dtype: Any) -> None:
    form = EVERY_FORM["Q4_1"]
    planes = random_planes(form, (48, 64), 18)
    experts = {name: jnp.asarray(plane) for name, plane in random_planes(form, (2, 48, 64), 19).items()}
    x = jnp.asarray(inputs(20, 5, 64), dtype)
    for deterministic in (False, True):
        chosen = choose_products(CPU, dtype, deterministic=deterministic).bind(jnp.array([4], jnp.int32))
        y = chosen(x, kind_of(form)(form, planes))
        assert np.array_equal(y, product(np.asarray(x), form, planes, 4))
        sizes = jnp.array([3, 2], jnp.int32)
        by_expert = chosen.by_expert(x, kind_of(form)(form, experts), sizes)
        assert np.array_equal(by_expert, native_packed_grouped(x, form, experts, sizes))
    small = random_planes(form, (8, 64), 21)  # too few outputs for C
    true = np.asarray(x, np.float32) @ numbers_of(form, small).T
    np.testing.assert_allclose(chosen(x, kind_of(form)(form, small)), true, rtol=0.02, atol=0.02)


@needs_native
def test_is_compiled_as_one_call() -> None:
    form = EVERY_FORM["Q4_K"]
    planes = {name: jnp.asarray(plane) for name, plane in random_planes(form, (64, 512), 0).items()}
    compiled = jax.jit(partial(native_packed, form=form)).lower(jnp.zeros((4, 512)), planes=planes).compile()
    memory = compiled.memory_analysis()
    assert memory is None or memory.temp_size_in_bytes < 64 * 512  # no unpacked matrix


@needs_native
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("n_tokens", [1, 13])
def test_integers_of_the_longest_rows_are_added_up_exactly(sign: int, n_tokens: int) -> None:
    form, n_in = EVERY_FORM["w8a8"], PACKED_MOST
    planes = random_planes(form, (16, n_in), 0)
    planes = planes | {"codes": np.full_like(planes["codes"], 127)}
    x = np.full((n_tokens, n_in), sign * 127, np.float32)
    assert has_packed_form(jnp.asarray(x), form, 16)
    true = np.float32(sign * 127 * 127 * n_in) * planes["scales"].reshape(16).astype(np.float32)
    assert np.allclose(product(x, form, planes), true, rtol=1e-6)
    assert not has_packed_form(jnp.zeros((1, n_in + RUN)), form, 16)
