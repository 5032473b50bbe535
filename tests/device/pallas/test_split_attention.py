"""Split attention: the reference against its definition, and the kernel, interpreted."""

import json
import os
import random
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.pallas.split_attention_reference import split_attention_reference
from tests.device.model.ragged import dense, ragged
from tests.device.pallas.interpreted_kernel import GIVES_UP, SIZES
from tests.places import ROOT

ROWS = st.lists(
    st.integers(0, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, n + 60) if n else st.just(0))),
    min_size=1,
    max_size=6,
)


reference = jax.jit(split_attention_reference)


@settings(max_examples=12)
@given(ROWS, st.sampled_from([(4, 4), (4, 2), (8, 1)]), st.integers(0, 2), st.integers(0, 99))
def test_the_reference_is_attention_by_its_definition(
    rows: list[tuple[int, int]], heads: tuple[int, int], n_shared: int, seed: int
) -> None:
    n_heads, n_kv_heads = heads
    batch = ragged(
        seed,
        rows,
        n_padding=241 - sum(n for n, _ in rows),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_size=8,
        block_size=4,
        n_shared=n_shared,
        n_rows=8,  # the same sizes for all, which are compiled once
        n_blocks=155,
        max_blocks=25,
    )
    got = np.asarray(reference(*map(jnp.asarray, batch)))
    np.testing.assert_allclose(got, dense(batch), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_kernel_interpreted_is_the_reference(name: str) -> None:
    """In a process of its own: the interpreter's threads wait for each other on a pool that must be wide."""
    command = [
        sys.executable,
        "-m",
        "tests.device.pallas.interpreted_kernel",
        name,
        str(random.getrandbits(32)),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "PJRT_NPROC": "16", "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=GIVES_UP + 20,
        check=False,
    )
    again = f"again: PJRT_NPROC=16 JAX_PLATFORMS=cpu python {shlex.join(command[1:])}"
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{again}"
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["batches"] > 1
    if record["n_cores"] > 2:  # some rows were cut for them
        assert record["rows_merged"] > 0
    if record["n_cores"] == 5:
        assert record["tiles_merged"] > 0
