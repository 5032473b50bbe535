"""Figures 10 and 11 of the paper: throughput and latency under load, ORCA and the baseline.

    python -m bench.paper.end_to_end [--preset gpt2] [--paper] [--homogeneous N_IN,N_OUT] [--picture FILE.png]

Requests with random lengths arrive as a Poisson process, at ascending rates; every system plays the same
requests on the same engine (random weights, compiled ahead). orca(max_bs) is our scheduler, ft(max_bs, mbs)
the baseline (bench/paper/request_level.py). Latency is divided by the request's generated tokens: the paper's
normalized latency. At twice the engine's own normalized execution time, that of one request of mean lengths
alone, the two are compared: the best of each over its sizes. On a CPU lengths are the paper's divided by
four; with --paper, and on a GPU, they are the paper's, and the model is gpt3-13b. With --homogeneous all
requests are equal, and latency is not divided (Figure 11).
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress

from bench.paper.perfetto import write_timeline
from bench.paper.pyplot import matplotlib_here
from bench.paper.request_level import most_tokens_at_once
from bench.paper.serving_curve import best_of
from bench.paper.serving_load import Honesty, Load, Playing, System, honesty, own_execution
from bench.paper.serving_picture import draw_curves
from bench.paper.serving_records import as_json
from bench.paper.serving_table import by_rate, figures_table, honesty_table, points, reasons_table
from bench.paper.shared_engine import SharedEngine, add_engine_flags, compiling
from orca_jax.errors import ConfigError, install_line
from orca_jax.families.presets import PRESETS
from server.errors import TraceError
from server.load.trace import (
    PAPER_INPUTS,
    PAPER_OUTPUTS,
    Trace,
    homogeneous_trace,
    mean_lengths,
    mean_rate,
    uniform_trace,
)
from server.load.trace_files import read_trace

TRACE_REQUESTS = 2048  # no rate plays more
TWICE = 2.0  # the paper compares at twice the engine's own execution time


@dataclass(frozen=True, slots=True)
class Size:
    """Defaults of the flags. `loads` are request rates, as multiples of the rate of one request alone."""

    preset: str
    n_input: tuple[int, int]
    n_output: tuple[int, int]
    max_bs: str
    baseline: str
    requests: int
    seconds: float
    loads: tuple[float, ...]


CPU = Size("gpt2", (8, 128), (1, 32), "1,8,32", "1/1,4/4,8/8", 30, 6.0, (0.4, 0.8, 1.2, 2.0, 3.0))
PAPER = Size(
    "gpt3-13b", PAPER_INPUTS, PAPER_OUTPUTS, "8,64", "1/1,8/8", 24, 6.0, (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
)


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace, Size]:
    """The parsed flags, and the defaults that apply to the chosen preset."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.paper.end_to_end",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add_engine_flags(parser, preset="gpt2, on a GPU gpt3-13b")
    parser.add_argument("--paper", action="store_true", help="the paper's lengths and gpt3-13b, as on a GPU")
    parser.add_argument("--homogeneous", metavar="N_IN,N_OUT", help="equal requests (Figure 11)")
    parser.add_argument("--trace", type=Path, metavar="FILE.jsonl", help="recorded arrivals (bench/trace.py)")
    parser.add_argument(
        "--rates", help="requests per second (default: multiples of the rate of one request alone)"
    )
    parser.add_argument(
        "--max-bs", help=f"ORCA's batch sizes (default: {CPU.max_bs}; with --paper {PAPER.max_bs})"
    )
    parser.add_argument(
        "--baseline",
        metavar="MAX_BS/MBS,...",
        help=f"the baseline's sizes (default: {CPU.baseline}; with --paper {PAPER.baseline})",
    )
    parser.add_argument(
        "--requests",
        type=int,
        help=f"requests per rate (default: {CPU.requests}; with --paper {PAPER.requests})",
    )
    parser.add_argument(
        "--seconds", type=float, help="seconds of arrivals per rate, if these are more requests (default: 6)"
    )
    parser.add_argument(
        "--until",
        type=float,
        default=16.0,
        help="do not play a system at higher rates once its median normalized latency is this many times the "
        "engine's own execution time (default: 16)",
    )
    parser.add_argument(
        "--honesty",
        type=int,
        default=3,
        metavar="ROUNDS",
        help="rounds of ORCA and the baseline where scheduling makes no difference (default: 3)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every request and iteration")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the figure")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE.json", help="write the best of both at one rate, for Perfetto"
    )
    flags = parser.parse_args()
    if flags.picture and not matplotlib_here():
        parser.error(f"--picture needs matplotlib: {install_line('bench')}")
    if flags.homogeneous and flags.trace:
        parser.error("--homogeneous and --trace both say which requests there are; give one")
    return parser, flags, PAPER if flags.paper or jax.default_backend() != "cpu" else CPU


