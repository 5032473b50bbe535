"""The products of experts for GPUs: their tiles, the reference, and the interpreted kernel against it."""

import json
import os
import random
import shlex
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.errors import ConfigError
from orca_jax.pallas.grouped_product import grouped_product
from orca_jax.pallas.grouped_product_reference import grouped_product_reference
from orca_jax.pallas.work_list.group_tiles import ProductShape, item_at, tile_table, unsupported
from tests.device.pallas.interpreted_product import GIVES_UP, SIZES
from tests.places import ROOT


@partial(jax.jit, static_argnames="shape")
def items_of(sizes: jax.Array, shape: ProductShape) -> tuple[jax.Array, ...]:
    """The number of items, and all items up to the bound."""
    table = tile_table(sizes, shape)
    most = jnp.arange(shape.max_tiles * shape.column_tiles)
    return table[0, 0] * shape.column_tiles, *jax.vmap(lambda i: jnp.stack(item_at(table, i, shape)))(most).T


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0, 0, 0, 1, 2, 7, 8, 9, 15, 40]), min_size=8, max_size=8), st.integers(0, 300)
)
def test_items_cover_every_row_of_every_group_once(sizes: list[int], spare: int) -> None:
    n_rows = 328 if spare < 100 or sum(sizes) > 48 else 48  # few shapes, which are compiled once
    shape = ProductShape(n_rows, n_experts=8, n_out=192, n_in=64, n_cores=1, interpret=True)
    n_items, *columns = map(np.asarray, items_of(jnp.array(sizes, jnp.int32), shape))
    assert n_items <= shape.max_tiles * shape.column_tiles
    expert, row, first, n, column = (each[: int(n_items)] for each in columns)
    assert not (row % 8).any()  # a copy of swizzled rows cannot begin elsewhere
    assert (n >= 1).all() and (first >= 0).all() and (first + n <= shape.tile_rows).all()
    covered = np.full((n_rows, 2), -1)
    for i in range(int(n_items)):
        place = covered[row[i] + first[i] : row[i] + first[i] + n[i], column[i] // 128]
        assert (place == -1).all()
        place[:] = expert[i]
    owner = np.concatenate([np.repeat(np.arange(8), sizes), np.full(n_rows - sum(sizes), -1)])
    assert (covered == owner[:, None]).all()
    assert (np.diff(expert) >= 0).all()  # an expert's weight is read in one stretch of time


def test_a_tile_has_twice_the_rows_of_an_average_expert() -> None:
    def rows(n_rows: int, n_experts: int) -> int:
        return ProductShape(n_rows, n_experts, 64, 64, 1, interpret=False).tile_rows

    assert [rows(8, 128), rows(256, 128), rows(1024, 128), rows(16384, 128)] == [8, 8, 16, 128]
    assert [rows(8, 8), rows(64, 8), rows(4096, 8)] == [8, 16, 128]


def test_the_bound_on_tiles_holds_where_every_group_crosses_a_multiple_of_eight() -> None:
    sizes = [7, 2, 7, 9, 7, 2, 7, 7]
    shape = ProductShape(48, n_experts=8, n_out=64, n_in=64, n_cores=1, interpret=True)
    assert shape.tile_rows == 16
    n_items, *_ = items_of(jnp.array(sizes, jnp.int32), shape)
    assert 8 <= int(n_items) <= shape.max_tiles == 8 + (48 + 6 * 8) // 16


def test_the_reference_by_hand() -> None:
    x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [jnp.nan, 1.0]])
    weight = jnp.array([[[1.0, 0.0]], [[jnp.nan, 1.0]], [[10.0, 1.0]]])
    out = grouped_product_reference(x, weight, jnp.array([2, 0, 1], jnp.int32))
    assert np.asarray(out).tolist() == [[1.0], [3.0], [56.0], [0.0]]


def test_unsupported_products_are_refused_by_name() -> None:
    assert unsupported(1536, 2048, "bfloat16", "bfloat16") is None
    assert unsupported(2880, 1440, "float16", "float16") is None  # gpt-oss, cut in two
    assert "rows are bfloat16 and weights float32" in str(unsupported(64, 64, "bfloat16", "float32"))
    assert "weight is 1440 x 2880" in str(unsupported(1440, 2880, "bfloat16", "bfloat16"))
    assert "weight is 64 x 40" in str(unsupported(64, 40, "bfloat16", "bfloat16"))
    x, weight = jnp.zeros((4, 64), jnp.bfloat16), jnp.zeros((3, 96, 64), jnp.bfloat16)
    with pytest.raises(ConfigError, match="weight is 96 x 64; they must be multiples of 64 and 16"):
        grouped_product(x, weight, jnp.zeros(3, jnp.int32))
    with pytest.raises(ConfigError, match=r"sizes int32 \(4,\)"):
        grouped_product(x, weight, jnp.zeros(4, jnp.int32))


def interpreted(name: str, n_batches: int) -> None:
    """Runs in a separate process: the interpreter's threads wait for each other, and need a large pool."""
    module, seed = "tests.device.pallas.interpreted_product", str(random.getrandbits(32))
    command = [sys.executable, "-m", module, name, seed, str(n_batches)]
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
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-3000:]}"
    assert json.loads(done.stdout.splitlines()[-1])["batches"] == n_batches + 1


def test_the_interpreted_kernel_equals_the_reference() -> None:
    interpreted("rows across tiles, parts of steps", 0)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_interpreted_kernel_equals_the_reference_for_random_groups(name: str) -> None:
    interpreted(name, 5)
