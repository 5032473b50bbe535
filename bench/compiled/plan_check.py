"""Compares `orca plan`'s formulas with what XLA compiles, for every preset: bytes per device of each stage.

    JAX_PLATFORMS=cpu python -m bench.compiled.plan_check \
        [--devices h200,a100-40gb] [--models gpt2,...] [--layers N] [--max-batch-tokens N]

The programs are compiled for GPUs that need not be present (the extra `cuda`); nothing is run.
Each distinct stage of a partition is compiled with the sizes that the plan chose. `--layers` limits the
layers of a stage, with the same slots for each, because XLA's time grows with them. Rows are printed as they
are ready; then a table and, as the last line, JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from bench.compiled.partitions import PARTITIONS, distinct_stages
from orca_jax.aot.described_gpu import described_devices
from orca_jax.aot.memory_plan import compiled_memory
from orca_jax.config import ParallelConfig, Sizes
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.presets import PRESETS
from orca_jax.planning.known_devices import GPUS
from orca_jax.planning.plan import Plan, PlanTarget, make_plan
from orca_jax.planning.sizes import n_rows
from orca_jax.sharding.partition import split_model

DTYPE = "bfloat16"
WITHIN = 0.05  # the plan's permitted error


@dataclass(frozen=True)
class Row:
    """One stage: the plan's figures per device, and those of the compiled programs; bytes.

    `planned` and `compiled` are the sums of weights, keys and values, and temporaries.
    """

    gpu: str
    model: str
    n_stages: int
    tensor: int
    layers: tuple[int, int]
    slots: int
    planned_arguments: int
    compiled_arguments: int
    planned_temporaries: int
    compiled_temporaries: int
    seconds: float

    @property
    def planned(self) -> int:
        """The plan's total."""
        return self.planned_arguments + self.planned_temporaries

    @property
    def compiled(self) -> int:
        """XLA's total."""
        return self.compiled_arguments + self.compiled_temporaries

    @property
    def off(self) -> float:
        """The plan's error, relative to XLA's figure."""
        return self.planned / self.compiled - 1


def target(gpu: str, model: ModelConfig, n_stages: int, tensor: int, sizes: Sizes) -> PlanTarget:
    """The plan's question, with defaults for everything else."""
    return PlanTarget(
        config=model,
        device=GPUS[gpu],
        sizes=sizes,
        dtype=DTYPE,
        context=model.n_positions // 2,
        parallel=ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor),
    )


def compare(gpu: str, name: str, plan: Plan) -> Iterator[Row]:
    """The distinct stages of a plan that fits."""
    asked = plan.target
    n_stages, tensor = asked.parallel.pipeline_parallel, asked.parallel.tensor_parallel
    devices = described_devices(gpu, asked.parallel.n_devices)
    parts = split_model(asked.model, devices, asked.parallel)
    rows = n_rows(plan.serving.max_batch_size, n_workers=n_stages)
    for i in distinct_stages(parts):
        start = time.perf_counter()
        compiled = compiled_memory(asked.model, parts[i], plan.serving, n_rows=rows, dtype=jnp.dtype(DTYPE))
        memory = plan.stages[i].memory
        n_slots = plan.serving.n_blocks * plan.serving.block_size
        yield Row(
            gpu=gpu,
            model=name,
            n_stages=n_stages,
            tensor=tensor,
            layers=(parts[i].layers.start + 1, parts[i].layers.stop),
            slots=n_slots,
            planned_arguments=memory.weights + n_slots * memory.slot,
            compiled_arguments=compiled.arguments,
            planned_temporaries=memory.temporaries,
            compiled_temporaries=compiled.temporaries,
            seconds=time.perf_counter() - start,
        )


def table(rows: Sequence[Row]) -> Table:
    """A row per stage."""
    made = Table(title=f"{DTYPE}, planned / compiled, bytes of one device; jax {jax.__version__}")
    for column in (
        *("GPU", "model", "stages x parts", "layers", "slots", "weights and slots, GB"),
        *("temporaries, MB", "together, GB", "off", "compile s"),
    ):
        made.add_column(column, justify="right")
    for row in rows:
        made.add_row(
            row.gpu,
            row.model,
            f"{row.n_stages} x {row.tensor}",
            f"{row.layers[0]} to {row.layers[1]}",
            f"{row.slots:,}",
            f"{row.planned_arguments / 1e9:.3f} / {row.compiled_arguments / 1e9:.3f}",
            f"{row.planned_temporaries / 1e6:,.1f} / {row.compiled_temporaries / 1e6:,.1f}",
            f"{row.planned / 1e9:.3f} / {row.compiled / 1e9:.3f}",
            f"{row.off:+.2%}",
            f"{row.seconds:.0f}",
        )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; status 1 if a plan is off by more than WITHIN."""
    parser = argparse.ArgumentParser(prog="python -m bench.compiled.plan_check", description=__doc__)
    parser.add_argument("--devices", default="h200,a100-40gb")
    parser.add_argument("--models", default=",".join(PRESETS))
    parser.add_argument("--layers", type=int, help="compile at most this many layers of each stage")
    parser.add_argument("--max-batch-tokens", type=int, help="by default that of `orca plan`")
    flags = parser.parse_args(argv)
    sizes = Sizes(max_batch_tokens=flags.max_batch_tokens)
    console, rows, not_there = Console(stderr=True), list[Row](), list[dict[str, Any]]()
    for gpu in flags.devices.split(","):
        partitions = [(name, 1, 1) for name in PRESETS]
        for one in (*PARTITIONS["a100-40gb"], *PARTITIONS.get(gpu, ())):  # the paper's, and this GPU's
            if one not in partitions:
                partitions.append(one)
        for name, n_stages, tensor in partitions:
            if name not in flags.models.split(","):
                continue
            plan = make_plan(target(gpu, PRESETS[name], n_stages, tensor, sizes))
            if not plan.fits:
                problem = plan.stages[0].problem or plan.stages[-1].problem
                console.out(f"{gpu}, {name}, {n_stages} x {tensor}: {problem}; {plan.hint}")
                not_there.append({"gpu": gpu, "model": name, "n_stages": n_stages, "tensor": tensor})
                continue
            if flags.layers is not None:
                fewer = replace(PRESETS[name], layers=PRESETS[name].layers[: flags.layers * n_stages])
                same_slots = replace(sizes, n_slots=plan.serving.n_slots)
                plan = make_plan(target(gpu, fewer, n_stages, tensor, same_slots))
            for row in compare(gpu, name, plan):
                rows.append(row)
                console.out(json.dumps(vars(row)))
    Console(width=190).print(table(rows))
    worst = max((abs(row.off) for row in rows), default=0.0)
    result = {"benchmark": "plan_check", "jax": jax.__version__, "layers": flags.layers, "worst": worst}
    print(json.dumps(result | {"does_not_fit": not_there, "stages": [vars(row) for row in rows]}))
    return 0 if worst <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
