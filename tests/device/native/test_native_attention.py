"""The CPU's attention in C, against a dense softmax per query in float64."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.config import Attention
from orca_jax.errors import ConfigError
from orca_jax.execution.attention_backend import AttentionChoice, choose_attention
from orca_jax.families.presets import PRESETS
from orca_jax.native import split_attention
from orca_jax.native.split_attention import native_split_attention, unsupported
from tests.device.model.ragged import Ragged
from tests.device.native.attention_truth import MOST_KEYS, MOST_ROWS, MOST_TOKENS, Form, batch_of, truth
from tests.device.native.native_form import needs_native, other_lanes

GPT2 = PRESETS["gpt2"]
FORMS = [
    Form(1, 4, 16, 8),
    Form(1, 3, 64, 16),
    Form(1, 2, 128, 32),
    Form(1, 1, 48, 64),
    Form(3, 4, 64, 16),
    Form(7, 1, 80, 16),
    Form(9, 2, 96, 16),
    Form(2, 5, 256, 8, scale=0.3),
    Form(4, 2, 64, 16, window=1),
    Form(1, 3, 64, 16, window=24),
    Form(5, 1, 64, 16, window=37, soft_cap=2.0),
    Form(71, 1, 64, 16, window=100),
    Form(2, 2, 64, 16, soft_cap=50.0, scale=3.0),
    Form(1, 8, 64, 16, alibi=True),
    Form(4, 2, 16, 8, window=50, soft_cap=5.0, alibi=True),
    Form(1, 3, 16, 8, window=60, furthest=128),
    Form(1, 4, 64, 16, scale=1.0, causal=False, furthest=20),
    Form(8, 2, 64, 16, with_sinks=True),
    Form(4, 2, 64, 16, window=37, with_sinks=True),
    Form(16, 1, 16, 8, window=3, soft_cap=5.0, with_sinks=True),
    Form(3, 2, 16, 8, window=19, chunked=True),
    Form(2, 1, 64, 16, window=48, chunked=True, soft_cap=2.0),
]
BFLOAT16 = ml_dtypes.bfloat16
HALF_UNIT = 2.0**-8  # of a bfloat16, relative


@cache
def program(form: Form, lanes: int) -> Any:
    return jax.jit(partial(native_split_attention, **form.options()))


def attend(batch: Ragged, form: Form, lanes: int = 0) -> np.ndarray:
    return np.asarray(program(form, lanes)(*map(jnp.asarray, batch)))


def rounded(batch: Ragged, q_dtype: Any, kv_dtype: Any) -> Ragged:
    q, *caches = (x.astype(to) for x, to in zip(batch, (q_dtype, kv_dtype, kv_dtype), strict=False))
    return batch._replace(q=q, k_cache=caches[0], v_cache=caches[1])


@st.composite
def row_lists(draw: st.DrawFn) -> list[tuple[int, int]]:
    """The rows of a batch: tokens, and keys."""
    rows: list[tuple[int, int]] = []
    row = st.one_of(
        st.tuples(st.just(1), st.integers(0, MOST_KEYS - 1)),
        st.tuples(st.integers(2, MOST_TOKENS), st.sampled_from([0, 0, 1, 37, 150])),
    )
    for n, before in draw(st.lists(row, min_size=1, max_size=MOST_ROWS)):
        if sum(m for m, _ in rows) + n <= MOST_TOKENS:
            rows.append((n, n + before))
    return rows


@needs_native
@settings(max_examples=20)
@given(rows=row_lists(), form=st.sampled_from(FORMS), seed=st.integers(0, 2**31))
def test_equals_a_dense_softmax_for_each_query(rows: list[tuple[int, int]], form: Form, seed: int) -> None:
    batch = batch_of(rows, form, seed=seed)
    np.testing.assert_allclose(attend(batch, form), truth(batch, form), atol=2e-5, rtol=2e-5)


@needs_native
@settings(max_examples=20)
@given(
    rows=row_lists(),
    form=st.sampled_from([FORMS[4], FORMS[10], FORMS[11]]),
    q_dtype=st.sampled_from([np.float32, BFLOAT16]),
    seed=st.integers(0, 2**31),
)
def test_bfloat16_caches_have_float32_sums(
    rows: list[tuple[int, int]], form: Form, q_dtype: Any, seed: int
) -> None:
    batch = rounded(batch_of(rows, form, seed=seed), q_dtype, BFLOAT16)
    given, true = attend(batch, form), truth(batch, form)
    assert given.dtype == q_dtype
    error = 0.0 if q_dtype == np.float32 else HALF_UNIT
    np.testing.assert_allclose(given.astype(np.float64), true, atol=2e-5, rtol=2e-5 + error)


@needs_native
@pytest.mark.parametrize(
    ("form", "kv_dtype"),
    [
        (FORMS[4], np.float32),
        (FORMS[16], np.float32),
        *(pytest.param(FORMS[i], BFLOAT16, marks=pytest.mark.long) for i in (14, 18)),
    ],
)
def test_the_form_for_the_other_register_width(
    form: Form, kv_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = other_lanes()
    monkeypatch.setattr(split_attention, "target", partial(split_attention.target, LANES=lanes))
    batch = batch_of([(40, 77), (1, 1), (1, 200), (3, 60), (9, 9), (20, 170)], form, seed=4)
    batch = rounded(batch, np.float32, kv_dtype)
    np.testing.assert_allclose(attend(batch, form, lanes), truth(batch, form), atol=2e-5, rtol=2e-5)


LATENT = [(Form(8, 1, 48, 16), 32), (Form(16, 1, 576, 16), 512), (Form(3, 1, 96, 8, scale=0.2), 80)]
FEW_ROWS = [(40, 77), (1, 1), (1, 200), (3, 60), (9, 9), (20, 170)]


@cache
def latent_program(form: Form, value_size: int, lanes: int) -> Any:
    return jax.jit(partial(native_split_attention, value_size=value_size, **form.options()))


def latent(batch: Ragged, form: Form, value_size: int, lanes: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The result and the expected result for values that are the first elements of keys."""
    q, keys, _, *rows = map(jnp.asarray, batch)
    given = latent_program(form, value_size, lanes)(q, keys, None, *rows)
    true = truth(batch._replace(v_cache=batch.k_cache), form)[..., :value_size]
    return np.asarray(given), true


