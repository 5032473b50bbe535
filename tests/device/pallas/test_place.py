"""The kernel that rotates and writes keys and values, interpreted, against NumPy and pure JAX."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.pallas.place import place, unsupported
from orca_jax.pallas.place_reference import place_reference

BFLOAT16 = ml_dtypes.bfloat16
UNWRITTEN = 7.0  # the value of slots without a token
N_BLOCKS, BLOCK_SIZE = 4, 8
N_SLOTS = N_BLOCKS * BLOCK_SIZE
# Two of the tokens are in no block: they pad the batch.
SLOTS = np.array([9, 31, 0, N_SLOTS, -1, 22], np.int32)
WRITTEN = [(0, 9), (1, 31), (2, 0), (5, 22)]


def turned(head: np.ndarray, angles: np.ndarray, *, interleaved: bool) -> np.ndarray:
    """A head [D] rotated in float64: each pair, as a complex number, times e^(i angle)."""
    n = len(angles)
    result = head.astype(np.float64)
    at = [(2 * i, 2 * i + 1) if interleaved else (i, n + i) for i in range(n)]
    for (a, b), angle in zip(at, angles, strict=True):
        pair = complex(result[a], result[b]) * np.exp(1j * angle)
        result[a], result[b] = pair.real, pair.imag
    return result


def rotation(angles: np.ndarray) -> tuple[jax.Array | None, jax.Array | None]:
    if not angles.shape[1]:
        return None, None
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


@pytest.mark.parametrize(
    ("group", "n_kv_heads", "head_size", "n_pairs", "interleaved"),
    [
        (2, 3, 64, 32, False),
        (2, 3, 64, 32, True),
        (4, 2, 80, 10, False),  # a part of a head, whose size is no power of two
        (1, 5, 96, 16, True),
        (16, 1, 128, 64, False),
        (1, 20, 128, 64, False),  # heads in two thread blocks, the second not full
        (3, 2, 256, 128, False),
        (8, 2, 256, 3, True),
        (2, 3, 64, 0, False),  # not rotated
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_every_slot_gets_its_token_and_no_other_changes(
    dtype: Any, group: int, n_kv_heads: int, head_size: int, n_pairs: int, interleaved: bool
) -> None:
    rng = np.random.default_rng(n_pairs)
    qkv = rng.standard_normal((len(SLOTS), group + 2, n_kv_heads, head_size)).astype(dtype)
    angles = rng.uniform(0, 6, (len(SLOTS), n_pairs))
    shape = N_BLOCKS, n_kv_heads, BLOCK_SIZE, head_size
    caches = [np.full(shape, UNWRITTEN + i, dtype) for i in range(2)]
    queries, keys, values = place(
        jnp.asarray(qkv),
        jnp.asarray(qkv),
        jnp.asarray(SLOTS),
        *rotation(angles),
        *map(jnp.asarray, caches),
        n_queries=group,
        key=group,
        interleaved=interleaved,
        interpret=True,
    )
    wide = qkv.astype(np.float64)
    by_head = partial(np.apply_along_axis, partial(turned, interleaved=interleaved), -1)
    true = np.stack(
        [by_head(token[: group + 1], angles=angle) for token, angle in zip(wide, angles, strict=True)]
    )
    error = {np.float32: 1e-6, np.float16: 2.0**-10, BFLOAT16: 2.0**-7}[dtype]

    def check(found: jax.Array, exact: np.ndarray) -> None:
        assert (np.abs(np.asarray(found, np.float64) - exact) <= error * (1 + np.abs(exact))).all()

    check(queries, true[:, :group])
    true_keys, true_values = (cache.astype(np.float64) for cache in caches)
    for token, slot in WRITTEN:
        at = slot // BLOCK_SIZE, slice(None), slot % BLOCK_SIZE
        true_keys[at], true_values[at] = true[token, group], wide[token, group + 1]
    check(keys, true_keys)
    np.testing.assert_array_equal(np.asarray(values, np.float64), true_values)


@settings(max_examples=30, deadline=None)
@given(
    n_tokens=st.integers(1, 40),
    group=st.sampled_from([0, 1, 3, 16]),
    n_kv_heads=st.integers(1, 5),
    head_size=st.sampled_from([16, 48, 256]),
    size=st.sampled_from([0, 2, 10, 16]),
    interleaved=st.booleans(),
    is_apart=st.booleans(),
    turns_queries=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_equals_the_reference(
    n_tokens: int,
    group: int,
    n_kv_heads: int,
    head_size: int,
    size: int,
    interleaved: bool,
    is_apart: bool,
    turns_queries: bool,
    seed: int,
) -> None:
    """Random slots, also with keys in an array of their own, as after a norm of keys."""
    rng = np.random.default_rng(seed)
    n_blocks = n_tokens // BLOCK_SIZE + 2
    qkv = jnp.asarray(rng.standard_normal((n_tokens, group + 2, n_kv_heads, head_size)), jnp.bfloat16)
    slots = jnp.asarray(rng.permutation(n_blocks * BLOCK_SIZE + 5)[:n_tokens].astype(np.int32) - 2)
    shape = n_blocks, n_kv_heads, BLOCK_SIZE, head_size
    caches = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for _ in range(2)]
    heads, key = (qkv[:, group : group + 1], 0) if is_apart else (qkv, group)
    n_queries = group if turns_queries and not is_apart else 0
    arguments = heads, qkv, slots, *rotation(rng.uniform(0, 100, (n_tokens, size // 2))), *caches
    options = {"n_queries": n_queries, "key": key, "interleaved": interleaved}
    found = place(*arguments, **options, interpret=True)
    for one, other in zip(found, jax.jit(partial(place_reference, **options))(*arguments), strict=True):
        # Sums of two products, which may be one operation or two.
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=2**-7, atol=1e-6)


def test_a_token_whose_numbers_are_not_finite_changes_only_its_slot() -> None:
    qkv = np.ones((2, 3, 1, 16), np.float32)
    qkv[0, :, :, ::5] = np.nan
    qkv[0, 2, :, 1] = np.inf  # of a value, which is copied as it is
    caches = [np.full((1, 1, 4, 16), UNWRITTEN, np.float32) for _ in range(2)]
    cos, sin = rotation(np.zeros((2, 8)))
    queries, keys, values = place(
        jnp.asarray(qkv),
        jnp.asarray(qkv),
        jnp.asarray([2, 0], jnp.int32),
        cos,
        sin,
        jnp.asarray(caches[0]),
        jnp.asarray(caches[1]),
        n_queries=1,
        key=1,
        interpret=True,
    )
    assert (np.asarray(queries)[1] == 1).all()
    for cache in (keys, values):
        assert (np.asarray(cache)[0, 0, 0] == 1).all() and (
            np.asarray(cache)[0, 0, [1, 3]] == UNWRITTEN
        ).all()
    np.testing.assert_array_equal(np.asarray(values)[0, 0, 2], qkv[0, 2, 0])


def test_what_the_kernel_does_not_support() -> None:
    assert unsupported(256, "bfloat16") is None
    assert "float8" in (unsupported(128, "float8_e4m3fn") or "")
    assert "576" in (unsupported(576, "bfloat16") or "")