def requests(flags: argparse.Namespace, size: Size, vocab_size: int) -> Trace:
    """The requests, arriving at one a second unless they are recorded. Raises ValueError, OSError."""
    made = {"vocab_size": vocab_size, "seed": flags.seed, "rate": 1.0}
    if flags.trace:
        return read_trace(flags.trace, vocab_size=vocab_size, seed=flags.seed)
    if flags.homogeneous:
        n_input, n_output = _numbers(flags.homogeneous, 2)
        return homogeneous_trace(TRACE_REQUESTS, n_input=n_input, n_output=n_output, **made)
    return uniform_trace(TRACE_REQUESTS, n_input=size.n_input, n_output=size.n_output, **made)


def _numbers(text: str, n: int | None = None) -> list[int]:
    results = [int(one) for one in text.split(",")]
    if min(results) < 1 or (n is not None and len(results) != n):
        raise ValueError(f"{text!r} is not {n or 'a list of'} comma-separated whole numbers from 1")
    return results


def _pairs(text: str) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for one in text.split(","):
        max_bs, mbs = _numbers(one.replace("/", ","), 2)
        if mbs > max_bs:
            raise ValueError(f"{one}: a microbatch is a part of a batch, so write MAX_BS/MBS")
        pairs.append((max_bs, mbs))
    return pairs


def compared(load: Load, systems: Sequence[System], own: float) -> dict[str, Any]:
    """Compare the best size of each system at twice the engine's normalized execution time."""
    latency = TWICE * own
    ours, theirs = (
        best_of({one.label: load.curve(one) for one in systems if one.is_orca is is_orca}, latency)
        for is_orca in (True, False)
    )
    return {
        "normalized_latency_ms": round(latency * 1e3, 3),
        "orca": ours and ours[0],
        "orca_req_s": ours and round(ours[1], 4),
        "baseline": theirs and theirs[0],
        "baseline_req_s": theirs and round(theirs[1], 4),
        "ratio": round(ours[1] / theirs[1], 3) if ours and theirs else None,
    }


