"""Prefill and decode together, in chunks or apart, simulated: goodput under limits of latency.

    python -m bench.pools [--trace FILE ...] [--requests 300] [--first 2.0] [--between 0.05]
        [--model llama-3.1-70b] [--device h200] [--tensor-parallel 4] [--bandwidth 50]

Nothing here is measured. The scheduler is the real one; iterations take the cost model's floors on described
GPUs, with the sizes of `orca plan`. Goodput is the highest rate for each engine, of --tensor-parallel GPUs,
at which nine in ten requests have their first token within --first seconds and 99 of 100 gaps between tokens
are within --between. Requests keep their lengths and the pattern of their arrivals, which only the rate
scales. A goodput near (--requests / 5 / --first) over the arrangement's engines is a lower bound: there are
too few requests to try more.

Together: an engine computes whole prompts before decodes, or chunks beside decodes (the default). Apart: the
engines of one pool compute prompts, in turn, without decodes beside them; keys and values go to the other
pool, one prompt at a time for each engine, over the links of its GPUs, of --bandwidth GB/s each. Neither a
prefix cache nor tiers are simulated.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.policies.search import highest
from bench.reproduced.played import Cost, Job, floors, play
from bench.simulate.cluster import Cluster
from bench.simulate.places import Partition
from orca_jax.config import ParallelConfig, SchedulingConfig, ServingConfig, Sizes
from orca_jax.errors import ConfigError
from orca_jax.families.presets import PRESETS
from orca_jax.planning.cost_model import IterationShape
from orca_jax.planning.known_devices import GPUS
from orca_jax.planning.plan import PlanTarget, make_plan
from orca_jax.scheduling.timeline import RequestRecord
from server.load.trace import input_lengths
from server.load.workload import Load, Requests

TRACES = Path(__file__).parent / "traces"
DEFAULTS = ("azure_2023_code.csv.gz", "azure_2023_conv.csv.gz", "mooncake_conversation.jsonl.gz")
POOLS = ((1, 2), (1, 1), (2, 1), (5, 1))  # engines for prompts and for decodes
FIRST_SHARE, BETWEEN_SHARE = 0.9, 0.99
SPAN = 5.0  # times the limit on the first token: shorter arrivals are a burst, which tells nothing of a rate
PREFILL_FIRST = SchedulingConfig(
    policy="examples.policies.prefill_first:PrefillFirst", chunked_prefill=False, prefix_caching=False
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds to the first token, and between two tokens."""

    first: float
    between: float


@dataclass(frozen=True, slots=True)
class Seen:
    """The times of requests' first tokens after their arrival, and all gaps between tokens, in seconds."""

    first: Sequence[float]
    gaps: Sequence[float]

    def within(self, limits: Limits) -> bool:
        """Whether enough of them are within the limits."""
        if float(np.quantile(self.first, FIRST_SHARE)) > limits.first:
            return False
        return not self.gaps or float(np.quantile(self.gaps, BETWEEN_SHARE)) <= limits.between


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """Engines with a `cost` of iterations and `serving` sizes; keys and values of `kv_bytes` a token."""

    cost: Cost
    serving: ServingConfig
    kv_bytes: float
    bandwidth: float
    longest: int

    def together(self, jobs: Sequence[Job], *, chunked: bool) -> Seen:
        """One engine for both phases."""
        scheduling = replace(self.serving.scheduling, prefix_caching=False)
        most = self.serving.max_batch_tokens
        if not chunked:
            scheduling, most = PREFILL_FIRST, max(most, self.longest)
        records = play(replace(self.serving, scheduling=scheduling, max_batch_tokens=most), self.cost, jobs)
        return _seen([record.token_times for record in records], [job.arrival for job in jobs])

    def apart(self, jobs: Sequence[Job], n_prefill: int, n_decode: int) -> Seen:
        """A pool of each kind."""
        chunks = replace(self.serving.scheduling, prefix_caching=False, prefill_tokens=None)
        prefill = replace(self.serving, scheduling=chunks)
        firsts = _in_turn(
            [replace(job, n_output=1, limit=1) for job in jobs],
            n_prefill,
            lambda part: play(prefill, self.cost, part),
        )
        ends = [record.token_times[0] for record in firsts]
        free, moved = [0.0] * n_prefill, list[tuple[float, int]]()
        for i in sorted(range(len(jobs)), key=lambda i: ends[i]):
            link = i % n_prefill
            free[link] = max(free[link], ends[i]) + jobs[i].n_input * self.kv_bytes / self.bandwidth
            if jobs[i].n_output > 1:
                moved.append((free[link], i))
        moved.sort()
        # A job arrives with its prompt's keys and values, so that its first iteration is a decode too.
        arrived = [Job(at, jobs[i].n_input + 1, jobs[i].n_output - 1, jobs[i].limit - 1) for at, i in moved]
        whole = SchedulingConfig(chunked_prefill=False, prefix_caching=False)
        decode = replace(self.serving, scheduling=whole, max_batch_tokens=min(1 << 20, self.serving.n_slots))
        later = _in_turn(arrived, n_decode, lambda part: play(decode, self._decodes, part))
        times = [[end] for end in ends]
        for (_, i), record in zip(moved, later, strict=True):
            times[i] += record.token_times
        return _seen(times, [job.arrival for job in jobs])

    def _decodes(self, shape: IterationShape) -> float:
        return self.cost(shape.last_tokens)


def _in_turn(
    jobs: Sequence[Job], n_engines: int, run: Callable[[Sequence[Job]], list[RequestRecord]]
) -> list[RequestRecord]:
    """The records of jobs that `n_engines` take in turn, in the jobs' order."""
    records: list[RequestRecord | None] = [None] * len(jobs)
    for engine in range(n_engines):
        records[engine::n_engines] = run(jobs[engine::n_engines])
    return [record for record in records if record is not None]


