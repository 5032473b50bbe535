"""A server under a random mixture of good and bad clients for minutes: nothing may be lost or leak.

    python -m bench.server.soak [--minutes 10] [--seed 0] [--server URL --grpc HOST:PORT]

Starts `orca serve` with the demo model and small limits, and loads it on loopback: completions, chat and
gRPC, streamed and not, disconnects, cancels, deadlines, slow readers, invalid requests, and bursts of ten
times as many requests as may run and wait. Exits with 1, naming what failed, unless at the end every accepted
request has ended for one reason, all slots are free, memory and open files are level, no task is left, and
JAX has compiled nothing since the server was ready (if it was started here).
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.server.server_process import ServerProcess, host_and_port
from bench.server.soak_clients import Clients, Wrong
from orca_jax.iteration.shape import bucket_sizes

MAX_BATCH_SIZE = 4  # few sizes, so few programs to compile first
MAX_QUEUE = 12
MOST_TOKENS = 256  # of one iteration of such clients: MAX_BATCH_SIZE short prompts
FLAGS = (
    f"--max-batch-size={MAX_BATCH_SIZE}",
    f"--max-queue={MAX_QUEUE}",
    "--max-batch-tokens=512",  # the fewest buckets that the model's positions allow
    "--n-slots=640",  # less than a full batch of long requests, so that slots run out too
    "--request-timeout=20",
    "--access-log=json",
)
BURST = 10 * (MAX_BATCH_SIZE + MAX_QUEUE)
BURST_SECONDS = 10.0  # mean time between bursts
STEADY_CLIENTS = 12
MAX_CLIENTS = 200
CLIENT_SECONDS = 60.0  # the most that a client may take
REST_SECONDS = 45.0  # the time for all requests to end
SAMPLE_SECONDS = 2.0
MAX_FAILURES = 20

# How far the last quarter's median may be above the second quarter's if nothing leaks.
RSS_GROWTH, RSS_SLACK = 1.08, 16e6  # a factor, and bytes: allocators round up
FILES_SLACK = 24  # connections: as many as there are clients at that moment

AT_REST = (
    "orca_num_requests_running",
    "orca_num_requests_waiting",
    "orca_live_streams",
    "orca_slots_reserved",
    "orca_slots_used",
    "orca_kv_cache_usage_perc",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment."""

    seconds: float
    rss: float
    files: float
    tasks: float


@dataclass(slots=True)
class Report:
    """The result of a soak: `failures` is empty if all is well, `outcomes` counts what clients saw."""

    minutes: float
    seed: int
    failures: list[str] = field(default_factory=list[str])
    outcomes: Counter[str] = field(default_factory=Counter[str])
    samples: list[Sample] = field(default_factory=list[Sample])
    n_accepted: int = 0
    ended: dict[str, int] = field(default_factory=dict[str, int])
    n_tokens: int = 0
    slowest_scrape: float = 0.0
    n_compiles: int = 0  # after ready

    def fail(self, message: str) -> None:
        """Record a failure, once; only the first ones are kept."""
        if message not in self.failures and len(self.failures) < MAX_FAILURES:
            self.failures.append(message)

    def quarter(self, number: int, of: Callable[[Sample], float]) -> float:
        """The median of one quarter of the time, 0 to 3."""
        n = len(self.samples)
        return median(of(sample) for sample in self.samples[number * n // 4 : (number + 1) * n // 4])


def soak(
    minutes: float,
    seed: int = 0,
    *,
    server: tuple[str, str | None] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run a soak. `server` is a running one's URL and gRPC address; None starts one, ended by SIGTERM."""
    report = Report(minutes, seed)
    if server is not None:
        asyncio.run(_soak(report, *server, progress))
        return report
    with ServerProcess(FLAGS, compile_ahead=True) as process:
        process.wait_until_ready()
        asyncio.run(_soak(report, process.url, process.grpc_address, progress))
        status, stderr = process.stop(), process.stderr()
        if status != 0:
            report.fail(f"after SIGTERM the server ended with {status}: {stderr[-1000:]}")
        if "Traceback" in stderr:
            start = stderr.index("Traceback")
            report.fail(f"a traceback in the server's stderr: {stderr[start : start + 2000]}")
        if report.n_compiles:
            report.fail(f"{report.n_compiles} programs were compiled after ready")
    return report


async def _soak(report: Report, url: str, grpc_address: str | None, progress: Progress | None) -> None:
    async with AsyncExitStack() as stack:
        channel = None
        if grpc_address is not None:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(grpc_address))
        clients = Clients(*host_and_port(url), channel)
        ready = await _scrape(clients)
        await _warm(clients)
        before = await _scrape(clients)
        await _load(clients, report, progress)
    clients = Clients(*host_and_port(url), None)
    after = await _rest(clients, before, report)
    _check(report, before, after)
    report.n_compiles = int(after["orca_compiles_total"] - ready["orca_compiles_total"])


# Together they need every program: prompt log-probabilities need one per size.
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"echo": True, "logprobs": 1},
    {"temperature": 1},
    {"temperature": 1, "top_p": 0.9},
    {"temperature": 1, "frequency_penalty": 1.0, "min_tokens": 1},
)


