"""The host's cost of intake and delivery, over a device that answers after a stated time.

    python -m bench.server.delivery [--rows 32,256] [--milliseconds 0,10] [--processes 0,2] [--client-cores 1]

The real endpoint, gateway, request pool, scheduler and K/V manager run in one process, or the endpoints in
`--processes` of their own, and the clients in another; an iteration sleeps, and its tokens are the demo
model's. **Delivery**: as many streams as rows, all begun at once. **Intake**: as many connections as rows,
each of which asks again and again for one token, as a completion of 24 token ids, a completion of a short
text, and a chat. Rates depend on how many cores clients and server share, unless `--client-cores` parts them;
the server's processor time per token or request, by thread, does so less. That of endpoint processes is their
sum.
"""

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.other_process import OtherProcess
from bench.server import costless_server
from bench.server.costless_server import HOST, Device, Hot
from bench.server.stream_load import Asked, Loaded, Repeated, Streams, client

PROMPT = [1 + (7 * j) % 2000 for j in range(24)]
TEXT = "In the beginning God created the heaven and the earth."
ONE_TOKEN = {"max_tokens": 1, "temperature": 0}
REQUESTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "completion of ids": ("/v1/completions", {"prompt": PROMPT, **ONE_TOKEN}),
    "completion of text": ("/v1/completions", {"prompt": TEXT, **ONE_TOKEN}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], **ONE_TOKEN}),
}


@dataclass(slots=True)
class Case:
    """Figures of each run: tokens or requests a second, clients' waits, the server's processor time."""

    what: str
    device: Device
    rate: list[float] = field(default_factory=list[float])
    first_ms: list[float] = field(default_factory=list[float])
    gap_ms: list[float] = field(default_factory=list[float])  # the 99th of 100
    us: list[float] = field(default_factory=list[float])  # of processor time per token or request
    by_thread: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    client_us: list[float] = field(default_factory=list[float])
    held_ms: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])


def measure(
    device: Device, n_tokens: int, n_runs: int, *, client_cores: int, profile: bool, progress: Progress
) -> tuple[list[Case], dict[str, list[Hot]]]:
    """Delivery and intake on one device."""
    cases = [Case("delivery", device), *(Case(name, device) for name in REQUESTS)]
    hottest: dict[str, list[Hot]] = {}
    name = f"{device.max_rows} rows, {1000 * device.seconds:g} ms"
    task = progress.add_task(name, total=(n_runs + 1 + profile) * len(cases))
    for_server, for_clients = _cores(client_cores)
    with (
        OtherProcess(partial(costless_server.server, device=device), cores=for_server) as server,
        OtherProcess(client, cores=for_clients) as load,
    ):
        port = server.ask("ports")[0]
        for run in range(n_runs + 1 + profile):  # the first is a rehearsal, the last profiled
            for case in cases:
                if run > n_runs:
                    server.ask("profile")
                _one_run(server, load, port, case, n_tokens, keep=0 < run <= n_runs)
                if run > n_runs:
                    hottest[case.what] = server.ask("hottest")
                progress.advance(task)
    return cases, hottest


def _cores(n_clients: int) -> tuple[Sequence[int] | None, Sequence[int] | None]:
    """The server's cores, and the clients', the last `n_clients`; None for both if they share all."""
    cores = sorted(os.sched_getaffinity(0))
    if not n_clients:
        return None, None
    if n_clients >= len(cores):
        raise SystemExit(f"--client-cores {n_clients} of {len(cores)} leaves the server none")
    return cores[:-n_clients], cores[-n_clients:]


