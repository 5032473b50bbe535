"""The CPU's attention in C, against a dense softmax per request in float64."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.config import Attention
from orca_jax.errors import ConfigError
from orca_jax.execution.attention_backend import AttentionChoice, choose_attention
from orca_jax.families.presets import PRESETS
from orca_jax.native.split_attention import native_split_attention, unsupported
from tests.device.model.ragged import Ragged, dense, ragged
from tests.device.native.native_form import needs_native

GPT2 = PRESETS["gpt2"]
SIZES = [(4, 16, 8), (3, 64, 16), (2, 128, 32), (1, 48, 64)]  # heads, head size, block size
MOST_TOKENS = 160

attend_jitted = jax.jit(native_split_attention)


def attend(batch: Ragged) -> np.ndarray:
    return np.asarray(attend_jitted(*map(jnp.asarray, batch)))


def some(rows: list[tuple[int, int]], sizes: tuple[int, int, int], *, seed: int) -> Ragged:
    """With few shapes, since each is compiled."""
    heads, head_size, block_size = sizes
    return ragged(
        seed,
        rows,
        n_padding=MOST_TOKENS - sum(n for n, _ in rows),
        n_heads=heads,
        n_kv_heads=heads,
        head_size=head_size,
        block_size=block_size,
        n_rows=12,
        n_blocks=12 * 256 // block_size,
        max_blocks=256 // block_size,
    )


@st.composite
def row_lists(draw: st.DrawFn) -> list[tuple[int, int]]:
    rows: list[tuple[int, int]] = []
    row = st.one_of(
        st.tuples(st.just(1), st.integers(0, 255)),
        st.tuples(st.integers(2, MOST_TOKENS), st.sampled_from([0, 0, 1, 37])),
    )
    for n, before in draw(st.lists(row, min_size=1, max_size=12)):
        if sum(m for m, _ in rows) + n <= MOST_TOKENS:
            rows.append((n, n + before))
    return rows


@needs_native
@settings(max_examples=60)
@given(rows=row_lists(), sizes=st.sampled_from(SIZES), seed=st.integers(0, 2**31))
def test_equals_a_dense_softmax_for_each_request(
    rows: list[tuple[int, int]], sizes: tuple[int, int, int], seed: int
) -> None:
    batch = some(rows, sizes, seed=seed)
    np.testing.assert_allclose(attend(batch), dense(batch), atol=2e-5, rtol=2e-5)


@needs_native
def test_weights_that_vanish() -> None:
    batch = some([(40, 40), (1, 201)], (2, 64, 16), seed=3)
    batch.q[:41] *= 30  # softmax is all but one key's: the other weights are 0 in float32, or nearly
    np.testing.assert_allclose(attend(batch), dense(batch), atol=2e-4, rtol=2e-4)


@needs_native
@pytest.mark.parametrize("row", [(1, 37), (70, 70), (33, 53)])
def test_a_row_has_the_same_bits_whatever_its_neighbours_and_its_blocks(row: tuple[int, int]) -> None:
    alone = some([row], (2, 64, 16), seed=1)
    among = some([(5, 8), row, (1, 10), (40, 40)], (2, 64, 16), seed=2)
    n, length = row
    among.q[5 : 5 + n] = alone.q[:n]
    for position in range(length):
        here, there = alone.block_table[0, position // 16], among.block_table[1, position // 16]
        for ours, theirs in ((alone.k_cache, among.k_cache), (alone.v_cache, among.v_cache)):
            theirs[there, :, position % 16] = ours[here, :, position % 16]
    assert np.array_equal(attend(alone)[:n], attend(among)[5 : 5 + n])


def choice(
    *, dtype: str = "float32", block_size: int = 16, forced: Attention | None = None
) -> AttentionChoice:
    return choose_attention(
        jax.devices("cpu")[0], GPT2, n_heads=12, block_size=block_size, dtype=dtype, forced=forced
    )


@needs_native
def test_a_cpu_with_a_compiler_runs_it() -> None:
    assert choice().kind == choice(forced="native").kind == "native"


def test_unsupported_sizes_are_reported_and_run_in_pure_jax() -> None:
    assert unsupported(64, 16, "float32", 12, 12) is None
    assert "of 20" in str(unsupported(20, 16, "float32", 12, 12))
    assert "of 4" in str(unsupported(64, 4, "float32", 12, 12))
    assert "key/value heads" in str(unsupported(64, 16, "float32", 12, 4))
    chosen = choice(dtype="bfloat16")
    assert chosen.kind == "follow_lengths" and "bfloat16" in chosen.description
    with pytest.raises(ConfigError, match="attention is 'native', but the native attention is for float32"):
        choice(dtype="bfloat16", forced="native")


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