async def _warm(clients: Clients) -> None:
    """Run every program once, so that memory reaches its level."""
    for size in bucket_sizes(MOST_TOKENS):
        prompt = [1 + i % 2000 for i in range(size)]
        for sampling in SAMPLINGS:
            if size <= MAX_BATCH_SIZE or "temperature" not in sampling:  # the others' depend only on rows
                async with asyncio.timeout(CLIENT_SECONDS):
                    await clients.send({"prompt": prompt, "max_tokens": 1, **sampling})


async def _load(clients: Clients, report: Report, progress: Progress | None) -> None:
    """Run clients until the time is over, then wait until the last one is done."""
    rng = random.Random(report.seed)
    places = asyncio.Semaphore(MAX_CLIENTS)
    end = time.monotonic() + 60 * report.minutes

    async def one(rng: random.Random, *, well_behaved: bool = False) -> None:
        run = clients.choose(rng, well_behaved=well_behaved)
        name = run.__name__  # pyright: ignore[reportAttributeAccessIssue]
        try:
            async with places, asyncio.timeout(CLIENT_SECONDS):
                outcome = await run(rng)
        except TimeoutError:
            outcome = "no end"
            report.fail(f"{name}: no end within {CLIENT_SECONDS:g} seconds")
        except (Wrong, OSError, ValueError, LookupError, EOFError, grpc.aio.AioRpcError) as error:
            outcome = "wrong"
            report.fail(f"{name}: {type(error).__name__}: {error}")
        report.outcomes[f"{name}: {outcome}"] += 1

    async def steady(rng: random.Random) -> None:
        while time.monotonic() < end:
            await one(rng)
            await asyncio.sleep(rng.random() * 0.2)

    async def bursts(rng: random.Random) -> None:
        while True:
            await asyncio.sleep(min(BURST_SECONDS, 15 * report.minutes) * (0.5 + rng.random()))
            if time.monotonic() > end:
                return
            seeds = [rng.getrandbits(64) for _ in range(BURST)]
            await asyncio.gather(*(one(random.Random(seed), well_behaved=True) for seed in seeds))

    async def watch() -> None:
        start = time.monotonic()
        task = None if progress is None else progress.add_task("soak", total=60 * report.minutes)
        while (now := time.monotonic()) < end:
            figures = await _scrape(clients)
            report.slowest_scrape = max(report.slowest_scrape, time.monotonic() - now)
            report.samples.append(
                Sample(
                    now - start,
                    figures["process_resident_memory_bytes"],
                    figures["process_open_fds"],
                    figures["orca_asyncio_tasks"],
                )
            )
            if progress is not None and task is not None:
                n = sum(report.outcomes.values())
                text = f"{n:,} clients, {figures['orca_requests_total']:,.0f} requests accepted"
                progress.update(task, completed=now - start, description=text)
            await asyncio.sleep(SAMPLE_SECONDS)

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        group.create_task(bursts(random.Random(rng.getrandbits(64))))
        for _ in range(STEADY_CLIENTS):
            group.create_task(steady(random.Random(rng.getrandbits(64))))


async def _scrape(clients: Clients) -> dict[str, float]:
    """Every metric of /metrics: the sum over its labels, and the finish reasons separately."""
    async with asyncio.timeout(CLIENT_SECONDS):
        text = (await clients.get("/metrics")).decode()
    metrics: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            metrics[sample.name] += sample.value
            if sample.name == "orca_request_success_total":
                metrics[f"ended: {sample.labels['finished_reason']}"] += sample.value
            if sample.name == "orca_http_requests_total" and sample.labels["status"].startswith("5"):
                metrics[f"status {sample.labels['status']}"] += sample.value
    return dict(metrics)


async def _rest(clients: Clients, before: dict[str, float], report: Report) -> dict[str, float]:
    """The metrics once everything has ended, or after too long."""
    deadline = time.monotonic() + REST_SECONDS
    while True:
        after = await _scrape(clients)
        left = {name: after[name] for name in AT_REST if after[name] != 0}
        if after["orca_asyncio_tasks"] > before["orca_asyncio_tasks"]:
            left["orca_asyncio_tasks"] = after["orca_asyncio_tasks"]
        if not left:
            return after
        if time.monotonic() > deadline:
            report.fail(f"not at rest {REST_SECONDS:g} seconds after the last client: {left}")
            return after
        await asyncio.sleep(0.2)


