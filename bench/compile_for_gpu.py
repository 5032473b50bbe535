"""The forward programs compiled for an H200 that need not be there: memory, kernels, loops.

    JAX_PLATFORMS=cpu python -m bench.compile_for_gpu [--preset gpt3-13b] [--layers 4] [--buckets 1,32,2048]

XLA compiles for a described GPU where the CUDA plugin is installed (`pip install 'orca_jax[cuda]'`). Nothing
is run or autotuned: the figures are of the compiled programs, and times need a GPU. A host-led loop is one
whose trip count is known only at run time, so that the host must read a condition back at each trip.
"""

import argparse
import json
import re
import time
from dataclasses import dataclass, replace

import jax
import jax.stages
from rich.console import Console
from rich.progress import track
from rich.table import Table

from orca_jax.config import ModelConfig
from orca_jax.model.presets import PRESETS
from orca_jax.sharding.compiled_stage import BLOCK_SIZE, compile_stage
from orca_jax.sharding.described_gpu import described_devices
from orca_jax.sharding.partition import split_model


@dataclass(frozen=True)
class Compiled:
    """What the compiled forward program of one bucket says of itself; bytes and counts."""

    bucket: int
    seconds: float
    arguments: int
    temporaries: int
    fusions: int
    copies: int
    static_loops: int
    dynamic_loops: int


def compile_forward(model: ModelConfig, bucket: int, max_bs: int) -> jax.stages.Compiled:
    """One bucket's forward program in bfloat16 for one H200, with the attention that is chosen there."""
    (part,) = split_model(model, described_devices("h200", 1))
    n_blocks = max_bs * -(-model.n_positions // BLOCK_SIZE)
    return compile_stage(model, part, bucket, max_bs=max_bs, n_blocks=n_blocks).program


def figures(model: ModelConfig, bucket: int, max_bs: int) -> Compiled:
    """Compile one bucket's forward program in bfloat16 and count."""
    start = time.perf_counter()
    compiled = compile_forward(model, bucket, max_bs)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    entry = text.split("ENTRY", 1)[1]
    loops, static = len(re.findall(r" while\(", text)), len(re.findall(r"known_trip_count", text))
    return Compiled(
        bucket=bucket,
        seconds=time.perf_counter() - start,
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        fusions=len(re.findall(r" fusion\(", entry)),
        copies=len(re.findall(r" copy\(", entry)),
        static_loops=static,
        dynamic_loops=loops - static,
    )


def main() -> None:
    """Compile, print a table and last one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.compile_for_gpu", description=__doc__)
    parser.add_argument("--preset", default="gpt3-13b", choices=sorted(PRESETS))
    parser.add_argument("--layers", type=int, default=4, help="layers to compile (default: 4)")
    parser.add_argument("--buckets", default="1,32,2048", help="token counts (default: 1,32,2048)")
    parser.add_argument("--max-batch-size", type=int, default=32)
    flags = parser.parse_args()
    buckets = [int(n) for n in flags.buckets.split(",")]
    model = replace(PRESETS[flags.preset], n_layers=flags.layers)
    rows = [
        figures(model, bucket, flags.max_batch_size)
        for bucket in track(buckets, "compiling", console=Console(stderr=True))
    ]
    made = Table(title=f"{flags.preset}, {flags.layers} layers, bfloat16, compiled for one H200")
    for column in (
        "bucket",
        "arguments MB",
        "temporaries MB",
        "fusions",
        "copies",
        "loops",
        "host-led loops",
    ):
        made.add_column(column, justify="right")
    for row in rows:
        made.add_row(
            str(row.bucket),
            f"{row.arguments / 1e6:.1f}",
            f"{row.temporaries / 1e6:.1f}",
            str(row.fusions),
            str(row.copies),
            str(row.static_loops + row.dynamic_loops),
            str(row.dynamic_loops),
        )
    Console(width=120).print(made)
    print(
        json.dumps({"preset": flags.preset, "layers": flags.layers, "programs": [vars(row) for row in rows]})
    )


if __name__ == "__main__":
    main()
