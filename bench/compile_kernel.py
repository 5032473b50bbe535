"""The split-attention kernel compiled for an H200 that need not be there: registers, spills, shared memory.

    JAX_PLATFORMS=cpu python -m bench.compile_kernel

Nothing is run: times need a GPU. Each size is compiled in a process of its own, whose output has the words of
Mosaic and of ptxas. Where the package nvidia-cuda-nvdisasm is installed as well, the machine code's loops are
looked at: whether registers are spilled where the matrix instructions are.
"""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from rich.console import Console
from rich.progress import track
from rich.table import Table

from orca_jax.pallas.split_attention import split_attention
from orca_jax.pallas.work_items import Plan, work_items
from orca_jax.sharding.described_gpu import on_h200

# Head size, dtype, block size, query heads, key/value heads.
SIZES = tuple(
    (head_size, dtype, block_size, n_heads, n_kv_heads)
    for head_size in (64, 80, 96, 128, 256)
    for dtype, block_size, n_heads, n_kv_heads in (("bfloat16", 16, 8, 4), ("float16", 128, 40, 40))
)
_N_TOKENS, _N_ROWS, _MAX_BLOCKS, _N_BLOCKS = 256, 16, 64, 1024
_SHARED_LIMIT = 227 * 1024  # bytes that Hopper gives a block
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers, used (\d+) barriers.* (\d+) bytes smem")
_DYNAMIC = re.compile(
    r"@mosaic_gpu_launch_kernel\(ptr \S+(?:, i32 \d+){9}, i32 (\d+),"
)  # grid, cluster, block
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?) *;")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
_LOCAL = re.compile(r"\b(STL|LDL)\b")


class Figures(NamedTuple):
    """What the compilers say of one size."""

    registers: int  # of a thread, before the warp groups share them out anew
    barriers: int  # of the block's named barriers
    spill_stores: int  # bytes, in the whole kernel
    spill_loads: int
    shared_bytes: int  # of a block
    key_loops: int | None  # loops with matrix instructions; None where the machine code was not looked at
    spills_in_key_loops: int | None  # instructions that store or load a spilled register


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


def figures(size: tuple[int, str, int, int, int]) -> Figures:
    """What compiling one size gives. Raises RuntimeError where it does not compile or fit shared memory."""
    command = [sys.executable, "-m", "bench.compile_kernel", *map(str, size)]
    wanted = ("PTXAS", "HOST_LLVM", "SASS") if _has_nvdisasm() else ("PTXAS", "HOST_LLVM")
    dumps = {f"MOSAIC_GPU_DUMP_{name}": "1" for name in wanted}
    environment = {**os.environ, **dumps, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout + done.stderr
    if done.returncode != 0:
        raise RuntimeError(f"{size} does not compile: {said[-1000:]}")
    used, spills, dynamic = (pattern.findall(said) for pattern in (_USED, _SPILLS, _DYNAMIC))
    if not used or not spills or not dynamic:
        raise RuntimeError(f"the compilers said nothing of {size}: {said[-1000:]}")
    registers, barriers, static = map(int, used[-1])
    stores, loads = map(int, spills[-1])
    shared = static + int(dynamic[-1])
    if shared > _SHARED_LIMIT:
        raise RuntimeError(f"{size} wants {shared} bytes of shared memory; a block has {_SHARED_LIMIT}")
    return Figures(registers, barriers, stores, loads, shared, *spills_in_key_loops(said))


def _has_nvdisasm() -> bool:
    try:
        return bool(metadata.version("nvidia-cuda-nvdisasm"))
    except metadata.PackageNotFoundError:
        return False


def spills_in_key_loops(sass: str) -> tuple[int, int] | tuple[None, None]:
    """How many loops hold matrix instructions, and how many instructions in them move spilled registers.

    A loop is what lies between a backward branch and its target, and an instruction's is the shortest around
    it: waits that fail go back from the end of the code, which makes long ranges that are no loops over keys.
    """
    place = dict[str, int]()
    code = list[str]()
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            place[label[1]] = len(code)
        elif instruction := _INSTRUCTION.search(line):
            code.append(instruction[1])
    jumps = [(place[b[1]], i) for i, text in enumerate(code) if (b := _BRANCH.search(text)) and b[1] in place]
    loops = [(begin, end) for begin, end in jumps if begin < end]
    products = [i for i, text in enumerate(code) if "HGMMA" in text]
    if not products:
        return None, None
    around = ([loop for loop in loops if loop[0] <= i <= loop[1]] for i in products)
    key_loops = {min(candidates, key=lambda loop: loop[1] - loop[0]) for candidates in around}
    spills = (_LOCAL.search(text) is not None for begin, end in key_loops for text in code[begin : end + 1])
    return len(key_loops), sum(spills)


def main() -> None:
    """Compile all; a table, and last one line of JSON."""
    if len(sys.argv) > 1:
        head_size, dtype, block_size, n_heads, n_kv_heads = sys.argv[1:]
        compile_one(int(head_size), dtype, int(block_size), int(n_heads), int(n_kv_heads))
        return
    table = Table(title=f"split attention for an H200, jax {jax.__version__}")
    columns = ("D", "dtype", "B", "N", "K", *(name.replace("_", " ") for name in Figures._fields))
    for column in columns:
        table.add_column(column, justify="right")
    found = []
    for size in track(SIZES, "compiling", console=Console(stderr=True)):
        row = (*size, *figures(size))
        table.add_row(*("not looked at" if x is None else str(x) for x in row))
        found.append(row)
    Console(width=120).print(table)
    print(
        json.dumps(
            {"benchmark": "compile_kernel", "jax": jax.__version__, "columns": columns, "sizes": found}
        )
    )


if __name__ == "__main__":
    main()
