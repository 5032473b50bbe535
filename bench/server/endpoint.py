"""The cost of the endpoints: streams of the demo model over HTTP and gRPC, and the offline API, in one run.

    python -m bench.server.endpoint [--prompts 64] [--tokens 128] [--runs 5] [--profile]

Server, offline API and client are separate processes, and one of the first two works at a time, in turn. All
programs are compiled beforehand. The server's processor time per token, minus the offline API's, is the
endpoint's; if server and client share few cores, this includes the time that the engine's threads spin while
waiting for a core. It is therefore measured in a second way: on an engine that uses no processor time, with
and without an endpoint. `--profile` shows where the event loop of that server spends its time.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Literal, get_args

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.other_process import OtherProcess
from bench.server import costless_server
from bench.server.costless_server import HOST, ITERATION_SECONDS, Direct, Hot
from bench.server.server_process import ServerProcess, host_and_port
from bench.server.stream_load import Loaded, Streams, client
from orca_jax import LLM, SamplingParams
from orca_jax.iteration.shape import bucket_sizes

Protocol = Literal["HTTP", "gRPC"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)

MAX_BATCH_SIZE = 32
MAX_BATCH_TOKENS = 512  # the demo model's positions: then one prompt can reach every bucket
N_INPUT = 24
CONCURRENT = (1, 8, 32, 64)
FLAGS = (f"--max-batch-size={MAX_BATCH_SIZE}", f"--max-batch-tokens={MAX_BATCH_TOKENS}")


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts for the offline API, with `n_output` greedy tokens each."""

    prompts: Sequence[Sequence[int]]
    n_output: int


@dataclass(slots=True)
class Runs:
    """Per run: tokens per second, and microseconds of processor time per token of server and client."""

    rate: list[float] = field(default_factory=list[float])
    server_us: list[float] = field(default_factory=list[float])
    client_us: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True)
class Own:
    """An endpoint on the costless engine: processor time in microseconds per token, tokens per message."""

    protocol: Protocol
    n_streams: int
    whole_us: float
    direct_us: float
    tokens_per_message: float

    @property
    def own_us(self) -> float:
        """The endpoint's addition to the bare service."""
        return self.whole_us - self.direct_us


def offline(connection: Connection) -> None:
    """For an OtherProcess: answers each Work with (seconds, tokens, processor seconds)."""
    with LLM(max_batch_size=MAX_BATCH_SIZE, max_batch_tokens=MAX_BATCH_TOKENS) as llm:
        while True:
            try:
                work: Work = connection.recv()
            except EOFError:
                return
            params = SamplingParams(max_tokens=work.n_output, temperature=0.0, ignore_eos=True)
            cpu, start = time.process_time(), time.perf_counter()
            results = llm.generate(list(work.prompts), params)
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            connection.send((seconds, sum(len(result.token_ids) for result in results), cpu))


def prompts(n: int, n_input: int = N_INPUT) -> list[list[int]]:
    """Distinct prompts of one length."""
    return [[1 + (31 * i + 7 * j) % 2000 for j in range(n_input)] for i in range(n)]


def whole_engine(n_prompts: int, n_output: int, n_runs: int, progress: Progress) -> dict[str, Runs]:
    """The offline API, HTTP and gRPC in turn, `n_runs` times."""
    runs_of = {name: Runs() for name in ("offline", *PROTOCOLS)}
    warm = [prompts(1, min(size, MAX_BATCH_TOKENS - 1)) for size in bucket_sizes(MAX_BATCH_TOKENS)]
    task = progress.add_task("compiling", total=2 * len(warm) + n_runs * len(runs_of))
    with ServerProcess(FLAGS) as server, OtherProcess(offline) as api, OtherProcess(client) as load:
        server.wait_until_ready()
        addresses = {"HTTP": server.http_address, "gRPC": host_and_port(f"http://{server.grpc_address}")}
        for one in warm:
            api.ask(Work(one, 1))
            progress.advance(task)
            load.ask(Streams("HTTP", *addresses["HTTP"], one, 1))
            progress.advance(task)
        work = Work(prompts(n_prompts), n_output)
        for i in range(n_runs):
            progress.update(task, description=f"demo model, run {i + 1} of {n_runs}")
            seconds, n_tokens, cpu = api.ask(work)
            runs_of["offline"].rate.append(n_tokens / seconds)
            runs_of["offline"].server_us.append(cpu / n_tokens * 1e6)
            progress.advance(task)
            for protocol in PROTOCOLS:
                cpu = server.cpu_seconds()
                loaded: Loaded = load.ask(Streams(protocol, *addresses[protocol], work.prompts, n_output))
                assert loaded.n_tokens == n_tokens, f"{loaded.n_tokens} tokens came, not {n_tokens}"
                runs = runs_of[protocol]
                runs.rate.append(loaded.n_tokens / loaded.seconds)
                runs.server_us.append((server.cpu_seconds() - cpu) / n_tokens * 1e6)
                runs.client_us.append(loaded.cpu / n_tokens * 1e6)
                progress.advance(task)
    return runs_of


