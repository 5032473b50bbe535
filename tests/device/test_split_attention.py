"""Split attention: the reference against its definition, the list of work, and the kernel, interpreted."""

import json
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.pallas.split_attention_reference import split_attention_reference
from orca_jax.pallas.work_items import ENTRY, HEADER, Plan, work_items
from tests.device.interpreted_kernel import GIVES_UP, SIZES
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


LONGEST = 3000
LONG_ROWS = st.lists(
    st.integers(0, 300).flatmap(
        lambda n: st.tuples(st.just(n), st.integers(n, LONGEST) if n else st.just(0))
    ),
    min_size=1,
    max_size=20,
)
HEADS = st.sampled_from([(1, 1), (2, 4), (40, 1)])
N_CORES = st.sampled_from([1, 2, 132])


def lengths(rows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """row_start [R + 1] and kv_length [R] of rows as `ragged` has them."""
    inputs = [n for n, _ in rows]
    return np.cumsum([0, *inputs], dtype=np.int32), np.array([n for _, n in rows], np.int32)


@settings(max_examples=100)
@given(LONG_ROWS, st.integers(0, 200), HEADS, N_CORES, st.booleans())
def test_the_list_of_work_has_every_query_and_every_key_once(
    rows: list[tuple[int, int]], n_padding: int, heads: tuple[int, int], n_cores: int, fixed: bool
) -> None:
    row_start, kv_length = lengths(rows)
    n_tokens = int(row_start[-1]) + n_padding
    if n_tokens == 0:
        return
    plan = Plan(n_tokens, len(rows), *heads, n_cores=n_cores)
    plan = plan.fixed(LONGEST) if fixed else plan
    work = work_items(row_start, kv_length, plan)
    assert isinstance(work, np.ndarray) and work.dtype == np.int32
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
        assert row_start[row + 1] - row_start[row] == 1 and entry[ENTRY.token] == row_start[row]
        keys.setdefault(row, []).append((int(entry[ENTRY.begin]), int(entry[ENTRY.end])))
        assert (entry[ENTRY.slot] >= 0) == (entry[ENTRY.n_pieces] > 1)
    slots = entries[entries[:, ENTRY.slot] >= 0, ENTRY.slot]
    assert len(set(slots.tolist())) == len(slots) and (slots < plan.max_entries).all()
    merges = work[plan.first_merge :]
    assert len(merges) == len(rows)
    for row, merge in enumerate(merges):
        first = int(np.argmax(entries[:, ENTRY.row] == row)) if row in keys else -1
        if len(keys.get(row, [])) > 1:
            found = (merge[ENTRY.token], merge[ENTRY.slot], merge[ENTRY.n_pieces])
            assert found == (row_start[row], entries[first, ENTRY.slot], len(keys[row]))
        else:
            assert merge[ENTRY.token] >= n_tokens  # nowhere
    for row, pieces in keys.items():
        assert [0, *[end for _, end in pieces]] == [*[begin for begin, _ in pieces], kv_length[row]]
        computed[row_start[row]] += 1
    assert (computed == 1).all()


@given(st.lists(st.integers(0, LONGEST), min_size=1, max_size=20), HEADS, N_CORES, st.data())
def test_with_pieces_of_one_length_a_row_is_split_as_if_it_were_alone(
    kv_length: list[int], heads: tuple[int, int], n_cores: int, data: st.DataObject
) -> None:
    n = len(kv_length)
    plan = Plan(n, n, *heads, n_cores=n_cores).fixed(LONGEST)

    def pieces_of(row: int, lengths: list[int]) -> list[tuple[int, int]]:
        work = work_items(np.arange(n + 1, dtype=np.int32), np.array(lengths, np.int32), plan)
        assert isinstance(work, np.ndarray)
        entries = work[plan.first_entry :][: work[0, 1]]
        own = entries[entries[:, ENTRY.row] == row]
        return [(int(entry[ENTRY.begin]), int(entry[ENTRY.end])) for entry in own]

    row = data.draw(st.integers(0, n - 1))
    others = data.draw(st.lists(st.integers(0, LONGEST), min_size=n, max_size=n))
    others[row] = kv_length[row]
    assert pieces_of(row, others) == pieces_of(row, kv_length)
    assert (
        work_items(np.arange(n + 1, dtype=np.int32), np.full(n, LONGEST, np.int32), plan)[0, 1]
        <= plan.max_entries
    )


@settings(max_examples=12)
@given(LONG_ROWS, st.integers(0, 200), HEADS, N_CORES)
def test_the_list_of_work_is_the_same_from_numpy_and_from_jax(
    rows: list[tuple[int, int]], n_padding: int, heads: tuple[int, int], n_cores: int
) -> None:
    row_start, kv_length = lengths(rows)
    n_tokens = int(row_start[-1]) + n_padding
    if n_tokens == 0:
        return
    plan = Plan(n_tokens, len(rows), *heads, n_cores=n_cores)
    on_host = work_items(row_start, kv_length, plan)
    on_device = jax.jit(work_items, static_argnums=2)(row_start, kv_length, plan)
    assert isinstance(on_host, np.ndarray) and isinstance(on_device, jax.Array)
    assert on_host.dtype == on_device.dtype == np.int32
    np.testing.assert_array_equal(on_host, np.asarray(on_device))


@pytest.mark.parametrize("name", SIZES)
def test_the_kernel_interpreted_is_the_reference(name: str) -> None:
    """In a process of its own: the interpreter's threads wait for each other on a pool that must be wide."""
    command = [sys.executable, "-m", "tests.device.interpreted_kernel", name, str(random.getrandbits(32))]
    done = subprocess.run(
        command,
        env={**os.environ, "PJRT_NPROC": "16", "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=GIVES_UP + 20,
        check=False,
    )
    again = f"again: PJRT_NPROC=16 JAX_PLATFORMS=cpu python {shlex.join(command[1:])}"
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{again}"
    assert json.loads(done.stdout.splitlines()[-1])["batches"] > 1
