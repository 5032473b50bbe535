"""Measures how long the forward programs take to compile, cold, for H200s that need not be present.

    JAX_PLATFORMS=cpu python -m bench.compiled.compile_time \
        [--model gpt3-13b] [--layers 40] [--buckets 1,32,512,2048]

Needs the CUDA plugin (the extra `cuda`), no GPU. `--model 70b` is a model of 80 layers, split
over 8 GPUs of one machine. Each bucket is compiled in a separate process, so that nothing is warm. The
variable XLA_FLAGS holds further flags for XLA.

Nothing is autotuned: that needs a GPU, and takes additional time there. On a busy machine read the CPU
seconds. They include all threads, and ptxas, which runs in a new process each time.

`--layers-a-program 1` measures the alternative: separate programs for the first layers, those in the middle
and the last ones, which the host would call in turn.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass, replace

import jax
from jax import monitoring
from rich.console import Console
from rich.progress import track
from rich.table import Table

from orca_jax.aot.compiled_stage import BLOCK_SIZE, compile_stage
from orca_jax.aot.described_gpu import described_devices
from orca_jax.config import ParallelConfig
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.presets import PRESETS
from orca_jax.families.trainers.orca_json import GPTOptions
from orca_jax.sharding.partition import StagePart, split_model

# A 70B model's shape with GPT blocks: as many key/value heads as query heads, two feed-forward products.
_70B = GPTOptions(
    vocab_size=128256, n_positions=2048, hidden_size=8192, n_layers=80, n_heads=64, ffn_size=28672
).model()
MODELS: dict[str, ModelConfig] = {"gpt3-13b": PRESETS["gpt3-13b"], "70b": replace(_70B, vocab_multiple=128)}
_N_GPUS = {"gpt3-13b": 1, "70b": 8}
_PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
_FORWARD = ("_forward", "jit(_forward)")  # JAX's name for the program while tracing, and afterwards
_SECONDS = r" for jit__forward time: .*?\((\d+) us\)"
_TIMERS = {
    "hlo_passes": re.compile("RunHloPasses" + _SECONDS),
    "backend": re.compile("RunBackend" + _SECONDS),
}
_KERNEL = re.compile("PtxToCubin" + _SECONDS)
_LONGEST_SECONDS = 900


@dataclass(frozen=True, slots=True)
class Cost:
    """Wall seconds and CPU seconds."""

    wall: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.wall + other.wall, self.cpu + other.cpu)

    def __str__(self) -> str:
        return f"{self.wall:.1f} ({self.cpu:.1f})"


@dataclass(frozen=True, slots=True)
class Figures:
    """The cost of compiling one bucket's programs.

    Python traces and lowers; `compile` is XLA's part, of which `hlo_passes` and `backend` are wall seconds.
    `kernels` counts those compiled besides Mosaic's, each once however often it is called. `temporaries` and
    `program` are bytes; for several programs the maximum and the sum.
    """

    bucket: int
    trace: Cost
    lower: Cost
    compile: Cost
    hlo_passes: float
    backend: float
    kernels: int
    temporaries: int
    program: int

    @property
    def all(self) -> Cost:
        """The sum."""
        return self.trace + self.lower + self.compile


def cpu_seconds() -> float:
    """CPU seconds of this process, and of the processes that it started and waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def parts(model: ModelConfig, n_gpus: int, a_program: int) -> list[StagePart]:
    """The parts to compile: the whole model, or its beginning, middle and end of `a_program` layers each."""
    (whole,) = split_model(model, described_devices("h200", n_gpus), ParallelConfig(tensor_parallel=n_gpus))
    if not a_program:
        return [whole]
    n, k = model.n_layers, a_program
    cut = (range(k), range(k, 2 * k), range(n - k, n))
    return [replace(whole, layers=r, first=r.start == 0, last=r.stop == n) for r in cut]


