"""Compares the grouped product, interpreted on the CPU, with the reference over random groups.

    PJRT_NPROC=16 python -m tests.device.pallas.interpreted_product NAME SEED N

It compiles the sizes NAME once, and runs N batches of random groups after one that is given. It prints each
before it runs it, and a line of JSON at the end. The first wrong one ends it with an error; the same seed
draws it again.
"""

import faulthandler
import json
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import tests.device.compiled_once  # noqa: F401
from orca_jax.pallas.grouped_product import grouped_product
from orca_jax.pallas.grouped_product_reference import grouped_product_reference
from orca_jax.pallas.mosaic_forms import InterpretGPUParams

GIVES_UP = 230.0  # seconds; deadlocked threads of a kernel would wait forever
HALF_UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # of the dtype, relative


class Sizes(NamedTuple):
    """The sizes of the compiled kernel, and the groups of the first batch."""

    n_rows: int
    n_out: int
    n_in: int
    dtype: str
    n_cores: int
    groups: tuple[int, ...]


SIZES = {
    "one row": Sizes(1, 64, 16, "bfloat16", 2, (0, 0, 1, 0)),
    "few rows, most groups empty": Sizes(24, 128, 64, "bfloat16", 3, (3, 0, 0, 7, 1, 0, 0, 0, 9, 0, 0, 2)),
    "rows across tiles, parts of steps": Sizes(45, 192, 80, "float16", 2, (5, 0, 23, 1, 14)),
    "many rows, more steps than slots": Sizes(150, 64, 288, "bfloat16", 1, (0, 131, 3)),
}


def groups_of(rng: np.random.Generator, sizes: Sizes) -> list[int]:
    """Random groups, alternately of similar and of very different sizes; some rows may be in no group."""
    n = len(sizes.groups)
    shares = rng.dirichlet([rng.choice([0.1, 1.0, 30.0])] * (n + 1))
    return rng.multinomial(sizes.n_rows, shares)[:n].tolist()


def check(sizes: Sizes, groups: Sequence[int], rng: np.random.Generator) -> float:
    """The largest error relative to the tolerance. Rows in no group are NaN."""
    x = rng.standard_normal((sizes.n_rows, sizes.n_in))
    x[sum(groups) :] = np.nan
    weight = rng.standard_normal((len(groups), sizes.n_out, sizes.n_in))
    weight[np.array(groups) == 0] = np.nan
    arrays = (*(jnp.asarray(one, sizes.dtype) for one in (x, weight)), jnp.asarray(groups, jnp.int32))
    got = np.asarray(KERNEL(*arrays, n_cores=sizes.n_cores), np.float32)
    want = np.asarray(REFERENCE(*arrays), np.float32)
    assert np.isfinite(got).all(), f"not finite: rows {np.unique(np.nonzero(~np.isfinite(got))[0])}"
    assert not got[sum(groups) :].any(), "rows of no group are not zero"
    permitted = 2 * HALF_UNIT[sizes.dtype] * (0.1 + np.abs(want))  # either result is rounded
    error = np.abs(got - want) / permitted
    assert error.max() < 1, (
        f"row {error.max(axis=1).argmax()} of groups {groups} is wrong by {error.max():.3g}"
    )
    return float(error.max())


@jax.jit
def REFERENCE(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    return grouped_product_reference(jnp.nan_to_num(x), jnp.nan_to_num(weight), sizes)


def _kernel(x: jax.Array, weight: jax.Array, sizes: jax.Array, n_cores: int) -> jax.Array:
    return grouped_product(x, weight, sizes, n_cores=n_cores, interpret=True)


KERNEL = jax.jit(_kernel, static_argnames="n_cores")


def main() -> None:
    """Check the sizes of the given name, with batches from the given seed."""
    faulthandler.dump_traceback_later(GIVES_UP, exit=True)
    assert InterpretGPUParams().uninitialized_memory == "nan"  # of results that the kernel does not write
    sizes, rng = SIZES[sys.argv[1]], np.random.default_rng(int(sys.argv[2]))
    batches = [list(sizes.groups), *(groups_of(rng, sizes) for _ in range(int(sys.argv[3])))]
    worst = 0.0
    for groups in batches:
        print(groups, flush=True)
        worst = max(worst, check(sizes, groups, rng))
    print(json.dumps({"batches": len(batches), "worst": worst}))


if __name__ == "__main__":
    main()
