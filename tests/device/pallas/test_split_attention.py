"""Split attention: the reference against its definition, and the interpreted kernel against the reference."""

import json
import os
import random
import shlex
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.errors import ConfigError
from orca_jax.pallas.split_attention import split_attention
from orca_jax.pallas.split_attention_reference import split_attention_reference
from orca_jax.pallas.work_list.bounds import Plan
from tests.device.model.ragged import ragged
from tests.device.pallas.grouped import Scores, by_group, definition, forget
from tests.device.pallas.interpreted_kernel import GIVES_UP, SIZES
from tests.places import ROOT

ROWS = st.lists(
    st.integers(0, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, n + 60) if n else st.just(0))),
    min_size=1,
    max_size=6,
)


reference = jax.jit(split_attention_reference, static_argnames=("group", *Scores._fields))
SCORES = st.sampled_from([Scores(), Scores(scale=0.5, window=9), Scores(window=40, soft_cap=2.0)])


@settings(max_examples=16)
@given(ROWS, st.sampled_from([(4, 4), (4, 2), (8, 1)]), SCORES, st.integers(0, 2), st.integers(0, 99))
def test_the_reference_is_attention_by_its_definition(
    rows: list[tuple[int, int]], heads: tuple[int, int], scores: Scores, n_shared: int, seed: int
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
    batch = batch._replace(q=by_group(batch.q, n_kv_heads))
    if scores.window is not None:
        batch = forget(batch, scores.window, block_size=4)
    wanted = definition(batch, scores)
    fused = np.pad(batch.q, ((0, 0), (0, 2), (0, 0), (0, 0)), constant_values=np.nan)
    arrays = map(jnp.asarray, batch._replace(q=fused))
    got = np.asarray(reference(*arrays, group=batch.q.shape[1], **scores._asdict()))
    np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=2e-5)


def arguments(**changed: tuple[int, ...]) -> list[jax.Array]:
    """Arguments of `split_attention` for 3 tokens of 2 rows; `changed` gives some another shape."""
    shapes = {"q": (3, 4, 2, 64), "k_cache": (5, 2, 16, 64), "v_cache": (5, 2, 16, 64)} | changed
    indices = {"block_table": (2, 2), "row_start": (3,), "kv_length": (2,)} | changed
    floats = [jnp.zeros(shapes[name], jnp.bfloat16) for name in ("q", "k_cache", "v_cache")]
    return floats + [
        jnp.zeros(indices[name], jnp.int32) for name in ("block_table", "row_start", "kv_length")
    ]


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"q": (3, 4, 64)}, {}, r"\[T, n, K, D\]"),
        ({"k_cache": (5, 3, 16, 64)}, {}, r"k_cache is bfloat16 \(5, 3, 16, 64\).*must be.*\(5, 2, 16, 64\)"),
        ({"row_start": (4,)}, {}, "row_start"),
        ({}, {"group": 5}, "group is 5; q .* has 4 heads"),
        ({}, {"window": 0}, "window is 0; it must be above 0"),
        ({}, {"soft_cap": -1.0}, "soft_cap is -1.0"),
        ({}, {"scale": 0.0}, "scale is 0.0"),
        ({}, {"window": 7, "plan": Plan(3, 2, 2, 4)}, "window is 7.*make the plan with the same window"),
        ({}, {"plan": Plan(3, 2, 2, 4, 32)}, "make it with the sizes"),
        ({"q": (3, 4, 2, 72), "k_cache": (5, 2, 16, 72), "v_cache": (5, 2, 16, 72)}, {}, "head size is 72"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    changed: dict[str, tuple[int, ...]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        split_attention(*arguments(**changed), **options)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_interpreted_kernel_equals_the_reference(name: str) -> None:
    """Runs in a separate process: the interpreter's threads wait for each other, and need a large pool."""
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
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["batches"] > 1
    if report["n_cores"] > 2:  # enough cores that rows are split
        assert report["rows_merged"] > 0
    if report["n_cores"] == 5:
        assert report["tiles_merged"] > 0
