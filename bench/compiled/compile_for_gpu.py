"""Compiles the forward programs for GPUs that need not be present: memory, kernels, loops, launches.

    JAX_PLATFORMS=cpu python -m bench.compiled.compile_for_gpu \
        [--preset gpt3-13b] [--layers 4] [--buckets 1,32,2048]
        [--device h200] [--tensor-parallel 8] [--command-buffer-collectives]

XLA compiles for a described GPU if the CUDA plugin is installed (the extra `cuda`). Nothing is
run or autotuned: the figures are those of the compiled programs, and times need a GPU. A host-led loop is one
whose trip count is known only at run time, so that the host must read a condition back at each trip. A
command buffer is one CUDA graph; the host launches everything outside of them one by one. A sliced call gets
part of an array in place, at any address.
"""

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.compiled.thunks import Launches, dumped_launches
from orca_jax.aot.compiled_stage import BLOCK_SIZE, CompiledStage, compile_stage
from orca_jax.aot.described_gpu import described_devices
from orca_jax.config import ParallelConfig
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.presets import PRESETS
from orca_jax.planning.known_devices import GPUS
from orca_jax.sharding.partition import split_model


@dataclass(frozen=True)
class Compiled:
    """Properties of one bucket's compiled forward program; bytes and counts.

    `launches` counts what XLA launches; `sums` the all-reduces by the implementation that it chose: DEFAULT
    is NCCL's, all others are XLA's own kernels.
    """

    bucket: int
    seconds: float
    attention: str
    arguments: int
    temporaries: int
    fusions: int
    copies: int
    static_loops: int
    dynamic_loops: int
    sums: dict[str, int]
    launches: Launches


def compile_forward(
    model: ModelConfig,
    bucket: int,
    max_bs: int,
    *,
    device: str = "h200",
    tensor_parallel: int = 1,
    command_buffer_collectives: bool = False,
    compiler_options: Mapping[str, str | bool] | None = None,
) -> CompiledStage:
    """One bucket's forward program in bfloat16, with the attention that is chosen for such GPUs."""
    devices = described_devices(device, tensor_parallel)
    (part,) = split_model(model, devices, ParallelConfig(tensor_parallel=tensor_parallel))
    n_blocks = max_bs * -(-model.n_positions // BLOCK_SIZE)
    return compile_stage(
        model,
        part,
        bucket,
        max_bs=max_bs,
        n_blocks=n_blocks,
        command_buffer_collectives=command_buffer_collectives,
        compiler_options=compiler_options,
    )


def figures(model: ModelConfig, bucket: int, max_bs: int, **how: Any) -> Compiled:
    """Compile one bucket's forward program in bfloat16 and count; `how` as for `compile_forward`."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="orca-xla-") as dump:
        compiled = compile_forward(model, bucket, max_bs, **how, compiler_options={"xla_dump_to": dump})
        seconds = time.perf_counter() - start
        launches = dumped_launches(Path(dump), "_forward")
    text, memory = compiled.program.as_text(), compiled.program.memory_analysis()
    assert text is not None and memory is not None
    entry = text.split("ENTRY", 1)[1]
    loops, static = len(re.findall(r" while\(", text)), len(re.findall(r"known_trip_count", text))
    return Compiled(
        bucket=bucket,
        seconds=seconds,
        attention=compiled.attention,
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        fusions=len(re.findall(r" fusion\(", entry)),
        copies=len(re.findall(r" copy\(", entry)),
        static_loops=static,
        dynamic_loops=loops - static,
        sums=_sums(text),
        launches=launches,
    )


def _sums(text: str) -> dict[str, int]:
    sums = Counter[str]()
    for line in text.splitlines():
        if re.search(r" all-reduce(?:-start)?\(", line):
            strategy = re.search(r'"KERNEL_STRATEGY_(?:TRITON_)?(\w+)"', line)
            sums[strategy[1] if strategy else "DEFAULT"] += 1
    return dict(sums)


def main() -> None:
    """Compile, print a table and, as the last line, JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.compiled.compile_for_gpu", description=__doc__)
    parser.add_argument("--preset", default="gpt3-13b", choices=sorted(PRESETS))
    parser.add_argument("--layers", type=int, default=4, help="layers to compile (default: 4)")
    parser.add_argument("--buckets", default="1,32,2048", help="token counts (default: 1,32,2048)")
    parser.add_argument("--max-batch-size", type=int, default=32)
    parser.add_argument("--device", default="h200", choices=sorted(GPUS), help="the GPU (default: h200)")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share a layer")
    parser.add_argument("--command-buffer-collectives", action="store_true", help="as for `orca serve`")
    flags = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)  # a cached program would dump nothing
    buckets = [int(n) for n in flags.buckets.split(",")]
    model = replace(PRESETS[flags.preset], layers=PRESETS[flags.preset].layers[:1] * flags.layers)
    rows = [
        figures(
            model,
            bucket,
            flags.max_batch_size,
            device=flags.device,
            tensor_parallel=flags.tensor_parallel,
            command_buffer_collectives=flags.command_buffer_collectives,
        )
        for bucket in track(buckets, "compiling", console=Console(stderr=True))
    ]
    gpus = f"{flags.tensor_parallel} x {flags.device}"
    made = Table(title=f"{flags.preset}, {flags.layers} layers, bfloat16, {gpus}: {rows[0].attention}")
    for column in (
        "bucket",
        "arguments MB",
        "temporaries MB",
        "fusions",
        "copies",
        "loops",
        "host-led loops",
        "command buffers",
        "launches outside",
        "sliced calls",
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
            str(row.launches.command_buffers),
            str(sum(row.launches.outside.values())),
            str(row.launches.sliced_calls),
        )
    Console(width=140).print(made)
    report = {**vars(flags), "jax": jax.__version__, "programs": [asdict(row) for row in rows]}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
