"""The cost of an iteration for each split of a model into stages and parts, compared with one device.

    python -m bench.stages [--preset gpt2] [--splits 1x1,1x2,2x1,2x2,4x1] [--rows 1,8,32] [--prefill 128]
    python -m bench.stages --splits 2x1,2x1+processes               stages in separate processes
    python -m bench.stages --same-gpu [--preset gpt2]               two stages on one GPU against one stage

A split is stages x devices of each. With `+processes` each stage has its own process, as with
`--worker-processes`.

On a CPU the devices are virtual and share the cores, so this measures the cost of splitting, not its gain.
Each split runs in a separate process with that many devices. The first split is the baseline; the tokens of
all are compared with its tokens.

    alone        a decode batch of so many rows, one batch in flight: seconds from issue to tokens
    in flight    the same with as many batches in flight as stages: seconds between two returns
    prefill      prefill of one request's input tokens, alone
    issue        the host's part of an iteration: building the batch and sending it to every stage
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from orca_jax.config import ParallelConfig, ServingConfig
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.presets import PRESETS
from orca_jax.launch.local_engine import build_engine
from orca_jax.request.request import Request, Row
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.blocks import round_up
from orca_jax.scheduling.engine_protocol import Engine, Iteration, Returned
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.request_pool import RequestPool
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline
from orca_jax.sharding.partition import StagePart, split_model
from orca_jax.sharding.random_parameters import random_parameters

BLOCK_SIZE = 16
CONTEXT = 32  # input tokens of a request of the decode batches


@dataclass(frozen=True)
class Measured:
    """One split at one number of rows; medians in seconds, and the tokens of the last measured requests."""

    rows: int
    alone: float
    in_flight: float
    issue: float
    tokens: list[list[int]]


@dataclass(frozen=True)
class SplitResult:
    """All results of one split."""

    split: str
    device: str
    jax: str
    prefill: float
    decodes: list[Measured]


class TimedEngine:
    """An engine that records the seconds of each call of its `issue`."""

    def __init__(self, engine: Engine) -> None:
        self.n_workers, self.keeps_tokens = engine.n_workers, engine.keeps_tokens
        self.issues: list[float] = []
        self._engine = engine

    def issue(self, rows: Sequence[Row]) -> Iteration:
        start = time.perf_counter()
        iteration = self._engine.issue(rows)
        self.issues.append(time.perf_counter() - start)
        return iteration

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        return self._engine.wait(iteration, interrupted)


class Stages(Protocol):
    """A factory of engines for one model on one split."""

    model: ModelConfig
    n_stages: int

    def build(self, serving: ServingConfig) -> "Built":
        """Build an engine with these sizes."""
        ...


class Built(NamedTuple):
    """An engine with its K/V manager, and the device that it runs on."""

    engine: Engine
    kv: KVManager
    device: str


class StagesHere:
    """A factory of engines in this process."""

    def __init__(self, model: ModelConfig, dtype: jnp.dtype, parts: Sequence[StagePart]) -> None:
        self.model, self.parts, self.n_stages = model, parts, len(parts)
        self.parameters = [random_parameters(model, 0, dtype, part.placement(model)) for part in parts]
        self._device = parts[0].group.devices[0].device_kind

    def build(self, serving: ServingConfig) -> Built:
        """Build an engine with these sizes."""
        built = build_engine(self.model, self.parameters, serving, self.parts)
        return Built(built.engine, built.kv, self._device)


class SplitBench:
    """The measurements of one model on one split."""

    def __init__(self, stages: Stages) -> None:
        self.model, self.n_stages = stages.model, stages.n_stages
        self._stages = stages
        self.device = ""  # known once an engine is built

    def scheduler(self, rows: int, longest: int) -> tuple[Scheduler, TimedEngine, RequestPool]:
        """An engine for batches of `rows` requests, with as many batches as stages."""
        serving = ServingConfig(
            max_batch_size=rows,
            n_slots=rows * self.n_stages * round_up(longest, BLOCK_SIZE),
            max_batch_tokens=max(rows * CONTEXT, longest),
            block_size=BLOCK_SIZE,
            overlap=False,  # the paper's loop, which keeps as many batches in flight as there are stages
        )
        built = self._stages.build(serving)
        self.device = built.device
        engine, timeline = TimedEngine(built.engine), Timeline(time.perf_counter)
        pool = RequestPool(
            max_waiting=1 << 20, on_deliveries=lambda deliveries: None, on_arrival=timeline.arrived
        )
        return Scheduler(pool, engine, built.kv, config=serving, timeline=timeline), engine, pool

    def requests(self, n: int, n_input: int, n_output: int) -> list[Request]:
        """Greedy requests of random tokens, the same at every call."""
        prompts = np.random.default_rng(5).integers(0, self.model.vocab_size, (n, n_input)).tolist()
        sampling = SamplingParams(max_tokens=n_output, temperature=0, ignore_eos=True)
        return [
            Request(str(i), tuple(prompt), n_input + n_output, sampling, seed=0)
            for i, prompt in enumerate(prompts)
        ]

    def decodes(self, rows: int, repeat: int) -> Measured:
        """Decodes of `rows` requests: one batch alone, then as many as there are stages."""
        n_output = repeat + 3
        scheduler, engine, pool = self.scheduler(rows, CONTEXT + n_output)
        times: dict[int, list[float]] = {}
        issues: list[float] = []
        requests: list[Request] = []
        for n_batches in (1, self.n_stages):
            requests = self.requests(n_batches * rows, CONTEXT, n_output)
            for request in requests:
                pool.add(request)
            # The prefills, and the first decodes, which compile.
            while min(request.n_iterations for request in requests) < 3:
                scheduler.step()
            engine.issues.clear()
            returned = _returns(scheduler)
            while len(pool):
                scheduler.step()
            issues = engine.issues[: (repeat - 1) * n_batches]
            ends = [it.returned for it in list(scheduler.timeline.iterations)[returned:] if it.returned]
            # The last iterations have fewer other batches in flight.
            ends = ends[: len(ends) - n_batches + 1]
            times[n_batches] = np.diff(ends).tolist()
        n_all = self.n_stages
        return Measured(
            rows=rows,
            alone=median(times[1]),
            # Stages may return in bursts: take the mean of whole rounds, not the median of gaps.
            in_flight=sum(times[n_all]) / len(times[n_all]),
            issue=median(issues),
            tokens=[request.output_ids for request in requests[:rows]],
        )

    def prefill(self, n_tokens: int, repeat: int) -> float:
        """Seconds from issue to the first token of one request of `n_tokens`."""
        scheduler, _, pool = self.scheduler(1, n_tokens + 1)
        times: list[float] = []
        for _ in range(repeat + 1):
            pool.add(self.requests(1, n_tokens, 1)[0])
            start = time.perf_counter()
            while len(pool):
                scheduler.step()
            times.append(time.perf_counter() - start)
        return median(times[1:])  # the first compiled


def _returns(scheduler: Scheduler) -> int:
    """The number of iterations that have returned."""
    return sum(it.returned is not None for it in scheduler.timeline.iterations)


def run_split(flags: argparse.Namespace) -> SplitResult:
    """Measure one split, in the process that has its devices."""
    n_stages, tensor = sizes_of(flags.one)
    devices = jax.devices()
    # Pad for the widest split, so that all splits draw the same weights.
    multiple = math.lcm(*(sizes_of(split)[1] for split in _splits(flags)))
    model = replace(PRESETS[flags.preset], vocab_multiple=multiple)
    if flags.same_gpu:
        devices = devices[:1] * n_stages
    parts = split_model(model, devices, ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor))
    dtype = jnp.dtype("float32" if devices[0].platform == "cpu" else "bfloat16")
    return measure_split(flags, SplitBench(StagesHere(model, dtype, parts)))


def measure_split(flags: argparse.Namespace, bench: SplitBench) -> SplitResult:
    """Measure everything for one split."""
    prefill = bench.prefill(flags.prefill, max(3, flags.repeat // 4))
    decodes = [bench.decodes(rows, flags.repeat) for rows in numbers(flags.rows)]
    return SplitResult(flags.one, bench.device, jax.__version__, prefill, decodes)


def in_a_process(split: str, flags: argparse.Namespace) -> SplitResult:
    """Measure one split in a separate process. Raises RuntimeError with its output if it fails."""
    n_stages, tensor = sizes_of(split)
    environment = dict(os.environ)
    if not flags.same_gpu and "+" not in split:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={n_stages * tensor}"
    # The libraries of control lines, which only worker processes need, are imported only there.
    module = "bench.device.stages_in_processes" if "+" in split else "bench.stages"
    command = [sys.executable, "-m", module, *sys.argv[1:], "--one", split]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=flags.timeout, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{split} failed: {done.stderr[-2000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    return SplitResult(**result | {"decodes": [Measured(**one) for one in result["decodes"]]})


def table(results: list[SplitResult]) -> Table:
    """Milliseconds of each split, with the ratio to the first in parentheses."""
    first = results[0]
    made = Table(title="milliseconds (over the first split's)")
    for column in ("split", "rows", "alone", "in flight", "tokens/s", "issue", "prefill", "same tokens"):
        made.add_column(column, justify="right")

    def ratio(value: float, against: float) -> str:
        return f"{value * 1e3:.2f} ({value / against:.2f})"

    for result in results:
        for one, base in zip(result.decodes, first.decodes, strict=True):
            made.add_row(
                result.split,
                str(one.rows),
                ratio(one.alone, base.alone),
                ratio(one.in_flight, base.in_flight),
                f"{one.rows / one.in_flight:.0f}",
                ratio(one.issue, base.issue),
                ratio(result.prefill, first.prefill),
                f"{same_tokens(one, base)} of {one.rows}",
            )
    return made


def same_tokens(one: Measured, base: Measured) -> int:
    """The number of requests whose tokens are the same on both splits."""
    return sum(a == b for a, b in zip(one.tokens, base.tokens, strict=True))


def _splits(flags: argparse.Namespace) -> list[str]:
    default = "1x1,2x1" if flags.same_gpu else "1x1,1x2,2x1,2x2,4x1"
    return str(flags.splits or default).split(",")


def sizes_of(split: str) -> tuple[int, int]:
    """The number of stages, and of devices of each."""
    n_stages, tensor = split.partition("+")[0].split("x")
    return int(n_stages), int(tensor)


def numbers(text: str) -> list[int]:
    """Parse comma-separated integers."""
    return [int(n) for n in text.split(",")]


def parse() -> argparse.Namespace:
    """Parse the flags; a split's process takes the same ones."""
    parser = argparse.ArgumentParser(prog="python -m bench.stages", description=__doc__)
    parser.add_argument("--preset", default="gpt2", choices=sorted(PRESETS))
    parser.add_argument("--splits", help="default: 1x1,1x2,2x1,2x2,4x1; with --same-gpu 1x1,2x1")
    parser.add_argument("--rows", default="1,8,32", help="requests of a batch (default: 1,8,32)")
    parser.add_argument("--prefill", type=int, default=128, help="input tokens (default: 128)")
    parser.add_argument("--repeat", type=int, default=20, help="iterations of each kind (default: 20)")
    parser.add_argument("--same-gpu", action="store_true", help="every stage on the first device")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds per split (default: 900)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.same_gpu and any(sizes_of(split)[1] > 1 for split in _splits(flags)):
        parser.error("one GPU cannot serve several devices of a stage: with --same-gpu a split must be Nx1")
    return flags


