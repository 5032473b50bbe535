"""Compares the simulation with the real engine: calibrated on iterations, tested on whole runs.

    python -m bench.predict [--preset gpt2] [--max-bs 16] [--rates 1,2,3] [--requests 60]
    python -m bench.predict --trace FILE ... [--shrink 16] [--speed 0.5] [--requests 180]

The real engine (random weights, compiled ahead) plays requests at several rates, U(8, 128) tokens in and U(1,
32) out, Poisson arrivals. At each rate it plays three traces: one to be predicted, and before and after it
two with other seeds for the calibration, which uses only their iterations, each with its bucket, the keys in
its context and its seconds. Four coefficients are fitted to all the calibration's iterations by least squares
(bench/simulate/measured_cost.py). The simulation then plays the traces to be predicted: the same scheduler,
sizes, buckets and arrivals on a simulated engine of that cost. Throughput and median normalized latency are
compared; the target is 15 %. Without --rates: 0.3, 0.6 and 0.9 of the requests per second that the engine
finishes when all arrive at once.

With --trace the requests are a file's (docs/load.md), for each file in three parts: the first and the last
third are for the calibration, and the middle one is predicted. The targets are 5 % for throughput, 10 % for
the median and 20 % for the 99th percentile of the normalized latency.
"""

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.paper.play import NotPlayed, traced_request
from bench.paper.serving_curve import Served, served
from bench.paper.serving_load import play_on
from bench.paper.serving_records import ServingRecords
from bench.paper.shared_engine import SharedEngine, add_engine_flags, compiling
from bench.simulate.measured_cost import Measured, MeasuredCost, error_of, fit, measured
from orca_jax.config import ServingConfig
from orca_jax.errors import ConfigError
from orca_jax.families.model_config import ModelConfig
from orca_jax.simulation.simulation import Simulation
from server.errors import TraceError
from server.load.trace import Trace, mean_rate, scaled, uniform_trace
from server.load.workload import Load, Requests

AIM = 0.15
TRACE_AIMS = (0.05, 0.10, 0.20)  # throughput, median, 99th percentile
LOADS = (0.3, 0.6, 0.9)
N_INPUT, N_OUTPUT = (8, 128), (1, 32)
BEFORE, PREDICTED, AFTER = 1, 2, 3  # added to the seed of the flags


@dataclass(frozen=True, slots=True)
class Compared:
    """A rate, or a file's trace: the real engine's figures, and the predicted ones."""

    name: str
    rate: float
    real: Served
    predicted: Served

    @property
    def errors(self) -> tuple[float, float, float]:
        """The errors of throughput, median and p99 of normalized latency: predicted over real, minus 1."""
        return (
            self.predicted.req_s / self.real.req_s - 1,
            self.predicted.normalized_median / self.real.normalized_median - 1,
            self.predicted.normalized_p99 / self.real.normalized_p99 - 1,
        )

    def within(self, aims: Sequence[float]) -> bool:
        """Whether the first errors are within these bounds."""
        return all(abs(error) <= aim for error, aim in zip(self.errors, aims, strict=False))


def predict(trace: Trace, cost: MeasuredCost, serving: ServingConfig) -> Served:
    """The figures of `trace` on a simulated one-stage engine."""
    simulation = Simulation(serving, places=cost, token=None, bucket_sizes=cost.bucket_sizes)
    for i, traced in enumerate(trace):
        simulation.add_at(traced.arrival, traced_request(i, traced))
    timeline = simulation.run()
    return served(ServingRecords(list(timeline.requests), list(timeline.iterations)))


