"""An iteration's time relative to its floor, by part, and the host's share of it.

    python -m bench.iteration [--preset gpt2] [--rows 1,8,32] [--context 300] [--prefill 512]

The floor is the sum over operations of bytes over bandwidth or operations over matrix rate, whichever is
larger, both measured in the same run. An iteration includes the whole engine: scheduler, engine master,
worker, tokens back on the host. Its time is from the end of one iteration to the end of the next, with and
without overlap. The host's part is the time that the host does not wait for the device; if both share cores,
that includes time taken by the device's threads. The gap is how long the device idled between two iterations.
The device's parts are timed one by one on the same arrays; the remainder is norms, cache writes and the gaps
between kernels.

Prints results as they are measured, a line or two for each kind of iteration, and the table last. The engine
holds weights and the keys and values of the largest batch of --rows, and the parts are timed on those:
for gpt3-13b in bfloat16 at --context 512, 25.7 GB of weights, and 14.7 GB of keys and values for 32 rows or
68.8 GB for 128.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from bench.device.iteration_parts import filled, time_parts
from bench.device.iteration_report import PARTS, Measured, table, verdict
from bench.device.small_mixture import SMALL_MIXTURE
from bench.device.watched_workers import WatchedWorkers, gaps
from orca_jax.aot.measured_device import measure_device
from orca_jax.config import ServingConfig
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.execution.attention_backend import choose_attention
from orca_jax.execution.compile_cache import keep_compiled_programs
from orca_jax.execution.matmul_backend import choose_products
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.presets import PRESETS
from orca_jax.host_memory import keep_large_buffers
from orca_jax.launch.local_engine import build_engine
from orca_jax.model.kv_cache import LayerCache
from orca_jax.planning.cost_model import Device, IterationShape, floor, operations
from orca_jax.request.request import FinishReason, Request, Row
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.blocks import round_up
from orca_jax.scheduling.engine_protocol import Engine, Iteration, Returned
from orca_jax.scheduling.request_pool import RequestPool
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline
from orca_jax.sharding.partition import split_model
from orca_jax.sharding.random_parameters import random_parameters

# Targets over the floor: by rows of a decode batch, and of a prefill. For a GPU: 85 % of its bandwidth, 75 %
# of its matrix rate.
CPU_AIMS, CPU_PREFILL_AIM = {1: 1.3, 8: 1.5, 32: 1.5}, 1.4
GPU_AIM, GPU_PREFILL_AIM = 1 / 0.85, 1 / 0.75
BLOCK_SIZE = 16
_MODELS = {**PRESETS, "small-mixture": SMALL_MIXTURE}


class TimedEngine:
    """An engine that records the seconds spent in its `wait`."""

    def __init__(self, engine: Engine) -> None:
        self.n_workers, self.keeps_tokens = engine.n_workers, engine.keeps_tokens
        self.waited = 0.0
        self._engine = engine

    def issue(self, rows: Sequence[Row]) -> Iteration:
        return self._engine.issue(rows)

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        start = time.perf_counter()
        try:
            return self._engine.wait(iteration, interrupted)
        finally:
            self.waited += time.perf_counter() - start


@dataclass(frozen=True)
class Timed:
    """A run of equal iterations: seconds from end to end, of the host's work, and of the device's gaps."""

    whole: list[float]
    host: list[float]
    gaps: list[float]


class Bench:
    """One model on one device, measured with several batches."""

    def __init__(
        self, model: ModelConfig, dtype: jnp.dtype, *, context: int, most_rows: int, longest: int
    ) -> None:
        self.model, self.dtype, self.context = model, dtype, context
        keep_compiled_programs()
        if jax.devices()[0].platform == "cpu":
            keep_large_buffers()  # as in an engine
        self.device: Device = measure_device(dtype)
        parts = split_model(model, jax.devices())
        self.parameters = random_parameters(model, 0, dtype, parts[0].placement(model))
        self.serving = ServingConfig(
            max_batch_size=most_rows,
            n_slots=max(most_rows * round_up(longest, BLOCK_SIZE), 2 * model.n_positions),
            max_batch_tokens=model.n_positions,
            block_size=BLOCK_SIZE,
            coarse_buckets=jax.devices()[0].platform != "cpu",  # as in an engine
        )
        built = build_engine(model, [self.parameters], self.serving, parts)
        self.kv = built.kv
        (self.worker,) = built.workers.workers
        self.worker._caches = [*filled(self.caches)]
        self.watched = WatchedWorkers(built.workers)
        self.engine = TimedEngine(EngineMaster(self.watched, self.kv, vocab_size=model.vocab_size))
        self.attention = choose_attention(
            jax.devices()[0], model, n_heads=model.n_heads, block_size=BLOCK_SIZE, dtype=dtype
        )
        self.products = choose_products(jax.devices()[0], dtype)
        assert self.products.describe_with(self.attention.description) == built.attention

    def scheduler(self, max_bs: int, *, overlap: bool) -> tuple[Scheduler, RequestPool]:
        """A new scheduler and pool for the one engine."""
        timeline = Timeline(time.perf_counter)
        pool = RequestPool(
            max_waiting=1 << 20, on_deliveries=lambda deliveries: None, on_arrival=timeline.arrived
        )
        serving = replace(self.serving, max_batch_size=max_bs, overlap=overlap)
        return Scheduler(pool, self.engine, self.kv, config=serving, timeline=timeline), pool

    def steps(self, scheduler: Scheduler, n: int) -> Timed:
        """Run `n` iterations of a loop in progress; each turn issues one iteration and completes another."""
        before = len(self.watched.issued) - scheduler.n_scheduled - 1  # the last iteration that returned
        host: list[float] = []
        for _ in range(n):
            waited, start = self.engine.waited, time.perf_counter()
            scheduler.step()
            host.append(time.perf_counter() - start - (self.engine.waited - waited))
        self.watched.until_done(before + n + 1)
        measured = slice(before, before + n + 1)
        done = self.watched.done[measured]
        return Timed(np.diff(done).tolist(), host, gaps(self.watched.issued[measured], done))

    @property
    def caches(self) -> list[LayerCache]:
        """The worker's caches; the benchmark's models have no recurrent layers."""
        return [cache for cache in self.worker._caches if isinstance(cache, LayerCache)]

    def memory(self) -> str:
        """Bytes of weights, keys and values, and the device's peak use if it reports that."""
        weights, caches = (
            sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
            for tree in (self.parameters, self.worker._caches)
        )
        text = f"{weights / 1e9:.1f} GB of weights, {caches / 1e9:.1f} GB of keys and values"
        stats = jax.devices()[0].memory_stats() or {}
        if "peak_bytes_in_use" in stats and "bytes_limit" in stats:
            text += f"; at most {stats['peak_bytes_in_use'] / 1e9:.1f} GB in use"
            text += f" of the {stats['bytes_limit'] / 1e9:.1f} that JAX may use"
        return text

    def request(self, name: str, n_input: int, n_output: int) -> Request:
        """A greedy request of random tokens."""
        prompt = np.random.default_rng(len(name)).integers(0, self.model.vocab_size, n_input)
        sampling = SamplingParams(max_tokens=n_output, temperature=0, ignore_eos=True)
        return Request(name, tuple(prompt.tolist()), n_input + n_output, sampling, seed=0)

    def decodes(self, n_rows: int, repeat: int, *, overlap: bool) -> Timed:
        """Iterations of `n_rows` requests whose context is on average `context` tokens."""
        scheduler, pool = self.scheduler(n_rows, overlap=overlap)
        n_input = self.context - repeat // 2
        n_output = longest_request(n_rows, self.context, repeat) - n_input
        for i in range(n_rows):
            pool.add(self.request(f"{n_rows}-{i}", n_input, n_output))
        while any(len(request.output_ids) < 2 for request in pool.in_arrival_order()):
            scheduler.step()
        times = self.steps(scheduler, repeat)
        left = list(pool.in_arrival_order())
        assert len(left) == n_rows, "a request ended before the last measured iteration"
        for request in left:
            pool.end(request, FinishReason.CANCELLED)
        while scheduler.step():
            pass
        return times

    def prefills(self, n_tokens: int, repeat: int, *, overlap: bool) -> Timed:
        """Prefills of one request's `n_tokens` input tokens, one after the other."""
        scheduler, pool = self.scheduler(1, overlap=overlap)
        for i in range(repeat + 4):
            pool.add(self.request(f"{n_tokens}-{i}", n_tokens, 1))
        for _ in range(3):  # the first may compile
            scheduler.step()
        times = self.steps(scheduler, repeat)
        while scheduler.step():
            pass
        return times

    def measure(self, name: str, n_tokens: int, n_rows: int, aim: float | None, repeat: int) -> Measured:
        """One row of the table: decodes of `n_rows` if there is one token per row, else a prefill."""
        is_decode = n_tokens == n_rows
        kv_length = self.context if is_decode else n_tokens // n_rows
        times, sequential = (
            self.decodes(n_rows, repeat, overlap=overlap)
            if is_decode
            else self.prefills(n_tokens, repeat, overlap=overlap)
            for overlap in (True, False)
        )
        print(
            f"{name}: {median(times.whole) * 1e3:.3f} ms (least {min(times.whole) * 1e3:.3f}), "
            f"{median(sequential.whole) * 1e3:.3f} without overlap, gap {median(times.gaps) * 1e3:.3f}",
            flush=True,
        )
        shape = IterationShape([n_tokens // n_rows] * n_rows, [kv_length] * n_rows)
        size = self.dtype.itemsize
        work = operations(self.model, shape, weight_bytes=size, kv_bytes=size)
        bytes_alone = replace(self.device, matrix_rate=math.inf)
        parts = time_parts(
            self.model,
            self.parameters,
            self.caches,
            self.attention.path,
            self.products.bind(None),
            n_tokens=n_tokens,
            n_rows=n_rows,
            kv_length=kv_length,
            repeat=repeat,
        )
        row = Measured(
            name=name,
            aim=aim,
            iteration=median(times.whole),
            fastest=min(times.whole),
            without_overlap=median(sequential.whole),
            gap=median(times.gaps),
            floor=floor(work, self.device),
            bound_by_bytes=floor(work, bytes_alone),
            parts={"host": median(times.host)} | parts,
            part_floors={kind: floor([op for op in work if op.kind == kind], self.device) for kind in PARTS},
        )
        print(verdict(row), flush=True)
        return row


def longest_request(n_rows: int, context: int, repeat: int) -> int:
    """The tokens of a request that runs while others are admitted and in all measured iterations."""
    return context - repeat // 2 + repeat + n_rows + 6


def main() -> None:
    """Measure, print a table and, as the last line, JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.iteration", description=__doc__)
    parser.add_argument("--preset", default="gpt2", choices=sorted(_MODELS))
    parser.add_argument("--rows", default="1,8,32", help="batch sizes for decode (default: 1,8,32)")
    parser.add_argument(
        "--context", type=int, default=300, help="average tokens of context per request (default: 300)"
    )
    parser.add_argument("--prefill", default="512", help="tokens of a prefill (default: 512)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU")
    parser.add_argument("--repeat", type=int, default=20, help="iterations of each kind (default: 20)")
    flags = parser.parse_args()
    on_cpu = jax.default_backend() == "cpu"
    dtype = jnp.dtype(flags.dtype or ("float32" if on_cpu else "bfloat16"))
    rows = [int(n) for n in flags.rows.split(",")]
    prefills = [int(n) for n in flags.prefill.split(",") if n]
    model = _MODELS[flags.preset]
    longest = longest_request(max(rows), flags.context, flags.repeat)
    if max([longest, *(n + 1 for n in prefills)]) > model.n_positions:
        parser.error(f"{flags.preset} has {model.n_positions} positions; these requests are longer")
    if flags.context <= flags.repeat // 2:
        parser.error("--context must be more than half of --repeat")
    bench = Bench(model, dtype, context=flags.context, most_rows=max(rows), longest=longest)
    kind = jax.devices()[0].device_kind
    print(
        f"{flags.preset} {dtype} on {kind}, jax {jax.__version__}: "
        f"{bench.device.bandwidth / 1e9:.1f} GB/s, {bench.device.matrix_rate / 1e9:.0f} GFLOP/s; "
        f"context {flags.context}; {bench.attention.description}"
    )
    print(bench.memory(), flush=True)
    measured: list[Measured] = []
    for n in rows:
        aim = CPU_AIMS.get(n) if on_cpu else GPU_AIM
        measured.append(bench.measure(f"decode, {n} rows", n, n, aim, flags.repeat))
    for n in prefills:
        aim = CPU_PREFILL_AIM if on_cpu else GPU_PREFILL_AIM
        measured.append(bench.measure(f"prefill, {n} tokens", n, 1, aim, max(5, flags.repeat // 4)))
    print(bench.memory())
    Console(width=170).print(table(measured))
    print(
        json.dumps(
            {
                "preset": flags.preset,
                "dtype": str(dtype),
                "device": kind,
                "xla_flags": os.environ.get("XLA_FLAGS", ""),
                "bandwidth": bench.device.bandwidth,
                "matrix_rate": bench.device.matrix_rate,
                "context": flags.context,
                "iterations": [asdict(row) | {"over_floor": row.iteration / row.floor} for row in measured],
            }
        )
    )


if __name__ == "__main__":
    main()
