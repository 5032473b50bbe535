"""Compares the simulation with the real engine: calibrated on iterations, tested on whole runs.

    python -m bench.predict [--preset gpt2] [--max-bs 16] [--rates 1,2,3] [--requests 60]

The real engine (random weights, compiled ahead) plays requests at several rates, U(8, 128) tokens in and U(1,
32) out, Poisson arrivals. At each rate it plays three traces: one to be predicted, and before and after it
two with other seeds for the calibration, which uses only their iterations, each with its bucket, the keys in
its context and its seconds. Four coefficients are fitted to all the calibration's iterations by least squares
(bench/simulate/measured_cost.py). The simulation then plays the traces to be predicted: the same scheduler,
sizes, buckets and arrivals on a simulated engine of that cost. Throughput and median normalized latency are
compared; the target is 15 %. Without --rates: 0.3, 0.6 and 0.9 of the requests per second that the engine
finishes when all arrive at once.
"""

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

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
from orca_jax.simulation.simulation import Simulation
from server.load.trace import Trace, uniform_trace

AIM = 0.15
LOADS = (0.3, 0.6, 0.9)
N_INPUT, N_OUTPUT = (8, 128), (1, 32)
BEFORE, PREDICTED, AFTER = 1, 2, 3  # added to the seed of the flags


@dataclass(frozen=True, slots=True)
class Compared:
    """A rate: the real engine's figures, and the predicted ones."""

    rate: float
    real: Served
    predicted: Served

    @property
    def errors(self) -> tuple[float, float]:
        """The errors of throughput and of median normalized latency: predicted over real, minus 1."""
        return (
            self.predicted.req_s / self.real.req_s - 1,
            self.predicted.normalized_median / self.real.normalized_median - 1,
        )


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
        "rate",
        "req/s",
        "predicted",
        "error",
        "median normalized, ms",
        "predicted",
        "error",
        "p90",
        "predicted",
    )
    for name in columns:
        made.add_column(name, justify="right")
    for rate_row in compared:
        throughput, latency = rate_row.errors
        made.add_row(
            f"{rate_row.rate:.2f}",
            f"{rate_row.real.req_s:.3f}",
            f"{rate_row.predicted.req_s:.3f}",
            f"{throughput:+.1%}",
            f"{rate_row.real.normalized_median * 1e3:.1f}",
            f"{rate_row.predicted.normalized_median * 1e3:.1f}",
            f"{latency:+.1%}",
            f"{rate_row.real.normalized_p90 * 1e3:.1f}",
            f"{rate_row.predicted.normalized_p90 * 1e3:.1f}",
        )
    return made


def record(one: Compared) -> dict[str, float]:
    """The fields for the last line."""
    throughput, latency = one.errors
    return {
        "rate": round(one.rate, 4),
        "req_s": round(one.real.req_s, 4),
        "predicted_req_s": round(one.predicted.req_s, 4),
        "req_s_error": round(throughput, 4),
        "normalized_latency_ms": round(one.real.normalized_median * 1e3, 3),
        "predicted_normalized_latency_ms": round(one.predicted.normalized_median * 1e3, 3),
        "normalized_latency_error": round(latency, 4),
    }


def parsed() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.predict", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_engine_flags(parser, preset="gpt2")
    parser.add_argument("--max-bs", type=int, default=16, help="default: 16")
    parser.add_argument("--rates", help="requests per second, comma-separated (default: from its capacity)")
    parser.add_argument("--requests", type=int, default=60, help="requests of each trace (default: 60)")
    parser.add_argument("--no-overlap", action="store_true", help="Algorithm 1 exactly")
    return parser, parser.parse_args()


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
            flags.requests,
            n_input=N_INPUT,
            n_output=N_OUTPUT,
            vocab_size=shared.model.vocab_size,
        )
        make = shared.orca(flags.max_bs, overlap=not flags.no_overlap)
        serving = replace(shared.serving, max_batch_size=flags.max_bs, overlap=not flags.no_overlap)
        played: list[tuple[float, Trace, Served]] = []
        iterations: list[Measured] = []
        try:
            first = play_on(shared, make, make_trace(seed=flags.seed), "all at once", show_progress)
            for rate in rates or [load * served(first).req_s for load in LOADS]:
                for seed in (BEFORE, PREDICTED, AFTER):
                    trace = make_trace(seed=flags.seed + seed, rate=rate)
                    what = "to be predicted" if seed == PREDICTED else "calibration"
                    records = play_on(shared, make, trace, f"{what}, {rate:.2f} req/s", show_progress)
                    if seed == PREDICTED:
                        played.append((rate, trace, served(records)))
                    else:
                        iterations += measured(records)
        except NotPlayed as error:
            raise SystemExit(str(error)) from error
    cost = fit(iterations, shared.buckets)
    compared = [Compared(rate, real, predict(trace, cost, serving)) for rate, trace, real in played]
    Console(width=140).print(table(compared))
    coefficients = {
        "constant_ms": cost.constant * 1e3,
        "token_us": cost.per_token * 1e6,
        "key_us": cost.per_key * 1e6,
        "pair_us": cost.per_pair * 1e6,
    }
    terms = ", ".join(f"{name} {value:.4g}" for name, value in coefficients.items())
    print(f"{len(iterations)} iterations: {terms}; median error of one {error_of(cost, iterations):.1%}")
    worst = max(abs(error) for one in compared for error in one.errors)
    print(
        json.dumps(
            {
                "bench": "predict",
                "preset": flags.preset or "gpt2",
                "max_bs": flags.max_bs,
                "overlap": not flags.no_overlap,
                "requests": flags.requests,
                **shared.facts(),
                "python": platform.python_version(),
                "cores": len(os.sched_getaffinity(0)),
                "iterations": len(iterations),
                **{name: round(value, 6) for name, value in coefficients.items()},
                "rates": [record(one) for one in compared],
                "worst_error": round(worst, 4),
                "within_aim": worst <= AIM,
            }
        )
    )


if __name__ == "__main__":
    main()
