"""Partitions the models of the paper's Table 1 into stages and compiles them for GPUs that need not be
present.

    JAX_PLATFORMS=cpu python -m bench.compiled.partitions [--devices a100-40gb,h200] [--models gpt3-13b,...]

Each distinct stage of a partition (the first, one from the middle, the last) is compiled in bfloat16 with all
its layers, for decode of 32 rows and prefill of 2,048 tokens. Nothing is run or autotuned: bytes and
collectives are those of the compiled programs, and times need GPUs.

The collectives of a layer are the difference between the stage and the same stage with a single layer,
divided by the layers between them; the rest is outside the layers. Slots are what fits in the memory of the
GPU's data sheet after weights, temporaries and results: CUDA, NCCL and the allocator take some of it too.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.compiled.collectives import Collective, collectives
from orca_jax.aot.compiled_stage import (
    BLOCK_SIZE,
    DTYPE,
    CompiledStage,
    compile_stage,
    device_bytes,
    placed_parameters,
)
from orca_jax.aot.described_gpu import described_devices
from orca_jax.config import ParallelConfig
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.presets import PRESETS
from orca_jax.planning.known_devices import GPUS
from orca_jax.planning.stage_memory import slot_bytes
from orca_jax.sharding.partition import StagePart, split_model

# Stages and devices of each: Table 1 for the paper's GPUs, and what fits in its memory for the H200.
PARTITIONS: dict[str, tuple[tuple[str, int, int], ...]] = {
    "a100-40gb": (
        ("gpt3-13b", 1, 1),
        ("gpt3-101b", 1, 8),
        ("gpt3-175b", 2, 8),
        ("gpt3-341b", 4, 8),
    ),
    "h200": (
        ("gpt3-13b", 1, 1),
        ("gpt3-101b", 1, 2),
        ("gpt3-175b", 1, 4),
        ("gpt3-175b", 2, 2),
        ("gpt3-341b", 1, 8),
        ("gpt3-341b", 2, 4),
        ("llama-3.1-70b", 1, 4),
        ("llama-3.1-405b", 2, 8),
        ("mixtral-8x7b", 1, 2),
        ("qwen3-30b-a3b", 1, 4),
        ("qwen3-30b-a3b", 2, 1),
        ("deepseek-v3", 2, 8),
    ),
}
BUCKETS = (32, 2048)  # decode and prefill
MAX_BS = 32
# Weights and cache take at most this share of a device's memory: near its limit XLA computes things twice.
_FILLED = 0.75


@dataclass(frozen=True)
class Program:
    """The forward program of one bucket, compiled for a stage; bytes are per device.

    `seconds` is the time to trace, lower and compile.
    """

    bucket: int
    arguments: int
    temporaries: int
    results: int
    collectives: list[Collective]
    seconds: float


@dataclass(frozen=True)
class StageRow:
    """One distinct stage of a partition. `layers` are counted from 1; bytes are per device.

    Programs are in the order of BUCKETS; `link_bytes`, by program, is what a device sends to the next stage.
    """

    gpu: str
    model: str
    n_stages: int
    tensor: int
    layers: tuple[int, int]
    attention: str
    weights: int
    slot_bytes: int
    slots: int
    programs: list[Program]
    per_layer: dict[str, float]
    outside: dict[str, float]
    link_bytes: list[int]


def program_of(
    model: ModelConfig, part: StagePart, bucket: int, *, memory_bytes: int
) -> tuple[Program, CompiledStage]:
    """Compile a stage's forward program of one bucket, with the largest cache that is useful and fits."""
    weights = device_bytes(placed_parameters(model, part))
    per_slot = slot_bytes(model, part.layers, len(part.group), DTYPE.itemsize)
    fits = int(memory_bytes * _FILLED - weights) // (per_slot * BLOCK_SIZE)
    n_blocks = min(MAX_BS * -(-model.n_positions // BLOCK_SIZE), fits)
    start = time.perf_counter()
    compiled = compile_stage(model, part, bucket, max_bs=MAX_BS, n_blocks=n_blocks)
    seconds = time.perf_counter() - start
    text, memory = compiled.program.as_text(), compiled.program.memory_analysis()
    assert text is not None and memory is not None
    # What is counted here is what the program takes.
    assert abs(memory.argument_size_in_bytes - compiled.arguments) < 1e-3 * weights
    program = Program(
        bucket=bucket,
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        collectives=collectives(text),
        seconds=seconds,
    )
    return program, compiled


def distinct_stages(parts: tuple[StagePart, ...]) -> Iterator[int]:
    """The indices of stages that differ from earlier ones: in number of layers, or as first or last."""
    seen: set[tuple[int, bool, bool]] = set()
    for i, part in enumerate(parts):
        kind = len(part.layers), part.first, part.last
        if kind not in seen:
            seen.add(kind)
            yield i


def measure(gpu: str, name: str, n_stages: int, tensor: int) -> Iterator[StageRow]:
    """The distinct stages of one partition."""
    model = PRESETS[name]
    devices = described_devices(gpu, n_stages * tensor)
    parts = split_model(model, devices, ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor))
    shallow = replace(model, layers=model.layers[:n_stages])
    shallow_parts = split_model(
        shallow, devices, ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor)
    )
    for i in distinct_stages(parts):
        part = parts[i]
        compiled = [program_of(model, part, bucket, memory_bytes=GPUS[gpu].memory) for bucket in BUCKETS]
        programs = [program for program, _ in compiled]
        weights, attention = compiled[0][1].weights, compiled[0][1].attention
        alone, _ = program_of(shallow, shallow_parts[i], BUCKETS[0], memory_bytes=GPUS[gpu].memory)
        whole, single = (Counter(c.kind for c in p.collectives) for p in (programs[0], alone))
        per_layer = {kind: (whole[kind] - single[kind]) / (len(part.layers) - 1) for kind in whole | single}
        outside = {kind: single[kind] - per_layer[kind] for kind in per_layer}
        assert all(Counter(c.kind for c in p.collectives) == whole for p in programs), "buckets differ"
        per_slot = slot_bytes(model, part.layers, len(part.group), DTYPE.itemsize)
        work = max(program.temporaries + program.results for program in programs)
        yield StageRow(
            gpu=gpu,
            model=name,
            n_stages=n_stages,
            tensor=tensor,
            layers=(part.layers.start + 1, part.layers.stop),
            attention=attention,
            weights=weights,
            slot_bytes=per_slot,
            slots=max(0, (GPUS[gpu].memory - weights - work) // per_slot),
            programs=programs,
            per_layer=per_layer,
            outside=outside,
            link_bytes=[0 if part.last else n * model.hidden_size * DTYPE.itemsize for n in BUCKETS],
        )


def table(rows: list[StageRow]) -> Table:
    """A row per stage; sizes are per GPU, and pairs are those of decode and of prefill."""
    made = Table(title=f"bfloat16, compiled and not run, jax {jax.__version__}; buckets of 32 / 2,048 tokens")
    columns = (
        "GPU", "model", "stages x tensor", "layers", "weights GB", "temporaries MB", "slots",
        "per layer", "outside", "one all-reduce MB", "all of them MB", "link MB", "compile s",
    )  # fmt: skip
    for column in columns:
        made.add_column(column, justify="right")
    for row in rows:
        reduces = [[c.n_bytes for c in p.collectives if c.kind == "all-reduce"] for p in row.programs]
        made.add_row(
            row.gpu,
            row.model,
            f"{row.n_stages} x {row.tensor}",
            f"{row.layers[0]} to {row.layers[1]}",
            f"{row.weights / 1e9:.2f}",
            _both([program.temporaries for program in row.programs]),
            f"{row.slots:,}",
            _listed(row.per_layer),
            _listed(row.outside),
            _both([max(sizes, default=0) for sizes in reduces]),
            _both([sum(sizes) for sizes in reduces]),
            _both(row.link_bytes),
            " / ".join(f"{program.seconds:.0f}" for program in row.programs),
        )
    return made


def _both(sizes: list[int]) -> str:
    return " / ".join(f"{size / 1e6:,.1f}" for size in sizes) if any(sizes) else "-"


def _listed(counts: dict[str, float]) -> str:
    return ", ".join(f"{n:g} {kind}" for kind, n in sorted(counts.items()) if n) or "none"


def main() -> None:
    """Compile, print a table and, as the last line, JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.compiled.partitions", description=__doc__)
    parser.add_argument("--devices", default=",".join(PARTITIONS), help="default: all")
    known = sorted({name for partitions in PARTITIONS.values() for name, _, _ in partitions})
    parser.add_argument("--models", default=",".join(known), help="default: all")
    flags = parser.parse_args()
    gpus = [gpu for gpu in PARTITIONS if gpu in flags.devices.split(",")]
    models = flags.models.split(",")
    if unknown := (set(flags.devices.split(",")) - set(gpus)) | (set(models) - set(known)):
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join([*PARTITIONS, *known])}")
    wanted = [(gpu, *partition) for gpu in gpus for partition in PARTITIONS[gpu] if partition[0] in models]
    rows: list[StageRow] = []
    for partition in track(wanted, "compiling", console=Console(stderr=True)):
        rows.extend(measure(*partition))
    Console(width=190).print(table(rows))
    stages = [vars(row) | {"programs": [_program(program) for program in row.programs]} for row in rows]
    print(json.dumps({"benchmark": "partitions", "jax": jax.__version__, "stages": stages}))


def _program(program: Program) -> dict[str, object]:
    """For JSON, with equal collectives merged."""
    alike = Counter(program.collectives)
    return {
        **vars(program),
        "collectives": [{"kind": c.kind, "bytes": c.n_bytes, "count": n} for c, n in alike.items()],
    }


if __name__ == "__main__":
    main()
