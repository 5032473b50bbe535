"""Compiles the split-attention kernel for an H200 that need not be present: registers, spills, shared memory.

    JAX_PLATFORMS=cpu python -m bench.compiled.compile_kernel

Nothing is run: times need a GPU. Each size is compiled in a separate process, whose output contains Mosaic's
and ptxas' reports. If the package nvidia-cuda-nvdisasm is installed too, the loops of the machine code are
checked: whether registers are spilled near the matrix instructions.
"""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.compiled.kernel_code import Descriptor, KeyLoop, descriptors, key_loops, plain_copies
from orca_jax.aot.described_gpu import on_h200
from orca_jax.pallas.split_attention import split_attention
from orca_jax.pallas.work_list.bounds import Plan


class Size(NamedTuple):
    """One size to compile; the queries are read from a fused QKV product."""

    head_size: int
    dtype: str
    block_size: int
    n_heads: int
    n_kv_heads: int
    window: int | None = None
    soft_cap: float | None = None

    def __str__(self) -> str:
        extra = f" window {self.window}, cap {self.soft_cap:g}" if self.window and self.soft_cap else ""
        return (
            f"D {self.head_size} {self.dtype} B {self.block_size} N {self.n_heads}/{self.n_kv_heads}{extra}"
        )


SIZES = tuple(
    size
    for head_size in (64, 80, 96, 128, 256)
    for size in (
        Size(head_size, "bfloat16", 16, 8, 4),
        Size(head_size, "float16", 128, 40, 40),
        Size(head_size, "bfloat16", 16, 32, 8),
        Size(head_size, "bfloat16", 64, 16, 2, window=1024, soft_cap=50.0),
    )
)
_N_TOKENS, _N_ROWS, _MAX_BLOCKS, _N_BLOCKS = 256, 16, 64, 1024
_SHARED_LIMIT = 227 * 1024  # bytes available to a block on Hopper
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers, used (\d+) barriers.* (\d+) bytes smem")
# Three sizes each of grid, cluster and block, then the bytes of dynamic shared memory.
_DYNAMIC = re.compile(r"@mosaic_gpu_launch_kernel\(ptr \S+(?:, i32 \d+){9}, i32 (\d+),")


class Figures(NamedTuple):
    """The compilers' figures for one size."""

    registers: int  # per thread, before the warp groups redistribute them
    barriers: int  # named barriers of the block
    spill_stores: int  # bytes, in the whole kernel
    spill_loads: int
    shared_bytes: int  # per block
    key_loops: tuple[KeyLoop, ...]  # empty if the machine code was not checked
    plain_copies: tuple[int, ...]  # bytes
    descriptors: tuple[Descriptor, ...]


def compile_one(size: Size) -> None:
    """Compile one size; ptxas writes to this process's output."""
    here = on_h200()
    group = size.n_heads // size.n_kv_heads
    plan = Plan(_N_TOKENS, _N_ROWS, size.n_kv_heads, group, size.block_size, window=size.window)

    def array(*shape: int, dtype: DTypeLike = size.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    def run(*arrays: jax.Array) -> jax.Array:
        *arguments, work = arrays
        return split_attention(*arguments, work=work, plan=plan, window=size.window, soft_cap=size.soft_cap)

    cache = array(_N_BLOCKS, size.n_kv_heads, size.block_size, size.head_size)
    table = array(_N_ROWS, _MAX_BLOCKS, dtype=jnp.int32)
    row_start, kv_length = array(_N_ROWS + 1, dtype=jnp.int32), array(_N_ROWS, dtype=jnp.int32)
    q = array(_N_TOKENS, group + 2, size.n_kv_heads, size.head_size)
    work = array(*plan.list_shape, dtype=jnp.int32)
    jax.jit(run).lower(q, cache, cache, table, row_start, kv_length, work).compile()


def figures(size: Size) -> Figures:
    """Compile one size in a process. Raises RuntimeError if it does not compile or fit shared memory."""
    return compilers_figures("bench.compiled.compile_kernel", size)


def compilers_figures(module: str, size: tuple[Any, ...]) -> Figures:
    """The compilers' reports on a size that `module` compiles; see `figures`."""
    command = [sys.executable, "-m", module, json.dumps(size)]
    wanted = ["PTXAS", "PTX", "HOST_LLVM"] + ["SASS"] * _has_nvdisasm()
    dumps = {f"MOSAIC_GPU_DUMP_{name}": "1" for name in wanted}
    environment = {**os.environ, **dumps, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    output = done.stdout + done.stderr
    if done.returncode != 0:
        raise RuntimeError(f"{size} does not compile: {output[-1000:]}")
    used, spills, dynamic = (pattern.findall(output) for pattern in (_USED, _SPILLS, _DYNAMIC))
    if not used or not spills or not dynamic:
        raise RuntimeError(f"the compilers reported nothing about {size}: {output[-1000:]}")
    registers, barriers, static = map(int, used[-1])
    stores, loads = map(int, spills[-1])
    shared = static + int(dynamic[-1])
    if shared > _SHARED_LIMIT:
        raise RuntimeError(f"{size} wants {shared} bytes of shared memory; a block has {_SHARED_LIMIT}")
    loops, copies, asked = tuple(key_loops(output)), tuple(plain_copies(output)), tuple(descriptors(output))
    return Figures(registers, barriers, stores, loads, shared, loops, copies, asked)


def _has_nvdisasm() -> bool:
    try:
        return bool(metadata.version("nvidia-cuda-nvdisasm"))
    except metadata.PackageNotFoundError:
        return False


def main() -> None:
    """Compile all sizes; print a table and, as the last line, JSON."""
    if len(sys.argv) > 1:
        compile_one(Size(*json.loads(sys.argv[1])))
        return
    table = Table(title=f"split attention for an H200, jax {jax.__version__}")
    counts = Figures._fields[:5]
    columns = ("D", "dtype", "B", "N", "K", "window", "cap", *counts)
    columns += ("instructions of key loops", "spills in them")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    rows = []
    for size in track(SIZES, "compiling", console=Console(stderr=True)):
        made = figures(size)
        loops = made.key_loops
        row = (*size, *made[:5], [one.n_instructions for one in loops], sum(one.n_spills for one in loops))
        cells = ["" if cell is None else str(cell) for cell in row[:-2]]
        table.add_row(*cells, ", ".join(map(str, row[-2])), str(row[-1]) if loops else "not seen")
        rows.append(row)
    Console(width=120).print(table)
    print(
        json.dumps({"benchmark": "compile_kernel", "jax": jax.__version__, "columns": columns, "sizes": rows})
    )


if __name__ == "__main__":
    main()