def table(compared: Sequence[Compared]) -> Table:
    """A row per rate."""
    made = Table(title="real and predicted")
    columns = (
        "load",
        "req/s",
        "predicted",
        "error",
        "median normalized, ms",
        "predicted",
        "error",
        "p99",
        "predicted",
        "error",
    )
    for name in columns:
        made.add_column(name, justify="right")
    for rate_row in compared:
        throughput, latency, tail = rate_row.errors
        made.add_row(
            rate_row.name,
            f"{rate_row.real.req_s:.3f}",
            f"{rate_row.predicted.req_s:.3f}",
            f"{throughput:+.1%}",
            f"{rate_row.real.normalized_median * 1e3:.1f}",
            f"{rate_row.predicted.normalized_median * 1e3:.1f}",
            f"{latency:+.1%}",
            f"{rate_row.real.normalized_p99 * 1e3:.1f}",
            f"{rate_row.predicted.normalized_p99 * 1e3:.1f}",
            f"{tail:+.1%}",
        )
    return made


def record(one: Compared) -> dict[str, float | str]:
    """The fields for the last line."""
    throughput, latency, tail = one.errors
    return {
        "load": one.name,
        "rate": round(one.rate, 4),
        "req_s": round(one.real.req_s, 4),
        "predicted_req_s": round(one.predicted.req_s, 4),
        "req_s_error": round(throughput, 4),
        "normalized_latency_ms": round(one.real.normalized_median * 1e3, 3),
        "predicted_normalized_latency_ms": round(one.predicted.normalized_median * 1e3, 3),
        "normalized_latency_error": round(latency, 4),
        "normalized_p99_ms": round(one.real.normalized_p99 * 1e3, 3),
        "predicted_normalized_p99_ms": round(one.predicted.normalized_p99 * 1e3, 3),
        "normalized_p99_error": round(tail, 4),
    }


def parsed() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.predict", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_engine_flags(parser, preset="gpt2")
    parser.add_argument("--max-bs", type=int, default=16, help="default: 16")
    parser.add_argument("--rates", help="requests per second, comma-separated (default: from its capacity)")
    parser.add_argument(
        "--requests",
        type=int,
        help="requests of each trace (default: 60); with --trace of all three parts of a file (default: 180)",
    )
    parser.add_argument("--trace", type=Path, action="append", metavar="FILE", help="may be repeated")
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster --trace's requests arrive")
    parser.add_argument("--shrink", type=int, default=1, help="keep one in N tokens of --trace's requests")
    parser.add_argument(
        "--load", type=float, help="let --trace's arrive at this share of the capacity instead"
    )
    parser.add_argument("--no-overlap", action="store_true", help="Algorithm 1 exactly")
    flags = parser.parse_args()
    if flags.trace and flags.rates:
        parser.error("--trace has its own arrivals; leave --rates out")
    return parser, flags


def file_trace(path: Path, flags: argparse.Namespace, model: ModelConfig) -> Trace:
    """A file's requests, as `orca bench --trace` sends them. Raises TraceError, OSError."""
    requests = Requests(
        number=flags.requests or 180,
        n_input=N_INPUT,
        n_output=N_OUTPUT,
        vocab_size=model.vocab_size,
        seed=flags.seed,
        file=path,
        speed=flags.speed,
        shrink=flags.shrink,
    )
    trace = requests.trace(Load(), 0)
    longest = max(len(one.prompt_ids) + one.n_output for one in trace)
    if longest > model.n_positions or any(one.after is not None for one in trace):
        raise TraceError(
            f"{path} has requests of up to {longest} tokens or turns of conversations; the model takes "
            f"{model.n_positions} tokens, and each request must be one turn: give a larger --shrink"
        )
    return trace


def thirds(trace: Trace) -> list[Trace]:
    """Three parts in order of time, each beginning at 0."""
    n = len(trace) // 3
    parts = (trace[:n], trace[n : 2 * n], trace[2 * n :])
    return [tuple(replace(one, arrival=one.arrival - part[0].arrival) for one in part) for part in parts]


