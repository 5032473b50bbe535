"""Simulates the paper's Figure 10 on its A100 machines, and answers questions beyond it.

    python -m bench.simulate --figure 10b [--unfitted] [--overlap] [--picture FILE] [--json FILE]
    python -m bench.simulate --requests 1000000 --rate 1000 --replicas 150 [--dispatch in-turn]
    python -m bench.simulate --sweep max-bs|stages|tails [--figure 10b]

The real scheduler (Algorithm 1 exactly, unless --overlap) and the baseline serve the paper's trace on an
engine whose times come from the cost model and from figures for the paper's machines, each with its source in
bench/simulate/cluster.py: 101B on 1x8, 175B on 2x8 and 341B on 4x8 A100 of 40 GB, in float16. Results are
shown with nothing fitted, and with one factor on all device times, set by the paper's 95 ms per token
(bench/simulate/figure_10.py explains how). Compared are requests per second at twice the engine's own
normalized execution time. --requests serves that many requests on independent replicas; --sweep compares
cases.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench.paper.pyplot import matplotlib_here
from bench.simulate.cluster import Cluster
from bench.simulate.figure_10 import (
    FIGURES,
    FIT_BATCH,
    TIMES_OWN,
    curves,
    fitted_slowness,
    own_seconds,
    result,
    slower,
)
from bench.simulate.picture import draw
from bench.simulate.questions import CASES, answers
from bench.simulate.replicas import Dispatch, serve_replicas
from bench.simulate.serving import DoesNotFit, System
from bench.simulate.tables import answers_table, served_table, variant_table
from bench.simulate.workload import Tails
from orca_jax.errors import install_line


def figure(flags: argparse.Namespace, console: Console) -> dict[str, Any]:
    """--figure: all curves of one of the paper's figures."""
    name, chosen = flags.figure, FIGURES[flags.figure]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(f"Figure {name}, {chosen.preset}", total=None)
        unfitted = curves(
            chosen,
            fit_batch=flags.fit_batch,
            overlap=flags.overlap,
            n_processes=flags.processes,
            on_curve=lambda done, of: progress.update(task, completed=done, total=of),
        )
    fitted = None if flags.unfitted else slower(unfitted, fitted_slowness(flags.fit_batch))
    variants = [unfitted] if fitted is None else [unfitted, fitted]
    titles = ["nothing fitted", "one factor fitted"]
    for title, variant in zip(titles, variants, strict=False):
        console.print(variant_table(f"Figure {name}, {chosen.preset}, {title}", variant))
    for problem in unfitted.missing:
        console.print(f"left out: {problem}", highlight=False, soft_wrap=True)
    if flags.json is not None:
        records = [
            {
                "title": title,
                **variant.record(),
                "curves": {
                    label: [point.record() for point in points] for label, points in variant.curves.items()
                },
            }
            for title, variant in zip(titles, variants, strict=False)
        ]
        flags.json.write_text(json.dumps({"figure": name, "variants": records}, indent=1), encoding="utf-8")
    if flags.picture is not None:
        draw(name, list(zip(titles, variants, strict=False)), flags.picture)
    return result(name, fitted, unfitted)


def replicas(flags: argparse.Namespace, console: Console) -> dict[str, Any]:
    """--requests: many requests on many replicas."""
    chosen = FIGURES[flags.figure or "10b"]
    slowness = 1.0 if flags.unfitted else fitted_slowness(flags.fit_batch)
    system = System(
        partition=chosen.partition,
        cluster=Cluster(slowness=slowness),
        max_bs=flags.max_bs,
        overlap=flags.overlap,
    )
    dispatch: Dispatch = "in turn" if flags.dispatch == "in-turn" else "random"
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(f"{flags.requests:,} requests", total=None)
        served = serve_replicas(
            system,
            Tails(flags.sigma),
            flags.requests,
            rate=flags.rate,
            n_replicas=flags.replicas,
            simulated=flags.simulated,
            dispatch=dispatch,
            n_processes=flags.processes,
            on_replica=lambda done, of: progress.update(task, completed=done, total=of),
        )
    n_simulated = min(flags.replicas, flags.simulated or flags.replicas)
    title = (
        f"{flags.rate:g} requests a second over {flags.replicas} replicas of {chosen.preset} on "
        f"{chosen.n_stages} x {chosen.n_devices}, {system.label}, dispatched {dispatch}; "
        f"{n_simulated} simulated"
    )
    console.print(served_table(title, served))
    return {
        "bench": "simulate",
        "replicas": flags.replicas,
        "simulated_replicas": n_simulated,
        "dispatch": dispatch,
        "preset": chosen.preset,
        "system": system.label,
        "slowness": round(slowness, 4),
        **served.record(),
    }


