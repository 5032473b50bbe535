"""Checks the experts' kernel, then measures its time over its floor.

    python -m bench.kernel.experts [--one] [--tiny] [--repeat 7] [--json FILE]

First every form runs on random groups, against float64: with experts without rows, one expert with all rows,
and rows of no expert. Rows of no expert are NaN, and so are the weights of experts without rows, which must
not be read. The same groups run several times: a result that changes is a race. If anything is wrong nothing
is timed, and the status is 1.

Then it times products of published mixtures, for tokens that choose experts at random. A program has several
calls, each with different weights. The floor is the bytes of the experts that are hit, of rows and of results
over the measured bandwidth, or the operations over the measured matrix rate; beside it is XLA's `ragged_dot`.
The last line is JSON.

`--one` runs one form alone, for a tool that checks memory accesses. `--tiny` tries this out on a CPU: the
kernel is interpreted in one form, once, and XLA's product is timed in its place.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.kernel.aims import RELATIVE_ERROR
from bench.kernel.clock import time_calls
from orca_jax.aot.measured_device import measure_device
from orca_jax.model.layers import grouped_matmul
from orca_jax.pallas.grouped_product import grouped_product
from orca_jax.planning.cost_model import Device
from orca_jax.sharding.device_group import device_name

N_RUNS = 5  # of the same groups
SETS = 4  # of weights in a timed program
RAGGED_ROWS = 512  # XLA's product holds rows once for each expert


class Form(NamedTuple):
    """Rows and experts of [out, in]."""

    n_rows: int
    n_experts: int
    n_out: int
    n_in: int
    dtype: str = "bfloat16"


class Mixture(NamedTuple):
    """A product of a mixture, `top_k` experts a token."""

    name: str
    n_experts: int
    top_k: int
    n_out: int
    n_in: int


ODD = Form(45, 5, 192, 80, "float16")  # parts of tiles, of steps and of column tiles
FORMS = (
    ODD,
    *(Form(n, 32, 1536, 2048) for n in (1, 8, 9, 40, 130, 600)),
    *(Form(n, 8, 2880, 1440, "float16") for n in (3, 64, 250)),
    *(Form(n, 128, 256, 768) for n in (8, 200, 2048)),
)
MIXTURES = (
    Mixture("qwen3-30b-a3b up", 128, 8, 1536, 2048),
    Mixture("qwen3-30b-a3b down", 128, 8, 2048, 768),
    Mixture("mixtral-8x7b up", 8, 2, 28672, 4096),
    Mixture("mixtral-8x7b down", 8, 2, 4096, 14336),
)
TOKENS = (1, 8, 32, 64, 256, 2048)
TINY_FORM, TINY_MIXTURE = Form(9, 4, 64, 32), Mixture("tiny", 4, 2, 64, 32)
Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def groups_of(form: Form, rng: np.random.Generator) -> list[np.ndarray]:
    """Groups of rows: all in one; none in any; equal; very different, with rows of no expert."""
    one = np.zeros(form.n_experts, np.int32)
    one[form.n_experts // 2] = form.n_rows
    drawn = [
        rng.multinomial(form.n_rows, rng.dirichlet([share] * (form.n_experts + 1)))[:-1]
        for share in (30.0, 1.0, 0.1)
    ]
    return [one, np.zeros_like(one), *(sizes.astype(np.int32) for sizes in drawn)]


def check(form: Form, product: Product, seed: int, n_runs: int) -> dict[str, Any]:
    """The form's largest relative error against float64, and whether every run gave the same bits."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((form.n_rows, form.n_in), np.float32)
    drawn = rng.standard_normal((form.n_experts, form.n_out, form.n_in), np.float32)
    worst, still = 0.0, True
    for sizes in groups_of(form, rng):
        rows, weight = x.copy(), drawn.copy()
        rows[sizes.sum() :] = np.nan
        weight[sizes == 0] = np.nan
        arrays = (jnp.asarray(rows, form.dtype), jnp.asarray(weight, form.dtype), jnp.asarray(sizes))
        found = [np.asarray(product(*arrays), np.float32) for _ in range(n_runs)]
        still &= all(np.array_equal(found[0], other) for other in found)
        true = np.zeros((form.n_rows, form.n_out))
        ends = np.cumsum(sizes)
        for expert in np.flatnonzero(sizes):
            mine = slice(ends[expert] - sizes[expert], ends[expert])
            exact = [np.asarray(one, np.float64) for one in (arrays[0][mine], arrays[1][expert])]
            true[mine] = exact[0] @ exact[1].T
        if not np.isfinite(found[0]).all() or found[0][ends[-1] :].any():
            worst = float("inf")
        else:
            size = np.linalg.norm(true)
            worst = max(worst, float(np.linalg.norm(found[0] - true) / size) if size else 0.0)
    return {**form._asdict(), "relative": worst, "still": still}