def _check(report: Report, before: dict[str, float], after: dict[str, float]) -> None:
    """Check the server's own metrics at the end."""
    report.n_accepted = int(after["orca_requests_total"])
    report.n_tokens = int(after["orca_generation_tokens_total"])
    reasons = {
        name.removeprefix("ended: "): int(n) for name, n in after.items() if name.startswith("ended: ")
    }
    report.ended = reasons
    if sum(reasons.values()) != report.n_accepted:
        report.fail(f"{report.n_accepted} requests were accepted, and their ends are {reasons}")
    if reasons["error"]:
        report.fail(f"{reasons['error']} requests ended with an error of the engine")
    for name, n in after.items():
        if name.startswith("status ") and name != "status 504":
            report.fail(f"{n:.0f} HTTP requests were answered with {name}")
    if not any("queue full" in outcome for outcome in report.outcomes):
        report.fail("no burst filled the queue, so that was not tried")
    if after["process_open_fds"] > before["process_open_fds"] + 8:
        report.fail(f"files: {before['process_open_fds']:.0f} before, {after['process_open_fds']:.0f} after")
    if len(report.samples) < 8:
        report.fail(f"{len(report.samples)} samples are too few to tell whether anything grows")
        return
    rss, rss_end = (report.quarter(i, lambda sample: sample.rss) for i in (1, 3))
    if rss_end > RSS_GROWTH * rss + RSS_SLACK:
        report.fail(f"memory grew from {rss / 1e6:.0f} to {rss_end / 1e6:.0f} MB")
    files, files_end = (report.quarter(i, lambda sample: sample.files) for i in (1, 3))
    if files_end > files + FILES_SLACK:
        report.fail(f"open files grew from {files:.0f} to {files_end:.0f}")


def tables(report: Report) -> Sequence[Table]:
    """Clients by result, and the server by quarters of the time."""
    seen = Table(title=f"{sum(report.outcomes.values()):,} clients")
    seen.add_column("client")
    seen.add_column("outcome")
    seen.add_column("times", justify="right")
    for outcome, n in sorted(report.outcomes.items()):
        name, _, what = outcome.partition(": ")
        seen.add_row(name, what, f"{n:,}")
    server = Table(title="the server, medians by quarters of the time")
    for column in ("", "1st", "2nd", "3rd", "4th"):
        server.add_column(column, justify="right" if column else "left")
    if len(report.samples) >= 4:
        rows: tuple[tuple[str, Callable[[Sample], float]], ...] = (
            ("memory, MB", lambda sample: sample.rss / 1e6),
            ("open files", lambda sample: sample.files),
            ("tasks", lambda sample: sample.tasks),
        )
        for name, of in rows:
            server.add_row(name, *(f"{report.quarter(i, of):.0f}" for i in range(4)))
    return seen, server


def summary(report: Report) -> dict[str, Any]:
    """The figures, for the last line."""
    figures: dict[str, Any] = {
        "benchmark": "soak",
        "minutes": report.minutes,
        "seed": report.seed,
        "passed": not report.failures,
        "failures": report.failures,
        "clients": sum(report.outcomes.values()),
        "outcomes": dict(sorted(report.outcomes.items())),
        "accepted": report.n_accepted,
        "ended": report.ended,
        "tokens": report.n_tokens,
        "compiles_after_ready": report.n_compiles,
        "slowest_scrape_seconds": round(report.slowest_scrape, 3),
    }
    if len(report.samples) >= 4:
        figures["rss_mb"] = [round(report.quarter(i, lambda sample: sample.rss) / 1e6, 1) for i in range(4)]
        figures["open_files"] = [report.quarter(i, lambda sample: sample.files) for i in range(4)]
    return figures


def main() -> int:
    """Run the soak; print tables, failures and, as the last line, JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.server.soak", description="Many clients for minutes"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="default: 10")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mixture (default: 0)")
    parser.add_argument("--server", metavar="URL", help="a running server (default: starts one)")
    parser.add_argument("--grpc", metavar="HOST:PORT", help="its gRPC address (default: no gRPC)")
    flags = parser.parse_args()
    server = None if flags.server is None else (flags.server, flags.grpc)
    with Progress(console=Console(stderr=True)) as progress:
        report = soak(flags.minutes, flags.seed, server=server, progress=progress)
    console = Console(width=100)
    for table in tables(report):
        console.print(table)
    print(f"{report.n_compiles} programs were compiled after ready")
    for failure in report.failures:
        print(f"FAILED: {failure}")
    print(json.dumps(summary(report)))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