def compile_here(model: ModelConfig, n_gpus: int, bucket: int, max_bs: int, a_program: int) -> Figures:
    """Compile one bucket in this process; XLA's timers go to stderr."""
    spent = dict.fromkeys(_PHASES.values(), Cost())
    last = [0.0, 0.0]  # CPU seconds at the end of the last event, and of the forward program's last

    def on_event(event: str, duration_secs: float, **attributes: str | int) -> None:
        phase, cpu = _PHASES.get(event), cpu_seconds()
        if phase is not None and attributes.get("fun_name") in _FORWARD:
            # Nested tracing and lowering belong to the phase around them; between them and XLA the program
            # that scores prompts is lowered.
            before = last[0] if phase == "compile" else last[1]
            spent[phase] += Cost(duration_secs, cpu - before)
            last[1] = cpu
        last[0] = cpu

    monitoring.register_event_duration_secs_listener(on_event)
    n_blocks = max_bs * -(-model.n_positions // BLOCK_SIZE)
    temporaries, n_bytes = 0, 0
    for part in parts(model, n_gpus, a_program):
        last[:] = [cpu_seconds()] * 2
        program = compile_stage(model, part, bucket, max_bs=max_bs, n_blocks=n_blocks).program
        memory, executable = program.memory_analysis(), program.runtime_executable()
        assert memory is not None and executable is not None
        temporaries = max(temporaries, memory.temp_size_in_bytes)
        n_bytes += len(executable.serialize())
    return Figures(
        bucket, **spent, hlo_passes=0, backend=0, kernels=0, temporaries=temporaries, program=n_bytes
    )


def figures(flags: argparse.Namespace, bucket: int) -> Figures:
    """Compile one bucket in a separate process. Raises RuntimeError if that fails."""
    command = [sys.executable, "-m", "bench.compiled.compile_time", "--one", "--model", flags.model]
    for name in ("layers", "max_batch_size", "layers_a_program"):
        command += [f"--{name.replace('_', '-')}", str(getattr(flags, name))]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "gpu_compiler=1,nvptx_compiler=1",
    }
    done = subprocess.run(
        [*command, "--buckets", str(bucket)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LONGEST_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"bucket {bucket} does not compile: {done.stderr[-2000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    result |= {phase: Cost(**result[phase]) for phase in _PHASES.values()}
    timers = {name: sum(map(int, timer.findall(done.stderr))) / 1e6 for name, timer in _TIMERS.items()}
    return Figures(**{**result, **timers, "kernels": len(_KERNEL.findall(done.stderr))})


def show(flags: argparse.Namespace, rows: list[Figures]) -> None:
    """Print a table and, as the last line, JSON."""
    of_layers = f"{flags.layers_a_program} a program" if flags.layers_a_program else "one program"
    title = (
        f"{flags.model}, {flags.layers} layers, {of_layers}, for {_N_GPUS[flags.model]} H200, jax "
        f"{jax.__version__}, {len(os.sched_getaffinity(0))} cores: seconds (CPU seconds)"
    )
    table = Table(title=title)
    columns = "bucket", "trace", "lower", "XLA", "HLO passes", "backend", "all", "kernels"
    for column in (*columns, "temporaries MB", "program MB"):
        table.add_column(column, justify="right")
    for row in rows:
        phases = map(str, (row.trace, row.lower, row.compile))
        table.add_row(
            str(row.bucket),
            *phases,
            f"{row.hlo_passes:.1f}",
            f"{row.backend:.1f}",
            str(row.all),
            str(row.kernels),
            f"{row.temporaries / 1e6:.1f}",
            f"{row.program / 1e6:.1f}",
        )
    Console(width=140).print(table)
    report = {"model": flags.model, "layers": flags.layers, "layers_a_program": flags.layers_a_program}
    programs = [asdict(row) for row in rows]
    print(json.dumps({"benchmark": "compile_time", "jax": jax.__version__, **report, "programs": programs}))


def main() -> None:
    """Compile, print a table and, as the last line, JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.compiled.compile_time", description=__doc__)
    parser.add_argument("--model", default="gpt3-13b", choices=sorted(MODELS))
    parser.add_argument("--layers", type=int, default=0, help="layers to compile (default: all)")
    parser.add_argument("--buckets", default="1,32,512,2048", help="token counts (default: 1,32,512,2048)")
    parser.add_argument("--max-batch-size", type=int, default=32)
    parser.add_argument("--layers-a-program", type=int, default=0, help="0: all in one program (default)")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    buckets = [int(n) for n in flags.buckets.split(",")]
    flags.layers = flags.layers or MODELS[flags.model].n_layers
    if flags.one:
        model = replace(MODELS[flags.model], layers=MODELS[flags.model].layers[:1] * flags.layers)
        chosen = _N_GPUS[flags.model], buckets[0], flags.max_batch_size, flags.layers_a_program
        print(json.dumps(asdict(compile_here(model, *chosen))))
        return
    show(flags, [figures(flags, b) for b in track(buckets, "compiling", console=Console(stderr=True))])


if __name__ == "__main__":
    main()
