"""Compiles the experts' kernel for an H200 that need not be present: registers, spills, shared memory.

    JAX_PLATFORMS=cpu python -m bench.compiled.compile_experts

As in compile_kernel.py, nothing is run, and each size is compiled in a separate process.
"""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.compiled.compile_kernel import Figures, compilers_figures
from orca_jax.aot.described_gpu import on_h200
from orca_jax.pallas.grouped_product import grouped_product

SizeT = TypeVar("SizeT", bound=Any)  # a named tuple


class Size(NamedTuple):
    """Rows and experts of [out, in] to compile."""

    n_rows: int
    n_experts: int
    n_out: int
    n_in: int
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.n_rows} rows, {self.n_experts} experts of {self.n_out} x {self.n_in} {self.dtype}"


SIZES = (
    Size(8, 128, 1536, 2048),  # Qwen3 30B-A3B, a token; 256 tokens; a prompt
    Size(2048, 128, 1536, 2048),
    Size(16384, 128, 2048, 768),
    Size(64, 8, 28672, 4096),  # Mixtral 8x7B, 32 tokens; cut in two, a prompt
    Size(4096, 8, 4096, 7168),
    Size(45, 5, 192, 80, "float16"),
    Size(128, 32, 2880, 1440),  # gpt-oss 20B, cut in two
)


def compile_one(size: Size) -> None:
    """Compile one size; ptxas writes to this process's output."""
    here = on_h200()
    x = jax.ShapeDtypeStruct((size.n_rows, size.n_in), size.dtype, sharding=here)
    weight = jax.ShapeDtypeStruct((size.n_experts, size.n_out, size.n_in), size.dtype, sharding=here)
    sizes = jax.ShapeDtypeStruct((size.n_experts,), jnp.int32, sharding=here)
    jax.jit(grouped_product).lower(x, weight, sizes).compile()


def figures(size: Size) -> Figures:
    """Compile one size in a process. Raises RuntimeError if it does not compile or fit shared memory."""
    return compilers_figures("bench.compiled.compile_experts", size)


def main() -> None:
    """Compile all sizes; print a table and, as the last line, JSON."""
    if len(sys.argv) > 1:
        compile_one(Size(*json.loads(sys.argv[1])))
        return
    print_figures("compile_experts", "products of experts", SIZES, figures)


def print_figures(
    benchmark: str, title: str, sizes: Sequence[SizeT], figures: Callable[[SizeT], Figures]
) -> None:
    """Compile all sizes; print a table and, as the last line, JSON."""
    table = Table(title=f"{title} for an H200, jax {jax.__version__}")
    columns = (*sizes[0]._fields, *Figures._fields[:5])
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    rows = [(*size, *figures(size)[:5]) for size in track(sizes, "compiling", console=Console(stderr=True))]
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=120).print(table)
    print(json.dumps({"benchmark": benchmark, "jax": jax.__version__, "columns": columns, "sizes": rows}))


if __name__ == "__main__":
    main()