def sweep(flags: argparse.Namespace, console: Console) -> dict[str, Any]:
    """--sweep: several cases side by side."""
    chosen = FIGURES[flags.figure or "10b"]
    slowness = 1.0 if flags.unfitted else fitted_slowness(flags.fit_batch)
    cluster = Cluster(slowness=slowness)
    latency = TIMES_OWN * own_seconds(chosen.partition, cluster, flags.fit_batch)
    cases = CASES[flags.sweep](chosen, cluster, overlap=flags.overlap)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(flags.sweep, total=len(cases))
        results = answers(
            cases,
            latency,
            n_processes=flags.processes,
            on_case=lambda done, _: progress.update(task, completed=done),
        )
    console.print(answers_table(f"{chosen.preset}: {flags.sweep}", latency, results))
    return {
        "bench": "simulate",
        "sweep": flags.sweep,
        "preset": chosen.preset,
        "slowness": round(slowness, 4),
        "normalized_latency_ms": round(latency * 1e3, 2),
        "cases": [one.record() for one in results],
    }


def parsed() -> argparse.Namespace:
    """The parsed and checked command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--figure", choices=sorted(FIGURES), help="the figure; with --requests, --sweep: its model (10b)"
    )
    parser.add_argument("--requests", type=int, metavar="N", help="serve N requests on replicas")
    parser.add_argument("--sweep", choices=sorted(CASES), help="compare cases")
    parser.add_argument("--unfitted", action="store_true", help="no factor fitted")
    parser.add_argument(
        "--fit-batch",
        type=int,
        default=FIT_BATCH,
        help=f"requests of the batch whose time is the paper's 95 ms per token (default: {FIT_BATCH})",
    )
    parser.add_argument(
        "--overlap", action="store_true", help="one iteration more in flight (default: as in the paper)"
    )
    parser.add_argument(
        "--rate", type=float, default=1000.0, help="with --requests: requests per second (default: 1000)"
    )
    parser.add_argument("--replicas", type=int, default=150, help="with --requests: engines (default: 150)")
    parser.add_argument(
        "--simulated", type=int, metavar="N", help="with --requests: simulate N replicas to represent all"
    )
    parser.add_argument(
        "--dispatch",
        choices=("random", "in-turn"),
        default="random",
        help="with --requests: how they are distributed (default: random)",
    )
    parser.add_argument(
        "--max-bs", type=int, default=128, help="with --requests: the batch size (default: 128)"
    )
    parser.add_argument(
        "--sigma", type=float, default=0.0, help="with --requests: sigma of log-normal lengths"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="parallel simulations (default: the number of cores)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --figure: every point of every curve")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="with --figure: a plot (matplotlib)")
    flags = parser.parse_args()
    if flags.sweep is None and flags.requests is None and flags.figure is None:
        parser.error("give --figure, --requests or --sweep")
    if flags.sweep is not None and flags.requests is not None:
        parser.error("--sweep and --requests are separate commands")
    if flags.picture is not None and not matplotlib_here():
        parser.error(f"--picture needs matplotlib: {install_line('bench')}")
    for name in ("requests", "replicas", "simulated", "max_bs", "processes", "fit_batch", "rate"):
        value = getattr(flags, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    return flags


def main() -> None:
    """Simulate, print tables and, as the last line, JSON."""
    flags = parsed()
    console, start = Console(width=140), time.perf_counter()
    command = sweep if flags.sweep is not None else replicas if flags.requests is not None else figure
    try:
        result = command(flags, console)
    except DoesNotFit as error:
        raise SystemExit(str(error)) from error
    print(
        json.dumps(
            {**result, "overlap": flags.overlap, "wall_seconds": round(time.perf_counter() - start, 1)}
        )
    )


if __name__ == "__main__":
    main()