def progress_line(result: SplitResult) -> str:
    """A line for a split that has just been measured, in milliseconds."""
    rows = (
        f"{one.rows} rows {one.alone * 1e3:.2f} alone, {one.in_flight * 1e3:.2f} in flight"
        for one in result.decodes
    )
    return f"{result.split}: {'; '.join(rows)}; prefill {result.prefill * 1e3:.2f} ms"


def main() -> None:
    """Measure, print a table and, as the last line, JSON."""
    flags = parse()
    if flags.one:
        print(json.dumps(asdict(run_split(flags))))
        return
    results: list[SplitResult] = []
    for split in _splits(flags):
        results.append(in_a_process(split, flags))
        print(progress_line(results[-1]), flush=True)
    on = results[0].device
    print(f"{flags.preset} on {on}{', every stage on one' * flags.same_gpu}, jax {results[0].jax}")
    Console(width=150).print(table(results))
    report = [
        asdict(result)
        | {
            "decodes": [
                asdict(one) | {"tokens": None, "same_tokens": same_tokens(one, base)}
                for one, base in zip(result.decodes, results[0].decodes, strict=True)
            ]
        }
        for result in results
    ]
    print(
        json.dumps(
            {"benchmark": "stages", "preset": flags.preset, "prefill": flags.prefill, "splits": report}
        )
    )


if __name__ == "__main__":
    main()