def own_cost(n_runs: int, *, profile: bool, progress: Progress) -> tuple[list[Own], list[Hot]]:
    """Each endpoint on the costless engine at each number of streams; medians of `n_runs`."""
    endpoints: list[Own] = []
    task = progress.add_task("without an engine", total=len(CONCURRENT) * n_runs * 3)
    with OtherProcess(costless_server.server) as server, OtherProcess(client) as load:
        ports = dict(zip(PROTOCOLS, server.ask("ports"), strict=True))
        for protocol in PROTOCOLS:  # one-time work is done now
            load.ask(Streams(protocol, HOST, ports[protocol], prompts(8), 8))
        for n in CONCURRENT:
            n_output = max(128, 400 // n)
            direct: list[float] = []
            whole: dict[Protocol, list[float]] = {protocol: [] for protocol in PROTOCOLS}
            together: dict[Protocol, list[float]] = {protocol: [] for protocol in PROTOCOLS}
            for _ in range(n_runs):
                direct.append(server.ask(Direct(prompts(n), n_output)) / (n * n_output) * 1e6)
                progress.advance(task)
                for protocol in PROTOCOLS:
                    before = server.ask("cpu")
                    loaded: Loaded = load.ask(Streams(protocol, HOST, ports[protocol], prompts(n), n_output))
                    whole[protocol].append((server.ask("cpu") - before) / loaded.n_tokens * 1e6)
                    together[protocol].append(loaded.n_tokens / loaded.n_messages)
                    progress.advance(task)
            for protocol in PROTOCOLS:
                costs = median(whole[protocol]), median(direct), median(together[protocol])
                endpoints.append(Own(protocol, n, *costs))
        hottest: list[Hot] = []
        if profile:
            server.ask("profile")
            load.ask(Streams("HTTP", HOST, ports["HTTP"], prompts(32), 256))
            hottest = server.ask("hottest")
    return endpoints, hottest


def whole_table(runs_of: dict[str, Runs]) -> Table:
    """Medians, with minimum and maximum."""
    table = Table(title="the demo model, streamed and offline")
    for column in ("", "tokens/s", "of offline", "server us/token", "endpoint us/token", "client us/token"):
        table.add_column(column, justify="right" if column else "left")
    api = runs_of["offline"]
    for name, runs in runs_of.items():
        endpoint = median(runs.server_us) - median(api.server_us)
        table.add_row(
            name,
            f"{median(runs.rate):,.0f} ({min(runs.rate):,.0f} to {max(runs.rate):,.0f})",
            f"{median(runs.rate) / median(api.rate):.2f}",
            f"{median(runs.server_us):.0f} ({min(runs.server_us):.0f} to {max(runs.server_us):.0f})",
            "" if runs is api else f"{endpoint:.0f}",
            f"{median(runs.client_us):.0f}" if runs.client_us else "",
        )
    return table


def own_table(endpoints: list[Own]) -> Table:
    """The endpoint's own processor time, by number of streams."""
    table = Table(title="without an engine: processor time, microseconds per token")
    for column in ("endpoint", "streams", "server", "service alone", "endpoint's own", "tokens a message"):
        table.add_column(column, justify="left" if column == "endpoint" else "right")
    for own in sorted(endpoints, key=lambda own: PROTOCOLS.index(own.protocol)):
        numbers = [f"{n:.1f}" for n in (own.whole_us, own.direct_us, own.own_us)]
        table.add_row(own.protocol, str(own.n_streams), *numbers, f"{own.tokens_per_message:.2f}")
    return table


def hot_table(hottest: list[Hot]) -> Table:
    """The costliest functions; their times include the profiler's own cost."""
    table = Table(title="HTTP, 32 streams of 256 tokens: the event loop's ten costliest functions")
    for column in ("function", "calls", "own us/token", "with callees us/token"):
        table.add_column(column, justify="left" if column == "function" else "right")
    for hot in hottest:
        per_token = [f"{seconds / (32 * 256) * 1e6:.2f}" for seconds in (hot.own, hot.whole)]
        table.add_row(hot.name, f"{hot.calls:,}", *per_token)
    return table


def summary(runs_of: dict[str, Runs], own: list[Own]) -> dict[str, Any]:
    """The figures, for the last line."""
    rates = {name: median(runs.rate) for name, runs in runs_of.items()}
    return {
        "benchmark": "endpoint",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "tokens_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "of_offline": {name: round(rates[name] / rates["offline"], 3) for name in PROTOCOLS},
        "server_us_per_token": {name: round(median(runs.server_us), 1) for name, runs in runs_of.items()},
        "iteration_seconds_without_engine": ITERATION_SECONDS,
        "own_us_per_token": [
            {"endpoint": one.protocol, "streams": one.n_streams, "us": round(one.own_us, 1)} for one in own
        ],
    }


def main() -> None:
    """Measure, print tables and, as the last line, JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.server.endpoint", description="The cost of the endpoints"
    )
    parser.add_argument("--prompts", type=int, default=64, help="concurrent streams (default: 64)")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each (default: 128)")
    parser.add_argument("--runs", type=int, default=5, help="runs of each kind (default: 5)")
    parser.add_argument("--profile", action="store_true", help="show the event loop's costliest functions")
    flags = parser.parse_args()
    with Progress(console=Console(stderr=True)) as progress:
        runs_of = whole_engine(flags.prompts, flags.tokens, flags.runs, progress)
        own, hottest = own_cost(flags.runs, profile=flags.profile, progress=progress)
    console = Console(width=140)
    console.print(whole_table(runs_of))
    console.print(own_table(own))
    if hottest:
        console.print(hot_table(hottest))
    print(json.dumps(summary(runs_of, own)))


if __name__ == "__main__":
    main()
