"""Compiles the kernel of latent attention for an H200 that need not be present.

    JAX_PLATFORMS=cpu python -m bench.compiled.compile_latent

As in compile_kernel.py, nothing is run, and each size is compiled in a separate process: registers, spills,
shared memory.
"""

import json
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from bench.compiled.compile_experts import print_figures
from bench.compiled.compile_kernel import Figures, compilers_figures
from orca_jax.aot.described_gpu import on_h200
from orca_jax.pallas.latent_attention import latent_attention, latent_plan


class Size(NamedTuple):
    """Heads and sizes to compile."""

    n_heads: int
    rank: int
    width: int
    block_size: int
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"N {self.n_heads} C {self.rank} D {self.width} B {self.block_size} {self.dtype}"


SIZES = (
    Size(128, 512, 576, 16),  # DeepSeek-V3, whole and over 8 GPUs
    Size(16, 512, 576, 16),
    Size(64, 512, 576, 64),  # Kimi-K2
    Size(20, 512, 576, 128, "float16"),  # GLM-4.7-Flash
    Size(32, 256, 320, 32),
    Size(80, 128, 192, 16),
)
_N_TOKENS, _N_ROWS, _MAX_BLOCKS, _N_BLOCKS = 256, 16, 64, 1024


def compile_one(size: Size) -> None:
    """Compile one size; ptxas writes to this process's output."""
    here = on_h200()
    plan = latent_plan(_N_TOKENS, _N_ROWS, size.n_heads, size.block_size, 132)

    def array(*shape: int, dtype: DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    def run(*arrays: jax.Array) -> jax.Array:
        *arguments, work = arrays
        return latent_attention(*arguments, rank=size.rank, scale=0.1, work=work, plan=plan)

    q = array(_N_TOKENS, size.n_heads, size.width, dtype=size.dtype)
    cache = array(_N_BLOCKS, 1, size.block_size, size.width, dtype=size.dtype)
    rows = (array(_N_ROWS, _MAX_BLOCKS), array(_N_ROWS + 1), array(_N_ROWS))
    jax.jit(run).lower(q, cache, *rows, array(*plan.list_shape)).compile()


def figures(size: Size) -> Figures:
    """Compile one size in a process. Raises RuntimeError if it does not compile or fit shared memory."""
    return compilers_figures("bench.compiled.compile_latent", size)


def main() -> None:
    """Compile all sizes; print a table and, as the last line, JSON."""
    if len(sys.argv) > 1:
        compile_one(Size(*json.loads(sys.argv[1])))
        return
    print_figures("compile_latent", "latent attention", SIZES, figures)


if __name__ == "__main__":
    main()
