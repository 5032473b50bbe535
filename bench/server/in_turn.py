"""Servers of two source trees in turn: tokens a second over HTTP, and their processor time for a token.

    python -m bench.server.in_turn TREE [--model MODEL] [--streams 64] [--rounds 16] [--paper]

TREE is a checkout of another commit. Both servers run in this Python at the same time, one of them idle
while the other is loaded, and each round begins with the one that was second before. So a machine whose
speed changes by half within a minute still gives a ratio.
"""

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.other_process import OtherProcess
from bench.server.server_process import ServerProcess
from bench.server.stream_load import Loaded, Streams, client

_READY_SECONDS = 900.0
_HERE = Path(__file__).parents[2]


def _drawn(flags: argparse.Namespace, rng: np.random.Generator) -> tuple[list[list[int]], list[int]]:
    """Draw each stream's prompt, which no earlier one equals, and its number of output tokens."""
    n = flags.streams
    lengths = rng.integers(32, 513, n) if flags.paper else np.full(n, 24)
    outputs = rng.integers(1, 129, n) if flags.paper else np.full(n, 128)
    return [rng.integers(10, 2000, int(length)).tolist() for length in lengths], outputs.tolist()


def main() -> None:
    """Measure, print a table and, as the last line, JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.server.in_turn", description=__doc__)
    parser.add_argument("tree", type=Path, metavar="TREE", help="the other commit's checkout")
    parser.add_argument("--model", help="a directory (default: the demo model)")
    parser.add_argument("--streams", type=int, default=64, help="at once (default: 64)")
    parser.add_argument("--rounds", type=int, default=16, help="plays on each server (default: 16)")
    parser.add_argument(
        "--paper", action="store_true", help="U(32, 512) tokens in, U(1, 128) out, instead of 24 in, 128 out"
    )
    parser.add_argument("--flags", default="", help="more flags of both servers")
    flags = parser.parse_args()
    words = [*([flags.model] if flags.model else []), *flags.flags.split()]
    plays: dict[str, list[tuple[Loaded, float]]] = {"there": [], "here": []}
    with ExitStack() as running:
        load = running.enter_context(OtherProcess(client))
        servers = {
            name: running.enter_context(ServerProcess(words, compile_ahead=True, tree=tree.resolve()))
            for name, tree in (("there", flags.tree), ("here", _HERE))
        }
        for server in servers.values():
            server.wait_until_ready(_READY_SECONDS)
        progress = running.enter_context(Progress(console=Console(stderr=True)))
        rng = np.random.default_rng(0)
        names = list(servers)
        for round_ in progress.track(range(-1, flags.rounds), description="rounds"):  # the first warms up
            prompts, outputs = _drawn(flags, rng)
            names.reverse()
            for name in names:
                server = servers[name]
                before = server.cpu_seconds()
                loaded = load.ask(Streams("HTTP", *server.http_address, prompts, outputs))
                if round_ >= 0:
                    plays[name].append((loaded, server.cpu_seconds() - before))
    rates = {name: [one.n_tokens / one.seconds for one, _ in all_of] for name, all_of in plays.items()}
    costs = {name: [1e6 * cpu / one.n_tokens for one, cpu in all_of] for name, all_of in plays.items()}
    table = Table(title=f"{flags.streams} streams, {flags.rounds} rounds: median (least to most)")
    for column in ("", "tokens/s", "server us/token"):
        table.add_column(column, justify="right" if column else "left")
    for name in plays:
        cells = (f"{median(x):,.1f} ({min(x):,.1f} to {max(x):,.1f})" for x in (rates[name], costs[name]))
        table.add_row(name, *cells)
    ratios = {
        what: median(here / there for here, there in zip(found["here"], found["there"], strict=True))
        for what, found in (("tokens/s", rates), ("server us/token", costs))
    }
    table.add_row("here over there, by round", *(f"{ratio:.3f}" for ratio in ratios.values()))
    Console().print(table)
    print(json.dumps({"benchmark": "in turn", "tokens/s": rates, "server us/token": costs, "ratios": ratios}))


if __name__ == "__main__":
    main()