@needs_native
@settings(max_examples=15)
@given(rows=row_lists(), form=st.sampled_from(LATENT), seed=st.integers(0, 2**31))
def test_values_as_the_first_elements_of_keys(
    rows: list[tuple[int, int]], form: tuple[Form, int], seed: int
) -> None:
    given, true = latent(batch_of(rows, form[0], seed=seed), *form)
    np.testing.assert_allclose(given, true, atol=5e-5, rtol=5e-5)


@needs_native
@pytest.mark.parametrize(("form", "kv_dtype"), [(LATENT[0], BFLOAT16), (LATENT[1], np.float32)])
def test_latent_values_in_bfloat16_and_with_the_other_register_width(
    form: tuple[Form, int], kv_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = rounded(batch_of(FEW_ROWS, form[0], seed=4), np.float32, kv_dtype)
    given, true = latent(batch, *form)
    np.testing.assert_allclose(given, true, atol=5e-5, rtol=5e-5)
    monkeypatch.setattr(split_attention, "target", partial(split_attention.target, LANES=other_lanes()))
    given, true = latent(batch, *form, other_lanes())
    np.testing.assert_allclose(given, true, atol=5e-5, rtol=5e-5)


@needs_native
def test_queries_may_be_the_first_slices_of_more() -> None:
    form = Form(2, 2, 64, 16)
    batch = batch_of([(5, 20), (1, 70)], form, seed=5)
    keys_and_values = np.full((MOST_TOKENS, 2, 2, 64), np.nan, np.float32)
    fused = batch._replace(q=np.concatenate([batch.q, keys_and_values], axis=1))
    given = native_split_attention(*map(jnp.asarray, fused), group=2)
    assert np.array_equal(given, attend(batch, form))


@needs_native
@pytest.mark.parametrize("form", [form for form in FORMS if form.with_sinks])
def test_sinks_count_in_every_kind_of_row(form: Form) -> None:
    """Sinks count in decode, in prefill, and where a window begins after a row's first chunks."""
    batch = batch_of([(1, 1), (1, 200), (40, 240), (30, 30)], form, seed=6)
    assert (
        form.with_sinks
        and np.abs(truth(batch, form) - truth(batch, form._replace(with_sinks=False))).max() > 0.5
    )
    np.testing.assert_allclose(attend(batch, form), truth(batch, form), atol=2e-5, rtol=2e-5)


@needs_native
def test_weights_that_vanish() -> None:
    form = FORMS[1]
    batch = batch_of([(40, 40), (1, 201)], form, seed=3)
    batch.q[:41] *= 30  # softmax is all but one key's: the other weights are 0 in float32, or nearly
    np.testing.assert_allclose(attend(batch, form), truth(batch, form), atol=2e-4, rtol=2e-4)


@needs_native
@pytest.mark.parametrize("row", [(1, 37), (70, 70), (33, 53)])
@pytest.mark.parametrize("form", [FORMS[1], FORMS[4], FORMS[9], FORMS[11], FORMS[16], FORMS[18]])
def test_a_row_has_the_same_bits_whatever_its_neighbours_and_blocks(row: tuple[int, int], form: Form) -> None:
    alone = batch_of([row], form, seed=1)
    among = batch_of([(5, 8), row, (1, 10), (20, 40)], form, seed=2)
    n, length = row
    among.q[5 : 5 + n] = alone.q[:n]
    for position in range(length):
        here, there = (batch.block_table[i, position // 16] for i, batch in enumerate((alone, among)))
        for ours, theirs in ((alone.k_cache, among.k_cache), (alone.v_cache, among.v_cache)):
            theirs[there, :, position % 16] = ours[here, :, position % 16]
    assert np.array_equal(attend(alone, form)[:n], attend(among, form)[5 : 5 + n])


def choice(
    *, dtype: str = "float32", block_size: int = 16, forced: Attention | None = None
) -> AttentionChoice:
    return choose_attention(
        jax.devices("cpu")[0], GPT2, n_heads=12, block_size=block_size, dtype=dtype, forced=forced
    )


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cpu_with_a_compiler_runs_it(dtype: str) -> None:
    assert choice(dtype=dtype).kind == choice(dtype=dtype, forced="native").kind == "native"


def test_unsupported_sizes_are_reported_and_run_in_pure_jax() -> None:
    assert unsupported(64, 16, "float32", 12, 12) is None
    assert unsupported(64, 16, "bfloat16", 12, 4) is None
    assert "of 20" in str(unsupported(20, 16, "float32", 12, 12))
    assert "of 4" in str(unsupported(64, 4, "float32", 12, 12))
    assert "12 query heads are not a multiple of its 5" in str(unsupported(64, 16, "float32", 12, 5))
    chosen = choice(dtype="float16")
    assert chosen.kind == "follow_lengths" and "float16" in chosen.description
    with pytest.raises(ConfigError, match="attention is 'native', but the native attention is for float32"):
        choice(dtype="float16", forced="native")


def test_a_machine_without_a_compiler_runs_pure_jax(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    block_size = 8 * 37  # that nothing in this process was built for
    monkeypatch.setenv("PATH", str(tmp_path))
    chosen = choice(block_size=block_size)
    assert chosen.kind == "follow_lengths" and "no C compiler was found" in chosen.description
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'error: it is broken' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert "could not build it: error: it is broken" in choice(block_size=block_size).description