def _seen(times: Sequence[Sequence[float]], arrivals: Sequence[float]) -> Seen:
    return Seen(
        [each[0] - arrival for each, arrival in zip(times, arrivals, strict=True)],
        [after - before for each in times for before, after in pairwise(each)],
    )


def goodputs(pools: Pools, jobs: Sequence[Job], limits: Limits, start: float) -> dict[str, float]:
    """The goodput in requests a second for each engine; `jobs` arrive at one a second.

    No rate is tried at which they would arrive within SPAN times the limit on the first token.
    """

    def search(n_engines: int, run: Callable[[Sequence[Job]], Seen]) -> float:
        def meets(rate: float) -> bool:
            if len(jobs) < SPAN * limits.first * rate * n_engines:
                return False
            at = [replace(job, arrival=job.arrival / (rate * n_engines)) for job in jobs]
            return run(at).within(limits)

        return highest(meets, start, step=1.6, halvings=4)

    found = {
        "together, whole prompts": search(1, lambda at: pools.together(at, chunked=False)),
        "together, chunks": search(1, lambda at: pools.together(at, chunked=True)),
    }
    for n_prefill, n_decode in POOLS:
        found[f"apart, {n_prefill} + {n_decode}"] = search(
            n_prefill + n_decode, lambda at, a=n_prefill, b=n_decode: pools.apart(at, a, b)
        )
    return found


def jobs_of(path: Path, n_requests: int, n_positions: int) -> list[Job]:
    """A trace's first requests that the positions hold, at one a second. Raises ConfigError."""
    requests = Requests(
        number=n_requests, n_input=(1, 1), n_output=(1, 1), vocab_size=1000, seed=0, file=path
    )
    trace = requests.trace(Load(None), 0)
    assert all(request.after is None for request in trace), "a trace of single requests"
    lengths = zip(trace, input_lengths(trace), strict=True)
    kept = [(one, n) for one, n in lengths if n + one.n_output <= n_positions]
    if len(kept) < 2:
        raise ConfigError(f"{path.name} has fewer than two requests for a model of {n_positions} positions")
    first, last = kept[0][0].arrival, kept[-1][0].arrival
    scale = len(kept) / (last - first)
    return [Job((one.arrival - first) * scale, n, one.n_output, one.n_output) for one, n in kept]


def pools_of(model: str, device: str, n_devices: int, *, bandwidth: float, longest: int) -> Pools:
    """The pools of a preset on known GPUs, each with a link of `bandwidth` bytes/s. Raises ConfigError."""
    config, gpu = PRESETS[model], GPUS[device]
    target = PlanTarget(
        config=config,
        device=gpu,
        sizes=Sizes(max_batch_size=256),
        dtype="bfloat16",
        context=512,
        parallel=ParallelConfig(tensor_parallel=n_devices),
    )
    plan = make_plan(target)
    partition = Partition(model=config, n_stages=1, n_devices=n_devices, dtype="bfloat16")
    return Pools(
        cost=floors(partition, Cluster(device=gpu)),
        serving=plan.serving,
        kv_bytes=sum(stage.memory.slot for stage in plan.stages) * n_devices,
        bandwidth=bandwidth * n_devices,
        longest=longest,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Search, print a table for each trace and, as the last line, JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.pools", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trace", type=Path, action="append", metavar="FILE", help="default: bench/traces")
    parser.add_argument("--requests", type=int, default=300, help="of each trace")
    parser.add_argument("--first", type=float, default=2.0, help="seconds to the first token")
    parser.add_argument("--between", type=float, default=0.05, help="seconds between two tokens")
    parser.add_argument("--model", default="llama-3.1-70b", choices=PRESETS, metavar="PRESET")
    parser.add_argument("--device", default="h200", choices=GPUS)
    parser.add_argument("--tensor-parallel", type=int, default=4)
    parser.add_argument("--bandwidth", type=float, default=50.0, help="of a GPU's link to the others, GB/s")
    flags = parser.parse_args(argv)
    if flags.requests < 1 or min(flags.bandwidth, flags.first, flags.between) <= 0:
        parser.error("--requests, --bandwidth, --first and --between must be above 0")
    start, results = time.perf_counter(), dict[str, dict[str, float]]()
    limits = Limits(flags.first, flags.between)
    for path in flags.trace or [TRACES / name for name in DEFAULTS]:
        try:
            jobs = jobs_of(path, flags.requests, PRESETS[flags.model].n_positions)
            longest = max(job.n_input + job.n_output for job in jobs)
            pools = pools_of(
                flags.model,
                flags.device,
                flags.tensor_parallel,
                bandwidth=flags.bandwidth * 1e9,
                longest=longest,
            )
        except ConfigError as error:
            parser.error(str(error))
        found = goodputs(pools, jobs, limits, start=4.0)
        results[path.name] = found
        n_in, n_out = (
            round(float(np.mean([getattr(job, each) for job in jobs]))) for each in ("n_input", "n_output")
        )
        table = Table(title=f"simulated: {path.name}, {len(jobs)} requests of {n_in} + {n_out} tokens")
        table.add_column("")
        table.add_column("requests/s for each engine", justify="right")
        table.add_column("of chunks together", justify="right")
        for name, rate in found.items():
            of = found["together, chunks"]
            table.add_row(name, f"{rate:.2f}", f"{rate / of:.2f}" if of else "")
        Console(width=100).print(table)
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({"bench": "pools", "simulated": True, "goodput": results, "wall_seconds": seconds}))


if __name__ == "__main__":
    main()
