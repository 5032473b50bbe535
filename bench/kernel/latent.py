"""Checks the kernel of latent attention, then measures its time over its floor.

    python -m bench.kernel.latent [--one] [--tiny] [--repeat 7] [--json FILE]

First every form runs on random batches of decodes and prompts, against float64. Unused slots are NaN. The
same batch runs several times: a result that changes is a race. If anything is wrong nothing is timed, and the
status is 1.

Then it times decodes of DeepSeek-V3's heads, all 128 or the 16 of one of eight GPUs. A program has several
calls, each with a cache of its own. The floor is the bytes of keys, queries and results over the measured
bandwidth, or the operations over the measured matrix rate, with the scores computed once. The last line is
JSON.

`--one` runs one form alone, for a tool that checks memory accesses. `--tiny` tries this out on a CPU: one
form is interpreted, and the reference is timed in the kernel's place.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.kernel.aims import RELATIVE_ERROR
from bench.kernel.clock import time_calls
from bench.kernel.oracle import attend_float64, errors, random_batch
from orca_jax.aot.measured_device import measure_device
from orca_jax.pallas.latent_attention import latent_attention, latent_plan
from orca_jax.pallas.latent_attention_reference import latent_attention_reference
from orca_jax.pallas.work_list.work_items import work_items
from orca_jax.planning.cost_model import Device
from orca_jax.sharding.device_group import device_name

N_RUNS = 5  # of the same batch
SETS = 4  # of caches in a timed program
RANK, WIDTH = 512, 576


class Form(NamedTuple):
    """A batch of rows (new tokens, keys), and the sizes of the kernel."""

    n_heads: int
    block_size: int
    rows: tuple[tuple[int, int], ...]
    dtype: str = "bfloat16"
    rank: int = RANK
    width: int = WIDTH


ODD = Form(20, 32, ((1, 3001), (40, 333), (1, 64), (1, 1)), "float16")
FORMS = (
    ODD,
    Form(128, 16, ((1, 9000), (1, 100))),
    Form(128, 64, ((1, 1024),) * 40 + ((130, 700),)),
    Form(16, 16, tuple((1, 37 * i + 1) for i in range(100))),
    Form(80, 128, ((300, 300), (1, 129)), rank=256, width=320),
)
HEADS, ROWS, CONTEXTS = (128, 16), (1, 32, 128), (1024, 8192)
TINY = Form(8, 16, ((1, 300), (2, 20)), rank=128, width=192)
Attention = Callable[..., jax.Array]


def check(form: Form, n_cores: int, seed: int, n_runs: int, *, interpret: bool) -> dict[str, Any]:
    """The form's relative error against float64, and whether every run gave the same bits."""
    blocks = [-(-n // form.block_size) for _, n in form.rows]
    batch = random_batch(
        np.random.default_rng(seed),
        form.rows,
        n_tokens=sum(n for n, _ in form.rows) + 3,
        group=form.n_heads,
        n_kv_heads=1,
        head_size=form.width,
        block_size=form.block_size,
        max_blocks=max(blocks),
        n_blocks=sum(blocks) + 2,
        dtype=np.dtype(jnp.dtype(form.dtype)),
    )
    sizes = (len(batch.q), len(form.rows), form.n_heads, form.block_size, n_cores)
    plan = latent_plan(*sizes)
    work = jnp.asarray(work_items(batch.row_start, batch.kv_length, plan))
    arrays = [jnp.asarray(each) for each in (batch.q[:, :, 0], batch.k_cache, *batch[3:])]
    options = {"rank": form.rank, "scale": form.width**-0.5, "plan": plan, "interpret": interpret}
    attend = jax.jit(lambda work, *of: latent_attention(*of, work=work, **options))
    found = [np.asarray(attend(work, *arrays), np.float64) for _ in range(n_runs)]
    n_real = int(batch.row_start[-1])
    true = attend_float64(batch._replace(v_cache=batch.k_cache))[:n_real, :, 0, : form.rank]
    still = all(np.array_equal(found[0], other) for other in found)
    padding_is_zero = not found[0][n_real:].any()
    relative = errors(found[0][:n_real], true).relative if padding_is_zero else float("inf")
    return {**form._asdict(), "relative": relative, "still": still}


def time_decode(
    n_heads: int, n_rows: int, context: int, attend: Attention, n_cores: int, device: Device, repeat: int
) -> dict[str, Any]:
    """Seconds of a call with `n_rows` decodes, and over its floor."""
    block_size = 64
    n_blocks = n_rows * -(-context // block_size)
    table = jax.random.permutation(jax.random.key(1), n_blocks).reshape(n_rows, -1).astype(jnp.int32)
    row_start, kv_length = np.arange(n_rows + 1, dtype=np.int32), np.full(n_rows, context, np.int32)
    plan = latent_plan(n_rows, n_rows, n_heads, block_size, n_cores)
    work = jnp.asarray(work_items(row_start, kv_length, plan))
    keys = jax.random.split(jax.random.key(0), SETS + 1)
    shape = (n_blocks, 1, block_size, WIDTH)
    caches = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys[1:]]
    q = jax.random.normal(keys[0], (n_rows, n_heads, WIDTH), jnp.bfloat16)

    @jax.jit
    def run(q: jax.Array, caches: Sequence[jax.Array], *rows: jax.Array) -> list[jax.Array]:
        options = {"rank": RANK, "scale": WIDTH**-0.5, "work": work, "plan": plan}
        return [attend(q, cache, *rows, **options) for cache in caches]

    rows = (table, jnp.asarray(row_start), jnp.asarray(kv_length))
    taken = time_calls(lambda: run(q, caches, *rows), SETS, repeat=repeat)
    n_bytes = 2 * (n_rows * context * WIDTH + n_rows * n_heads * (WIDTH + RANK))
    operations = 2 * n_rows * context * n_heads * (WIDTH + RANK)
    floor = max(n_bytes / device.bandwidth, operations / device.matrix_rate)
    return {"seconds": taken.median, "floor_seconds": floor, "over_floor": taken.median / floor}


def _reference(*arrays: jax.Array, work: Any, plan: Any, **options: Any) -> jax.Array:
    return latent_attention_reference(*arrays, **options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernel.latent", description=__doc__)
    parser.add_argument("--one", action="store_true", help="one form, for a tool that checks memory accesses")
    parser.add_argument("--tiny", action="store_true", help="interpreted on the CPU")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    flags = parser.parse_args(argv)
    device = jax.devices()[0]
    n_cores = 2 if flags.tiny else int(getattr(device, "core_count", 132))
    report: dict[str, Any] = {"benchmark": "latent", "device": device_name(device), "jax": jax.__version__}
    report |= {"forms": [], "timed": []}
    for seed, form in enumerate((TINY,) if flags.tiny else (ODD,) if flags.one else FORMS):
        found = check(form, n_cores, seed, 1 if flags.tiny else N_RUNS, interpret=flags.tiny)
        report["forms"].append(found)
        print(found, flush=True)
    right = all(one["relative"] <= RELATIVE_ERROR and one["still"] for one in report["forms"])
    if right and not flags.one:
        attend = _reference if flags.tiny else latent_attention
        rates = measure_device(jnp.dtype(jnp.float32 if flags.tiny else jnp.bfloat16), repeat=flags.repeat)
        made = Table(title="decode of latent attention, bfloat16")
        for column in ("heads", "rows", "context", "microseconds", "over floor"):
            made.add_column(column, justify="right")
        cases = [(n, rows, context) for n in HEADS for rows in ROWS for context in CONTEXTS]
        for case in [(8, 2, 64)] if flags.tiny else cases:
            one = time_decode(*case, attend, n_cores, rates, flags.repeat)
            report["timed"].append(dict(zip(("heads", "rows", "context"), case, strict=True)) | one)
            made.add_row(*map(str, case), f"{1e6 * one['seconds']:,.1f}", f"{one['over_floor']:.2f}")
            print(report["timed"][-1], flush=True)
        Console(width=120).print(made)
    if flags.json:
        flags.json.write_text(json.dumps(report))
    print(json.dumps(report))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
