"""The split-attention kernel compiled for an H200 that need not be there: registers and spills, by ptxas.

    JAX_PLATFORMS=cpu python -m bench.compile_kernel

Nothing is run: times need a GPU. Each size is compiled in a process of its own, which has ptxas's words in
its output.
"""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.described_gpu import on_h200
from orca_jax.pallas.split_attention import split_attention
from orca_jax.pallas.work_items import Plan, work_items

# Head size, dtype, block size, query heads, key/value heads.
SIZES = tuple(
    (head_size, dtype, block_size, n_heads, n_kv_heads)
    for head_size in (64, 80, 96, 128, 256)
    for dtype, block_size, n_heads, n_kv_heads in (("bfloat16", 16, 8, 4), ("float16", 128, 40, 40))
)
_N_TOKENS, _N_ROWS, _MAX_BLOCKS, _N_BLOCKS = 256, 16, 64, 1024
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


def compile_one(head_size: int, dtype: str, block_size: int, n_heads: int, n_kv_heads: int) -> None:
    """Compile one; ptxas writes to this process's output."""
    here = on_h200()
    plan = Plan(_N_TOKENS, _N_ROWS, n_kv_heads, n_heads // n_kv_heads)

    def array(*shape: int, dtype: DTypeLike = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    def run(*arrays: jax.Array) -> jax.Array:
        _, row_start, kv_length = arrays[3:]
        return split_attention(*arrays, work=work_items(row_start, kv_length, plan), plan=plan)

    cache = array(_N_BLOCKS, n_kv_heads, block_size, head_size)
    table = array(_N_ROWS, _MAX_BLOCKS, dtype=jnp.int32)
    row_start, kv_length = array(_N_ROWS + 1, dtype=jnp.int32), array(_N_ROWS, dtype=jnp.int32)
    q = array(_N_TOKENS, n_heads, head_size)
    jax.jit(run).lower(q, cache, cache, table, row_start, kv_length).compile()


def ptxas(size: tuple[int, str, int, int, int]) -> tuple[int, int, int]:
    """Registers, bytes of spill stores and of spill loads. Raises RuntimeError where it does not compile."""
    command = [sys.executable, "-m", "bench.compile_kernel", *map(str, size)]
    environment = {**os.environ, "MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout + done.stderr
    if done.returncode != 0:
        raise RuntimeError(f"{size} does not compile: {said[-1000:]}")
    registers = _REGISTERS.findall(said)
    spills = _SPILLS.findall(said)
    if not registers or not spills:
        raise RuntimeError(f"ptxas said nothing of {size}: {said[-1000:]}")
    return int(registers[-1]), int(spills[-1][0]), int(spills[-1][1])


def main() -> None:
    """Compile all; a table, and last one line of JSON."""
    if len(sys.argv) > 1:
        head_size, dtype, block_size, n_heads, n_kv_heads = sys.argv[1:]
        compile_one(int(head_size), dtype, int(block_size), int(n_heads), int(n_kv_heads))
        return
    table = Table(title=f"split attention for an H200, jax {jax.__version__}")
    columns = ("D", "dtype", "B", "N", "K", "registers", "spill stores, bytes", "spill loads, bytes")
    for column in columns:
        table.add_column(column, justify="right")
    found = []
    for size in track(SIZES, "compiling", console=Console(stderr=True)):
        figures = (*size, *ptxas(size))
        table.add_row(*map(str, figures))
        found.append(figures)
    Console(width=100).print(table)
    print(json.dumps({"benchmark": "compile_kernel", "jax": jax.__version__, "sizes": found}))


if __name__ == "__main__":
    main()
