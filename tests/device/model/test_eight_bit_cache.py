"""Keys and values in eight bits: rounding as in NumPy, and attention in pure JAX and in C by definition."""

from functools import partial
from itertools import pairwise
from typing import Any, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from orca_jax.families.attention_config import Attention, KVCode
from orca_jax.model.attention import attention_work, split_attention
from orca_jax.model.kv_cache import (
    LayerCache,
    code_numbers,
    copy_blocks,
    in_eight_bits,
    layer_cache,
    write,
)
from orca_jax.model.rotation import Rotation, rotate
from orca_jax.native import place
from orca_jax.native import split_attention as native
from orca_jax.native.place import native_place
from orca_jax.native.split_attention import native_split_attention
from tests.device.model.ragged import Ragged
from tests.device.native.attention_truth import MOST_TOKENS, Form, batch_of, truth
from tests.device.native.native_form import needs_native, other_lanes

CODES: tuple[KVCode, ...] = get_args(KVCode)
BFLOAT16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
ROWS = [(40, 77), (1, 1), (1, 200), (3, 60), (9, 9), (20, 170)]
FORMS = [
    Form(1, 4, 16, 8),
    Form(3, 2, 64, 16),
    Form(4, 2, 64, 16, window=37, with_sinks=True),
    Form(2, 2, 80, 16, soft_cap=5.0, scale=0.3),
    Form(2, 2, 16, 8, alibi=True),
    Form(1, 4, 64, 16, causal=False, furthest=20),
    Form(13, 1, 64, 16),
]