def main() -> None:
    """Measure, predict, print a table and, as the last line, JSON."""
    parser, flags = parsed()
    if flags.pipeline_parallel != 1:
        parser.error("the calibration is for one stage: use --pipeline-parallel 1")
    with Progress(console=Console(stderr=True)) as progress:
        try:
            rates = [float(one) for one in flags.rates.split(",")] if flags.rates else []
            shared = SharedEngine(
                flags.preset or "gpt2",
                dtype=flags.dtype,
                most_bs=flags.max_bs,
                n_slots=flags.n_slots,
                seed=flags.seed,
                on_program=compiling(progress),
            )
        except (ConfigError, ValueError) as error:
            parser.error(str(error))
        task = progress.add_task("", total=None)

        def show_progress(name: str, done: int, of: int) -> None:
            progress.update(task, description=name, completed=done, total=of)

        make_trace = partial(
            uniform_trace,
            flags.requests or 60,
            n_input=N_INPUT,
            n_output=N_OUTPUT,
            vocab_size=shared.model.vocab_size,
        )
        make = shared.orca(flags.max_bs, overlap=not flags.no_overlap)
        serving = replace(shared.serving, max_batch_size=flags.max_bs, overlap=not flags.no_overlap)

        def play(trace: Trace, name: str) -> ServingRecords:
            return play_on(shared, make, trace, name, show_progress)

        loads: list[tuple[str, Sequence[Trace]]] = []  # each with the trace to predict in the middle
        played: list[tuple[str, Trace, Served]] = []
        iterations: list[Measured] = []
        try:
            if flags.trace:
                for path in flags.trace:
                    parts = thirds(file_trace(path, flags, shared.model))
                    if flags.load:
                        capacity = served(play(scaled(parts[0], 0), f"{path.name}, all at once")).req_s
                        parts = [scaled(part, mean_rate(part) / (flags.load * capacity)) for part in parts]
                    loads.append((path.name, parts))
            else:
                first = play(make_trace(seed=flags.seed), "all at once")
                for rate in rates or [load * served(first).req_s for load in LOADS]:
                    seeds = [flags.seed + seed for seed in (BEFORE, PREDICTED, AFTER)]
                    loads.append((f"{rate:.2f}/s", [make_trace(seed=seed, rate=rate) for seed in seeds]))
            for name, (before, predicted, after) in loads:
                iterations += measured(play(before, f"calibration, {name}"))
                played.append((name, predicted, served(play(predicted, f"to be predicted, {name}"))))
                iterations += measured(play(after, f"calibration, {name}"))
        except (NotPlayed, TraceError, OSError) as error:
            raise SystemExit(str(error)) from error
    cost = fit(iterations, shared.buckets)
    compared = [
        Compared(name, mean_rate(trace), real, predict(trace, cost, serving)) for name, trace, real in played
    ]
    Console(width=140).print(table(compared))
    coefficients = {
        "constant_ms": cost.constant * 1e3,
        "token_us": cost.per_token * 1e6,
        "key_us": cost.per_key * 1e6,
        "pair_us": cost.per_pair * 1e6,
    }
    terms = ", ".join(f"{name} {value:.4g}" for name, value in coefficients.items())
    print(f"{len(iterations)} iterations: {terms}; median error of one {error_of(cost, iterations):.1%}")
    aims = TRACE_AIMS if flags.trace else (AIM, AIM)
    worst = max(abs(error) for one in compared for error in one.errors[: len(aims)])
    print(
        json.dumps(
            {
                "bench": "predict",
                "preset": flags.preset or "gpt2",
                "max_bs": flags.max_bs,
                "overlap": not flags.no_overlap,
                "requests": [len(trace) for _, trace, _ in played],
                **shared.facts(),
                "python": platform.python_version(),
                "cores": len(os.sched_getaffinity(0)),
                "iterations": len(iterations),
                **{name: round(value, 6) for name, value in coefficients.items()},
                "rates": [record(one) for one in compared],
                "worst_error": round(worst, 4),
                "within_aim": all(one.within(aims) for one in compared),
            }
        )
    )


if __name__ == "__main__":
    main()