def both_at_one_rate(load: Load) -> dict[str, Playing]:
    """Find a rate in the middle that both played, and the system of each with the lowest latency at it."""
    rates = [
        rate
        for rate in dict.fromkeys(one.rate for one in load.playings)
        if len({one.system.is_orca for one in load.playings if one.rate == rate}) == 2
    ]
    here = [one for one in load.playings if rates and one.rate == rates[len(rates) // 2]]
    best = [
        min(those, key=lambda one: one.figures.normalized_median)
        for those in ([one for one in here if one.system.is_orca is orca] for orca in (True, False))
        if those
    ]
    return {one.system.label: one for one in best}


def honest(results: Sequence[Honesty]) -> list[dict[str, Any]]:
    """The fields of the honesty runs for the line of JSON."""
    return [
        {
            "case": one.case,
            "orca_over_baseline": round(median(one.overlap), 4),
            "no_overlap_over_baseline": round(median(one.no_overlap), 4),
        }
        for one in results
    ]


def main() -> None:
    """Measure, print tables and last one line of JSON."""
    parser, flags, size = parse()
    preset = flags.preset or size.preset
    model = PRESETS[preset]
    try:
        trace = requests(flags, size, model.vocab_size)
        max_bs = _numbers(flags.max_bs or size.max_bs)
        pairs = _pairs(flags.baseline or size.baseline)
        rates = [float(one) for one in flags.rates.split(",")] if flags.rates else []
        if any(not 0 < rate < math.inf for rate in rates):
            raise ValueError("--rates are requests a second above 0")
        longest = max(len(one.prompt_ids) + one.n_output for one in trace)
        if longest > model.n_positions:
            raise ValueError(f"{preset} has {model.n_positions} positions; a request has {longest} tokens")
        if mean_rate(trace) == math.inf:
            raise ValueError(f"{flags.trace}: all requests arrive at once, which is no load over time")
    except (ValueError, OSError, TraceError) as error:
        parser.error(str(error))
    # The baseline's largest batch of one microbatch, for the honesty runs.
    equal_bs = max((mbs for n, mbs in pairs if mbs == n), default=1)
    most_at_once = most_tokens_at_once([len(one.prompt_ids) for one in trace], max(mbs for _, mbs in pairs))
    with Progress(console=Console(stderr=True)) as progress:
        try:
            shared = SharedEngine(
                preset,
                dtype=flags.dtype,
                most_bs=max([*max_bs, *(n for n, _ in pairs)]),
                most_tokens=max(most_at_once, equal_bs * mean_lengths(trace)[0]),
                n_slots=flags.n_slots,
                pipeline_parallel=flags.pipeline_parallel,
                seed=flags.seed,
                on_program=compiling(progress),
            )
        except ConfigError as error:
            parser.error(str(error))
        task = progress.add_task("", total=None)

        def on_progress(name: str, done: int, total: int) -> None:
            progress.update(task, description=name, completed=done, total=total)

        systems = [System(f"orca({n})", True, shared.orca(n)) for n in max_bs]
        systems += [System(f"ft({n}, {mbs})", False, shared.baseline(n, mbs)) for n, mbs in pairs]
        alone, own = own_execution(shared, systems[0].make, trace, on_progress)
        if not rates:
            rates = [mean_rate(trace)] if flags.trace else [load / alone for load in size.loads]
        load = Load(
            trace=trace,
            recorded=flags.trace is not None,
            requests=flags.requests or size.requests,
            seconds=size.seconds if flags.seconds is None else flags.seconds,
            until=flags.until * own,
            reach=TWICE * own,
        )
        load.climb(shared, systems, rates, on_progress)
        results = honesty(shared, trace, equal_bs, flags.honesty, on_progress) if flags.honesty else []
    figure = 11 if flags.homogeneous else 10
    at = compared(load, systems, own)
    lengths = flags.homogeneous or flags.trace or f"U{size.n_input} in, U{size.n_output} out"
    print(
        f"Figure {figure} with {preset}, {shared.dtype}, on {shared.device}, jax {jax.__version__}: "
        f"requests of {lengths}; one alone takes {alone:.3f} s, {own * 1e3:.1f} ms a generated token"
    )
    console = Console(width=150)
    for made in (figures_table, reasons_table, by_rate):
        console.print(made(load.playings))
    if results:
        console.print(honesty_table(results))
    print(
        f"At {at['normalized_latency_ms']:.1f} ms a token: {at['orca']} {at['orca_req_s']} req/s, "
        f"{at['baseline']} {at['baseline_req_s']} req/s, ratio {at['ratio']}"
    )
    line = {
        "bench": "end_to_end",
        "figure": figure,
        "preset": preset,
        **shared.facts(),
        "lengths": str(lengths),
        "own_ms": round(own * 1e3, 3),
        **at,
        "points": points(load.playings),
        "honesty": honest(results),
    }
    if flags.json:
        raw = [
            {"system": one.system.label, "rate": one.rate, **as_json(one.records)} for one in load.playings
        ]
        flags.json.write_text(json.dumps(line | {"playings": raw}) + "\n", encoding="utf-8")
    if flags.picture:
        curves = {one.label: load.curve(one) for one in systems}
        title = f"{preset}, {shared.dtype}, {shared.device}: requests of {lengths}"
        normalized = not flags.homogeneous
        draw_curves(
            curves, flags.picture, title, normalized=normalized, target=TWICE * own if normalized else None
        )
    if flags.timeline:
        write_timeline({label: one.records for label, one in both_at_one_rate(load).items()}, flags.timeline)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