def rounded(code: KVCode, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of x [..., D], worked in NumPy's float32."""
    greatest = {"int8": 127, "fp8": 448}[code]
    scale = np.abs(x).max(axis=-1) * np.float32(1 / greatest)
    with np.errstate(all="ignore"):
        inverse = np.where(scale >= np.float32(2.0**-100), np.float32(1) / scale, np.float32(0))
        scaled = x * inverse[..., None]
        codes = np.rint(scaled).astype(np.int8) if code == "int8" else scaled.astype(E4M3).view(np.uint8)
    return codes, scale


def numbers(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The numbers that a cache of eight bits holds, in float64."""
    values = codes if codes.dtype == np.int8 else codes.view(E4M3)
    with np.errstate(invalid="ignore"):  # 0 times infinity
        return values.astype(np.float64) * np.asarray(scales, np.float64)[..., None]


def in_codes(code: KVCode, batch: Ragged) -> tuple[LayerCache, Ragged]:
    """A batch's cache in eight bits, and the batch with what that holds; unused slots have scales of NaN."""
    pools = [rounded(code, np.nan_to_num(pool)) for pool in (batch.k_cache, batch.v_cache)]
    (keys, of_keys), (values, of_values) = pools
    used = ~np.isnan(batch.k_cache).any(axis=-1)
    of_keys, of_values = (np.where(used, each, np.float32(np.nan)) for each in (of_keys, of_values))
    cache = LayerCache(*map(jnp.asarray, (keys, values, of_keys, of_values)))
    return cache, batch._replace(k_cache=numbers(keys, of_keys), v_cache=numbers(values, of_values))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = arrays(np.float32, (3, 16), elements=finite | st.floats(-4, 4, width=32))


@pytest.mark.parametrize("code", CODES)
@given(x=vectors)
def test_rounding_is_that_of_numpy_to_the_bit(code: KVCode, x: np.ndarray) -> None:
    x = np.where(np.abs(x) < 2.0**-80, 0, x)  # a CPU's programs count subnormal numbers as 0
    codes, scales = jax.jit(in_eight_bits, static_argnums=0)(code, x)
    true = rounded(code, x)
    np.testing.assert_array_equal(np.asarray(scales), true[1])
    np.testing.assert_array_equal(
        code_numbers(codes, jnp.float32), code_numbers(jnp.asarray(true[0]), jnp.float32)
    )
    # Half a unit of int8, or half of the last of e4m3's three bits of mantissa; small e4m3 have a fixed unit.
    unit = true[1][:, None] * (0.5 if code == "int8" else np.maximum(2.0**-10, 0))
    error = np.abs(numbers(np.asarray(codes), true[1]) - x.astype(np.float64))
    allowed = unit if code == "int8" else np.maximum(unit, np.abs(x.astype(np.float64)) * 2.0**-4)
    assert (error <= allowed * (1 + 1e-5) + 1e-24).all()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_stay_so(code: KVCode, bad: float) -> None:
    x = np.ones((2, 16), np.float32)
    x[0, 3] = bad
    codes, scales = jax.jit(in_eight_bits, static_argnums=0)(code, jnp.asarray(x))
    assert not np.isfinite(scales[0]) and np.isfinite(scales[1])
    assert np.isnan(numbers(np.asarray(codes), np.asarray(scales))[0]).any()


def empty(code: KVCode, *, n_blocks: int, block_size: int, heads: int, size: int) -> LayerCache:
    attention = Attention(n_heads=heads, n_kv_heads=heads, head_size=size, kv_code=code)
    return layer_cache(attention, n_blocks=n_blocks, block_size=block_size, stored=np.float32, make=jnp.zeros)


write_12 = jax.jit(write)


@pytest.mark.parametrize("code", CODES)
@settings(max_examples=20)
@given(order=st.permutations(range(12)), cuts=st.sets(st.integers(1, 11)))
def test_a_token_is_held_alike_whatever_is_written_before_or_after_it(
    code: KVCode, order: list[int], cuts: set[int]
) -> None:
    """So that outputs depend neither on the batch, nor on how a prompt is cut, nor on preemption."""
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((12, 2, 16)).astype(np.float32) * rng.uniform(0, 9, (12, 1, 1)) for _ in "kv")
    k, v = k.astype(np.float32), v.astype(np.float32)
    cache = empty(code, n_blocks=3, block_size=4, heads=2, size=16)
    at_once = write_12(cache, jnp.asarray(k), jnp.asarray(v), jnp.arange(12))
    edges = [0, *sorted(cuts), 12]
    for begin, end in pairwise(edges):
        piece = np.isin(np.arange(12), range(begin, end))
        slots = np.where(piece, order, 12)  # no slot 12: padding, so that one program serves every piece
        cache = write_12(cache, jnp.asarray(k[order]), jnp.asarray(v[order]), jnp.asarray(slots))
    for ours, theirs in zip(*map(jax.tree.leaves, (cache, at_once)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    codes, scales = rounded(code, k)
    np.testing.assert_array_equal(np.asarray(cache.keys).swapaxes(1, 2).reshape(12, 2, 16), codes)
    np.testing.assert_array_equal(np.asarray(cache.key_scales).swapaxes(1, 2).reshape(12, 2), scales)


def test_a_token_without_a_slot_is_dropped_and_blocks_are_copied_with_their_scales() -> None:
    cache = empty("int8", n_blocks=3, block_size=4, heads=1, size=16)
    ones = jnp.ones((2, 1, 16))
    cache = write(cache, ones, 2 * ones, jnp.array([5, 12], jnp.int32))
    assert int((cache.keys != 0).sum()) == 16
    (copied,) = copy_blocks([cache], jnp.array([[1, 2], [0, 9]], jnp.int32))
    for before, after in zip(*map(jax.tree.leaves, (cache, copied)), strict=True):
        np.testing.assert_array_equal(after[2], before[1])
        np.testing.assert_array_equal(after[:2], before[:2])
    held = numbers(np.asarray(copied.values), np.asarray(copied.value_scales))
    np.testing.assert_allclose(held[2, 0, 1], 2, rtol=1e-6)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    ("form", "follow_lengths"),
    [
        (FORMS[0], True),
        (FORMS[1], False),
        (FORMS[2], True),
        (FORMS[2], False),
        (FORMS[3], True),
        (FORMS[4], True),
    ],
)
def test_pure_jax_attends_to_what_the_cache_holds(code: KVCode, form: Form, follow_lengths: bool) -> None:
    cache, held = in_codes(code, batch_of(ROWS, form, seed=3))
    q, table, row_start, kv_length = (jnp.asarray(each) for each in (np.nan_to_num(held.q), *held[3:]))
    work = attention_work(row_start, kv_length, MOST_TOKENS, follow_lengths=follow_lengths)
    options = {name: value for name, value in form.options().items() if value is not None}
    given = split_attention(
        q, cache, table, row_start, kv_length, work, follow_lengths=follow_lengths, **options
    )
    np.testing.assert_allclose(given, truth(held, form), atol=2e-5, rtol=2e-5)


# Each code, head size, block size and number of lanes is a program that takes a C compiler seconds.
@needs_native
@pytest.mark.parametrize(
    ("code", "form", "lanes"),
    [
        *(("int8", form, 0) for form in FORMS),
        *(("fp8", form, 0) for form in FORMS if (form.head_size, form.block_size) == (64, 16)),
        *(
            pytest.param(code, form, lanes, marks=pytest.mark.long)
            for code in CODES
            for form in FORMS
            for lanes in (0, other_lanes())
        ),
    ],
)
def test_c_attends_to_what_the_cache_holds(
    code: KVCode, form: Form, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lanes:
        monkeypatch.setattr(native, "target", partial(native.target, LANES=lanes))
    cache, held = in_codes(code, batch_of(ROWS, form, seed=4))
    rows = map(jnp.asarray, held[3:])
    given = native_split_attention(
        jnp.asarray(held.q),
        *cache.both,
        *rows,
        key_scales=cache.key_scales,
        value_scales=cache.value_scales,
        **form.options(),
    )
    np.testing.assert_allclose(given, truth(held, form), atol=2e-5, rtol=2e-5)


@needs_native
@pytest.mark.parametrize("lanes", [0, other_lanes()])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_c_writes_what_pure_jax_writes(
    dtype: Any, code: KVCode, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit where nothing is rotated; a rotated key may be rounded to the next code."""
    if lanes:
        monkeypatch.setattr(place, "target", partial(place.target, LANES=lanes))
    n_tokens, heads, size = 70, 3, 48
    rng = np.random.default_rng(1)
    qkv = rng.standard_normal((n_tokens, 4, heads, size)) * np.exp(
        rng.uniform(-9, 9, (n_tokens, 1, heads, 1))
    )
    qkv[3, 2, 1] = qkv[4, 3, 0] = 0
    qkv[5, 2, 0, 7] = np.nan
    qkv = jnp.asarray(qkv.astype(dtype))
    slots = jnp.asarray(rng.permutation(100)[:n_tokens].astype(np.int32))
    cache = empty(code, n_blocks=6, block_size=16, heads=heads, size=size)
    leaves = jax.tree.leaves(cache)
    true = jax.jit(write)(cache, qkv[:, 2], qkv[:, 3], slots)
    _, *written = native_place(qkv, qkv, slots, None, None, *leaves, n_queries=2, key=2)
    for ours, theirs in zip(written, jax.tree.leaves(true), strict=True):
        finite = np.isfinite(np.asarray(true.key_scales))[(...,) + (None,) * (ours.ndim - 3)]
        np.testing.assert_array_equal(np.where(finite, ours, 0), np.where(finite, theirs, 0))
    assert np.isnan(written[2]).sum() == np.isnan(np.asarray(true.key_scales)).sum() == (int(slots[5]) < 96)
    angles = rng.uniform(0, 6, (n_tokens, 8))
    by = Rotation(*(jnp.asarray(each(angles), jnp.float32) for each in (np.cos, np.sin)))
    _, *written = native_place(qkv, qkv, slots, by.cos, by.sin, *leaves, n_queries=2, key=2)
    turned = rotate(qkv[:, 2:3], by, interleaved=False)[:, 0]
    true = jax.jit(write)(cache, turned, qkv[:, 3], slots)
    ours, theirs = (numbers(np.asarray(each[0]), np.asarray(each[2])) for each in (written, true))
    greatest = np.abs(np.nan_to_num(theirs)).max(axis=-1, keepdims=True)
    error = np.abs(ours - theirs) / np.where(greatest == 0, 1, greatest)
    assert np.nanmax(error) <= (1.01 / 127 if code == "int8" else 1.01 / 14) + (
        2.0**-7 if dtype is BFLOAT16 else 0
    )
