"""The C code that writes keys and values into the cache and rotates, against NumPy and the pure-JAX form."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.model.kv_cache import LayerCache, write
from orca_jax.model.rotation import Rotation, rotate
from orca_jax.native import place
from orca_jax.native.place import native_place
from tests.device.native.native_form import needs_native, other_lanes

BFLOAT16 = ml_dtypes.bfloat16
UNWRITTEN = 7.0  # the value of slots without a token

pytestmark = needs_native


def turned(head: np.ndarray, angles: np.ndarray, *, interleaved: bool) -> np.ndarray:
    """A head [D] rotated in float64: each pair, as a complex number, times e^(i angle)."""
    n = len(angles)
    head = head.astype(np.float64)
    at = [(2 * i, 2 * i + 1) if interleaved else (i, n + i) for i in range(n)]
    result = head.copy()
    for (a, b), angle in zip(at, angles, strict=True):
        pair = complex(head[a], head[b]) * np.exp(1j * angle)
        result[a], result[b] = pair.real, pair.imag
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("n_pairs", [0, 3, 16])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_every_slot_gets_its_token_and_no_other_changes(dtype: Any, n_pairs: int, interleaved: bool) -> None:
    n_tokens, group, n_kv_heads, head_size, n_blocks, block_size = 6, 2, 3, 32, 4, 8
    rng = np.random.default_rng(n_pairs)
    qkv = rng.standard_normal((n_tokens, group + 2, n_kv_heads, head_size)).astype(dtype)
    angles = rng.uniform(0, 6, (n_tokens, n_pairs))
    slots = np.array([9, 31, 0, n_blocks * block_size, -1, 22], np.int32)  # two of them are in no block
    stored = np.uint16 if dtype is BFLOAT16 else dtype
    caches = [np.full((n_blocks, n_kv_heads, block_size, head_size), UNWRITTEN, dtype) for _ in range(2)]
    rotation = (
        [np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)] if n_pairs else [None] * 2
    )
    queries, keys, values = jax.jit(
        partial(native_place, n_queries=group, key=group, interleaved=interleaved)
    )(qkv, qkv, slots, *rotation, *(jnp.asarray(cache.view(stored)) for cache in caches))
    error = 2.0**-8 * 4 if dtype is BFLOAT16 else 1e-6
    for token in range(n_tokens):
        for head in range(n_kv_heads):
            for g in range(group):
                true = turned(qkv[token, g, head], angles[token], interleaved=interleaved)
                assert np.abs(np.asarray(queries)[token, g, head].astype(np.float64) - true).max() <= error
    true_keys, true_values = (cache.astype(np.float64) for cache in caches)
    for token, slot in [(0, 9), (1, 31), (2, 0), (5, 22)]:
        for head in range(n_kv_heads):
            key = turned(qkv[token, group, head], angles[token], interleaved=interleaved)
            true_keys[slot // block_size, head, slot % block_size] = key
            true_values[slot // block_size, head, slot % block_size] = qkv[token, group + 1, head]
    assert np.abs(np.asarray(keys).view(dtype).astype(np.float64) - true_keys).max() <= error
    np.testing.assert_array_equal(np.asarray(values).view(dtype).astype(np.float64), true_values)


@settings(max_examples=60, deadline=None)
@given(
    n_tokens=st.integers(1, 70),
    group=st.integers(1, 3),
    n_kv_heads=st.integers(1, 4),
    head_size=st.sampled_from([16, 48, 256]),
    size=st.sampled_from([0, 2, 10, 16]),
    interleaved=st.booleans(),
    in_half=st.booleans(),
    is_apart=st.booleans(),
    lanes=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_equals_pure_jax(
    n_tokens: int,
    group: int,
    n_kv_heads: int,
    head_size: int,
    size: int,
    interleaved: bool,
    in_half: bool,
    is_apart: bool,
    lanes: bool,
    seed: int,
) -> None:
    """Random vectors, also with keys and values in separate arrays, as after a norm of keys."""
    dtype, block_size = jnp.bfloat16 if in_half else jnp.float32, 16
    rng = np.random.default_rng(seed)
    n_blocks = n_tokens // block_size + 2
    qkv = jnp.asarray(rng.standard_normal((n_tokens, group + 2, n_kv_heads, head_size)).astype(dtype))
    slots = jnp.asarray(rng.permutation(n_blocks * block_size + 5)[:n_tokens].astype(np.int32))
    angles = rng.uniform(0, 100, (n_tokens, size // 2))
    by = Rotation(*(jnp.asarray(each(angles), jnp.float32) for each in (np.cos, np.sin)))
    stored = jnp.uint16 if in_half else jnp.float32
    shape = n_blocks, n_kv_heads, block_size, head_size
    cache = LayerCache(*(jnp.asarray(np.ones(shape, stored)) for _ in range(2)))

    # Each in one program: op by op, most of the time goes into compiling.
    @jax.jit
    def pure(qkv: jax.Array, slots: jax.Array, by: Rotation, cache: LayerCache) -> tuple[Any, LayerCache]:
        queries, keys = qkv[:, :group], qkv[:, group : group + 1]
        if size:
            queries, keys = (rotate(each, by, interleaved=interleaved) for each in (queries, keys))
        return queries, write(cache, keys[:, 0], qkv[:, -1], slots)

    @jax.jit
    def in_c(qkv: jax.Array, slots: jax.Array, by: Rotation, cache: LayerCache) -> Any:
        return native_place(
            qkv[:, group : group + 1] if is_apart else qkv,
            qkv,
            slots,
            by.cos if size else None,
            by.sin if size else None,
            *cache.both,
            n_queries=0 if is_apart else group,
            key=0 if is_apart else group,
            interleaved=interleaved,
        )

    queries, written = pure(qkv, slots, by, cache)
    with pytest.MonkeyPatch.context() as patch:
        if lanes:
            patch.setattr(place, "target", partial(place.target, LANES=other_lanes()))
        own, *caches = in_c(qkv, slots, by, cache)
    error = 2.0**-6 if in_half else 1e-5
    assert own.shape == (n_tokens, 0 if is_apart else group, n_kv_heads, head_size)
    if not is_apart:
        np.testing.assert_allclose(np.asarray(own, np.float32), np.asarray(queries, np.float32), atol=error)
    numbers = [np.asarray(each).view(BFLOAT16) if in_half else np.asarray(each) for each in caches]
    true = [np.asarray(each).view(BFLOAT16) if in_half else np.asarray(each) for each in written.both]
    np.testing.assert_allclose(numbers[0].astype(np.float32), true[0].astype(np.float32), atol=error)
    np.testing.assert_array_equal(numbers[1], true[1])


def test_a_donated_cache_is_written_in_place() -> None:
    shape = (64, 2, 16, 16)
    qkv, slots = jnp.ones((3, 3, 2, 16)), jnp.array([5, 40, 900], jnp.int32)
    keys, values = jnp.zeros(shape), jnp.zeros(shape)

    def step(keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, keys, values = native_place(qkv, qkv, slots, None, None, keys, values, n_queries=0, key=1)
        return keys, values

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(keys, values).compile()
    assert " copy(" not in (compiled.as_text() or " copy(")
    where = keys.unsafe_buffer_pointer(), values.unsafe_buffer_pointer()
    keys, values = compiled(keys, values)
    assert (keys.unsafe_buffer_pointer(), values.unsafe_buffer_pointer()) == where
    assert np.asarray(keys).sum() == 3 * 2 * 16
