"""Measures the cost of viewers of the live view: tokens per second with 0, 1 and 20, and without pages.

    python -m bench.server.viewers [--prompts 32] [--tokens 128] [--rounds 3]

Two servers of the demo model, one of them with --no-pages, work in turn. The viewers read and drop their
data in the clients' process. On a machine with few cores their work is part of the difference in tokens per
second, and not of the server's processor time.
"""

import argparse
import asyncio
import json
import os
import platform
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.other_process import OtherProcess, answer_each
from bench.server.endpoint import FLAGS, prompts
from bench.server.http_client import get, status_of
from bench.server.server_process import ServerProcess
from bench.server.stream_load import Loaded, Streams, load

VIEWERS = {"no pages": 0, "0 viewers": 0, "1 viewer": 1, "20 viewers": 20}
WITHOUT = "no pages"
_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Watched:
    """Streams while so many viewers watch; the answer is a Loaded, and how many bytes the viewers got."""

    streams: Streams
    n_viewers: int


@dataclass(slots=True)
class Runs:
    """Figures of each round: tokens per second, the server's microseconds per token, kilobytes per viewer."""

    rate: list[float] = field(default_factory=list[float])
    server_us: list[float] = field(default_factory=list[float])
    kilobytes: list[float] = field(default_factory=list[float])


class _Viewer(asyncio.Protocol):
    """Counts the bytes that arrive."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.begun: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.n_bytes += len(data)
        if not self.begun.done():
            self.begun.set_result(status_of(data))


def clients(connection: Connection) -> None:
    """For an OtherProcess: answers each Watched."""
    answer_each(connection, _watched)


async def _watched(asked: Watched) -> tuple[Loaded, int]:
    host, port = asked.streams.host, asked.streams.port
    loop = asyncio.get_running_loop()
    pairs = [await loop.create_connection(_Viewer, host, port) for _ in range(asked.n_viewers)]
    for transport, viewer in pairs:
        transport.write(get(host, port, "/live/events"))
        assert await asyncio.wait_for(viewer.begun, _SECONDS) == 200
    loaded = await load(asked.streams)
    for transport, _ in pairs:
        assert not transport.is_closing(), "a viewer was dropped"
        transport.close()
    return loaded, sum(viewer.n_bytes for _, viewer in pairs)


def measure(n_prompts: int, n_output: int, n_rounds: int) -> dict[str, Runs]:
    """Measure all cases in turn, `n_rounds` times; the order is reversed after each round."""
    runs_of = {case: Runs() for case in VIEWERS}
    with (
        ServerProcess(FLAGS, compile_ahead=True) as server,
        ServerProcess((*FLAGS, "--no-pages"), compile_ahead=True) as bare,
        OtherProcess(clients) as others,
    ):
        servers = {case: bare if case == WITHOUT else server for case in VIEWERS}
        for each in (server, bare):
            each.wait_until_ready()
            others.ask(Watched(Streams("HTTP", *each.http_address, prompts(n_prompts), 8), 0))
        for i in range(n_rounds):
            for case in [*VIEWERS] if i % 2 == 0 else [*VIEWERS][::-1]:
                n_viewers, own = VIEWERS[case], servers[case]
                cpu = own.cpu_seconds()
                streams = Streams("HTTP", *own.http_address, prompts(n_prompts), n_output)
                loaded, n_bytes = others.ask(Watched(streams, n_viewers))
                runs = runs_of[case]
                runs.rate.append(loaded.n_tokens / loaded.seconds)
                runs.server_us.append((own.cpu_seconds() - cpu) / loaded.n_tokens * 1e6)
                runs.kilobytes.append(n_bytes / max(1, n_viewers) / 1000)
    return runs_of


def main() -> None:
    """Measure, print a table and, as the last line, JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.server.viewers", description="The cost of viewers")
    parser.add_argument("--prompts", type=int, default=32, help="concurrent streams (default: 32)")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each (default: 128)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case (default: 3)")
    flags = parser.parse_args()
    runs_of = measure(flags.prompts, flags.tokens, flags.rounds)
    table = Table(title="the demo model, streamed over HTTP")
    for column in ("", "tokens/s", "server us/token", "kB for each viewer"):
        table.add_column(column, justify="right" if column else "left")
    for case, runs in runs_of.items():
        spread = [
            f"{median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"
            for values in (runs.rate, runs.server_us)
        ]
        table.add_row(case, *spread, f"{median(runs.kilobytes):.0f}")
    Console(width=120).print(table)
    summary = {
        "benchmark": "viewers",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "tokens_per_second": {case: round(median(runs.rate), 1) for case, runs in runs_of.items()},
        "server_us_per_token": {case: round(median(runs.server_us), 1) for case, runs in runs_of.items()},
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