def _one_run(
    server: OtherProcess, load: OtherProcess, port: int, case: Case, n_tokens: int, *, keep: bool
) -> None:
    n_rows = case.device.max_rows
    server.ask("holds")
    before: dict[str, float] = server.ask("threads")
    if case.what == "delivery":
        loaded: Loaded = load.ask(Streams("HTTP", HOST, port, [PROMPT] * n_rows, n_tokens))
        n, seconds, cpu = loaded.n_tokens, loaded.seconds, loaded.cpu
        first, gap = median(loaded.first), float(np.quantile(loaded.gaps, 0.99))
    else:
        path, body = REQUESTS[case.what]
        asked: Asked = load.ask(Repeated(HOST, port, path, body, n_rows, max(8, 1024 // n_rows)))
        n, seconds, cpu = len(asked.waits), asked.seconds, asked.cpu
        first, gap = median(asked.waits), float(np.quantile(asked.waits, 0.99))
    after: dict[str, float] = server.ask("threads")
    if not keep:
        return
    spent = {name: (after[name] - before.get(name, 0.0)) / n * 1e6 for name in after}
    case.rate.append(n / seconds)
    case.first_ms.append(1000 * first)
    case.gap_ms.append(1000 * gap)
    case.us.append(sum(spent.values()))
    case.by_thread.append(spent)
    case.client_us.append(cpu / n * 1e6)
    loop, gil = server.ask("holds")
    case.held_ms.append((1000 * loop, 1000 * gil))


def table(cases: list[Case]) -> Table:
    """Medians of the runs; waits are the clients', and for intake those of whole answers."""
    shown = Table(title="intake and delivery; processor time in microseconds per token or request")
    columns = (
        "rows",
        "ms",
        "processes",
        "what",
        "a second",
        "first p50 ms",
        "p99 ms",
        "server us",
        "by thread",
        "client us",
        "loop, GIL held ms",
    )
    for column in columns:
        shown.add_column(column, justify="left" if column in ("what", "by thread") else "right")
    for case in cases:
        threads = {name: median(run.get(name, 0.0) for run in case.by_thread) for name in case.by_thread[0]}
        largest = sorted(threads.items(), key=lambda item: -item[1])[:4]
        shown.add_row(
            str(case.device.max_rows),
            f"{1000 * case.device.seconds:g}",
            str(case.device.endpoint_processes),
            case.what,
            f"{median(case.rate):,.0f} ({min(case.rate):,.0f} to {max(case.rate):,.0f})",
            f"{median(case.first_ms):.0f}",
            f"{median(case.gap_ms):.0f}",
            f"{median(case.us):.0f}",
            ", ".join(f"{name} {us:.0f}" for name, us in largest if us >= 0.5),
            f"{median(case.client_us):.0f}",
            ", ".join(f"{max(held):.0f}" for held in zip(*case.held_ms, strict=True)),
        )
    return shown


def hot_table(what: str, device: Device, hottest: list[Hot]) -> Table:
    """The event loop's costliest functions; their times include the profiler's own cost."""
    shown = Table(title=f"{what}, {device.max_rows} rows: the event loop's costliest functions")
    for column in ("function", "calls", "own ms", "with callees ms"):
        shown.add_column(column, justify="left" if column == "function" else "right")
    for hot in hottest:
        shown.add_row(hot.name, f"{hot.calls:,}", f"{1000 * hot.own:.1f}", f"{1000 * hot.whole:.1f}")
    return shown


def summary(cases: list[Case]) -> dict[str, Any]:
    """The figures, for the last line."""
    return {
        "benchmark": "delivery",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "cases": [
            {
                "what": case.what,
                "rows": case.device.max_rows,
                "milliseconds": 1000 * case.device.seconds,
                "processes": case.device.endpoint_processes,
                "a_second": round(median(case.rate), 1),
                "server_us": round(median(case.us), 1),
                "client_us": round(median(case.client_us), 1),
            }
            for case in cases
        ],
    }


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure, print tables and, as the last line, JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.server.delivery", description="What intake and delivery cost"
    )
    parser.add_argument(
        "--rows", type=_numbers, default=[32, 256], help="rows of an iteration (default: 32,256)"
    )
    parser.add_argument(
        "--milliseconds", type=_numbers, default=[0, 10], help="of an iteration (default: 0,10)"
    )
    parser.add_argument(
        "--processes", type=_numbers, default=[0], help="endpoint processes (default: 0, none)"
    )
    parser.add_argument("--tokens", type=int, default=64, help="of each stream (default: 64)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each case (default: 3)")
    parser.add_argument(
        "--client-cores",
        type=int,
        default=0,
        help="bind clients to so many cores and the server to the others (default: 0, they share all)",
    )
    parser.add_argument("--profile", action="store_true", help="show the event loop's costliest functions")
    flags = parser.parse_args()
    console = Console(width=200)
    cases: list[Case] = []
    with Progress(console=Console(stderr=True)) as progress:
        for n_rows in flags.rows:
            for milliseconds in flags.milliseconds:
                for n_processes in flags.processes:
                    device = Device(milliseconds / 1000, n_rows, n_processes)
                    measured, hottest = measure(
                        device,
                        flags.tokens,
                        flags.runs,
                        client_cores=flags.client_cores,
                        profile=flags.profile,
                        progress=progress,
                    )
                    cases += measured
                    for what, hot in hottest.items():
                        console.print(hot_table(what, device, hot))
    console.print(table(cases))
    print(json.dumps(summary(cases)))


if __name__ == "__main__":
    main()