def time_product(
    mixture: Mixture, n_tokens: int, product: Product, device: Device, repeat: int
) -> dict[str, Any]:
    """Seconds of a call, and over its floor."""
    rng = np.random.default_rng(n_tokens)
    chosen = [rng.permutation(mixture.n_experts)[: mixture.top_k] for _ in range(n_tokens)]
    sizes = np.bincount(np.concatenate(chosen), minlength=mixture.n_experts).astype(np.int32)
    n_rows, n_hit = int(sizes.sum()), int((sizes > 0).sum())
    keys = jax.random.split(jax.random.key(0), SETS + 1)
    shape = (mixture.n_experts, mixture.n_out, mixture.n_in)
    weights = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys[1:]]
    x = jax.random.normal(keys[0], (n_rows, mixture.n_in), jnp.bfloat16)

    @jax.jit
    def run(x: jax.Array, weights: Sequence[jax.Array], sizes: jax.Array) -> list[jax.Array]:
        return [product(x, weight, sizes) for weight in weights]

    groups = jnp.asarray(sizes)
    taken = time_calls(lambda: run(x, weights, groups), SETS, repeat=repeat)
    elements = n_hit * mixture.n_out * mixture.n_in + n_rows * (mixture.n_in + mixture.n_out)
    operations = 2 * n_rows * mixture.n_out * mixture.n_in
    floor = max(2 * elements / device.bandwidth, operations / device.matrix_rate)
    return {"seconds": taken.median, "floor_seconds": floor, "over_floor": taken.median / floor, "hit": n_hit}


def table(timed: Sequence[dict[str, Any]]) -> Table:
    """A row for each product and number of tokens."""
    made = Table(title="products of experts, bfloat16")
    for column in ("product", "tokens", "experts hit", "microseconds", "over floor", "ragged_dot"):
        made.add_column(column, justify="right")
    for one in timed:
        ragged = "" if one["ragged_dot"] is None else f"{1e6 * one['ragged_dot']:,.0f}"
        figures = (f"{1e6 * one['seconds']:,.1f}", f"{one['over_floor']:.2f}", ragged)
        made.add_row(one["mixture"], str(one["tokens"]), str(one["hit"]), *figures)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernel.experts", description=__doc__)
    parser.add_argument("--one", action="store_true", help="one form, for a tool that checks memory accesses")
    parser.add_argument("--tiny", action="store_true", help="interpreted on the CPU")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    flags = parser.parse_args(argv)
    device = jax.devices()[0]
    n_cores = 2 if flags.tiny else int(getattr(device, "core_count", 132))
    product = jax.jit(partial(grouped_product, n_cores=n_cores, interpret=flags.tiny))
    report: dict[str, Any] = {"benchmark": "experts", "device": device_name(device), "jax": jax.__version__}
    report |= {"forms": [], "timed": []}
    for seed, form in enumerate((TINY_FORM,) if flags.tiny else (ODD,) if flags.one else FORMS):
        report["forms"].append(found := check(form, product, seed, 1 if flags.tiny else N_RUNS))
        print(found, flush=True)
    right = all(one["relative"] <= RELATIVE_ERROR and one["still"] for one in report["forms"])
    if right and not flags.one:
        timed = grouped_matmul if flags.tiny else product
        rates = measure_device(jnp.dtype(jnp.float32 if flags.tiny else jnp.bfloat16), repeat=flags.repeat)
        for mixture in (TINY_MIXTURE,) if flags.tiny else MIXTURES:
            for n_tokens in (2,) if flags.tiny else TOKENS:
                how = (mixture, n_tokens)
                found = time_product(*how, timed, rates, flags.repeat)
                few = n_tokens * mixture.top_k <= RAGGED_ROWS
                ragged = time_product(*how, grouped_matmul, rates, flags.repeat)["seconds"] if few else None
                report["timed"].append(
                    {"mixture": mixture.name, "tokens": n_tokens, **found, "ragged_dot": ragged}
                )
                print(report["timed"][-1], flush=True)
        Console(width=120).print(table(report["timed"]))
    if flags.json:
        flags.json.write_text(json.dumps(report))
    print(json.dumps(report))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
