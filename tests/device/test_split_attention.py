"""Split attention: the reference against its definition, the list of work, and the kernel, interpreted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.pallas.split_attention_reference import split_attention_reference
from orca_jax.pallas.work_items import ENTRY, HEADER, Plan, work_items
from tests.device.interpreted_kernel import CASES, TOLERANCE
from tests.device.ragged import dense, ragged

ROWS = st.lists(
    st.integers(0, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, n + 60) if n else st.just(0))),
    min_size=1,
    max_size=6,
)


@settings(max_examples=12)
@given(
    ROWS, st.integers(0, 9), st.sampled_from([(4, 4), (4, 2), (8, 1)]), st.integers(0, 2), st.integers(0, 99)
)
def test_the_reference_is_attention_by_its_definition(
    rows: list[tuple[int, int]], n_padding: int, heads: tuple[int, int], n_shared: int, seed: int
) -> None:
    n_heads, n_kv_heads = heads
    batch = ragged(
        seed,
        rows,
        n_padding=n_padding,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_size=8,
        block_size=4,
        n_shared=n_shared,
    )
    if len(batch.q) == 0:
        return
    got = np.asarray(split_attention_reference(*map(jnp.asarray, batch)))
    np.testing.assert_allclose(got, dense(batch), atol=2e-5, rtol=2e-5)


@settings(max_examples=30)
@given(
    st.lists(
        st.integers(0, 300).flatmap(
            lambda n: st.tuples(st.just(n), st.integers(n, 3000) if n else st.just(0))
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(0, 200),
    st.sampled_from([(1, 1), (2, 4), (40, 1)]),
    st.sampled_from([1, 2, 132]),
)
def test_the_list_of_work_has_every_query_and_every_key_once(
    rows: list[tuple[int, int]], n_padding: int, heads: tuple[int, int], n_cores: int
) -> None:
    inputs = np.array([n for n, _ in rows])
    kv_length = np.array([n for _, n in rows], np.int32)
    row_start = np.concatenate([[0], np.cumsum(inputs)]).astype(np.int32)
    n_tokens = int(row_start[-1]) + n_padding
    if n_tokens == 0:
        return
    plan = Plan(n_tokens, len(rows), *heads, n_cores=n_cores)
    work = np.asarray(work_items(jnp.asarray(row_start), jnp.asarray(kv_length), plan))
    n_tiles, n_entries = work[0, :2]
    assert n_tiles <= plan.max_tiles and n_entries <= plan.max_entries
    tiles = work[HEADER : HEADER + n_tiles]
    entries = work[HEADER + plan.max_tiles :][:n_entries]

    computed = np.zeros(n_tokens, int)
    for tile in tiles:
        token, n = tile[ENTRY.token], tile[ENTRY.n_queries]
        assert 1 <= n <= 128
        computed[token : token + n] += 1
        if token >= row_start[-1]:  # padding sees no key
            assert tile[ENTRY.end] == 0
            continue
        row = tile[ENTRY.row]
        assert row_start[row] <= token and token + n <= row_start[row + 1]
        last = kv_length[row] - (row_start[row + 1] - token)
        assert (tile[ENTRY.position], tile[ENTRY.end]) == (last, last + n)
    keys: dict[int, list[tuple[int, int]]] = {}
    for entry in entries:
        row = int(entry[ENTRY.row])
        assert inputs[row] == 1 and entry[ENTRY.token] == row_start[row]
        keys.setdefault(row, []).append((int(entry[ENTRY.begin]), int(entry[ENTRY.end])))
        assert (entry[ENTRY.slot] >= 0) == (entry[ENTRY.n_pieces] > 1)
    for row, pieces in keys.items():
        assert [0, *[end for _, end in pieces]] == [*[begin for begin, _ in pieces], kv_length[row]]
        computed[row_start[row]] += 1
    assert (computed == 1).all()


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_interpreted(name: str) -> None:
    """In a process of its own: the interpreter's threads wait for each other on a pool that must be wide."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.device.interpreted_kernel", name],
        env={**os.environ, "PJRT_NPROC": "16", "JAX_PLATFORMS": "cpu"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["finite"] and found["padding"] == 0.0
    assert found["error"] < TOLERANCE[found["dtype"]], found
