"""The first minute of a server that is ready early, beside the time after all its programs are compiled.

    python -m bench.server.first_minute [--model DIRECTORY] [--streams 32] [--tokens 128] [--later 30]

Starts `orca serve` with random weights and an empty compile cache. As soon as it is ready, streams run from a
client process, all begun at once, again and again: until `--later` seconds after the last program was
compiled. With `--no-ready-early` in `--flags` nothing compiles while it serves, which shows the machine's own
changes. The model is by default a Llama of two layers that cost nearly nothing, so that host and compiler
have the processors for themselves.
"""

import argparse
import json
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.other_process import OtherProcess
from bench.server.costless_model import write_costless_model
from bench.server.server_process import ServerProcess
from bench.server.stream_load import Loaded, Streams, client
from bench.start import METRIC

_LONGEST_SECONDS = 1800.0
_FIRST = 60.0  # seconds


@dataclass(frozen=True, slots=True)
class Round:
    """All streams once. `end` is in seconds after the server was ready, `compiles` all of them by then."""

    end: float
    compiles: int
    loaded: Loaded


def _compiles(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        return int(float(dict(METRIC.findall(answer.read().decode()))["compiles"]))


def measure(model: Path, flags: argparse.Namespace, folder: str) -> list[Round]:
    """Load a server from its first second until the programs' last, and `flags.later` seconds more."""
    words = [str(model), "--load-format=dummy", f"--compile-cache={folder}", *flags.flags.split()]
    variables = {} if "--no-ready-early" in words else {"ORCA_READY_EARLY": "true"}
    rng = np.random.default_rng(0)
    rounds = list[Round]()
    with (
        OtherProcess(client) as load,
        ServerProcess(words, compile_ahead=True, variables=variables) as server,
    ):
        server.wait_until_ready(_LONGEST_SECONDS)
        begin, host, port = time.monotonic(), *server.http_address
        last, last_changed = _compiles(server.url), 0.0
        while True:
            prompts = rng.integers(10, 10_000, (flags.streams, flags.input)).tolist()
            loaded: Loaded = load.ask(Streams("HTTP", host, port, prompts, flags.tokens))
            now = time.monotonic() - begin
            if (n := _compiles(server.url)) > last:
                last, last_changed = n, now
            rounds.append(Round(now, n, loaded))
            if now > max(_FIRST, last_changed + flags.wait) + flags.later or now > _LONGEST_SECONDS:
                return rounds


def summary(rounds: list[Round], later_seconds: float) -> dict[str, Any]:
    """Rates of the first minute and of the last `later_seconds`, and the gaps between tokens in them."""
    end = rounds[-1].end
    parts = {
        "first minute": [one for one in rounds if one.end <= _FIRST],
        "later": [one for one in rounds if one.end > end - later_seconds],
    }
    compiled = [after.end for before, after in pairwise(rounds) if after.compiles > before.compiles]
    result: dict[str, Any] = {"last program after": max(compiled, default=0.0)}
    for name, part in parts.items():
        gaps = [gap for one in part for gap in one.loaded.gaps]
        first = [wait for one in part for wait in one.loaded.first]
        result[name] = {
            "tokens/s": sum(one.loaded.n_tokens for one in part) / sum(one.loaded.seconds for one in part),
            "first token p50, ms": 1e3 * median(first),
            "gaps p99, ms": 1e3 * float(np.quantile(gaps, 0.99)),
            "longest gap, ms": 1e3 * max(gaps),
        }
    return result


def main() -> None:
    """Measure, print a table and, as the last line, JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.server.first_minute", description=__doc__)
    parser.add_argument("--model", type=Path, help="a directory (default: a small Llama)")
    parser.add_argument("--streams", type=int, default=32, help="at once (default: 32)")
    parser.add_argument("--input", type=int, default=24, help="tokens of each prompt (default: 24)")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each (default: 128)")
    parser.add_argument("--wait", type=float, default=20, help="seconds without a compile (default: 20)")
    parser.add_argument("--later", type=float, default=30, help="seconds measured after them (default: 30)")
    parser.add_argument("--flags", default="", help="more flags of orca serve")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="orca-first-") as folder:
        model = flags.model
        if model is None:
            model = write_costless_model(Path(folder) / "model")
        rounds = measure(model, flags, folder)
    found = summary(rounds, flags.later)
    first, later = found["first minute"], found["later"]
    table = Table(title=f"{flags.streams} streams; last program after {found['last program after']:.0f} s")
    for column in ("", "first minute", "later", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for name in first:
        table.add_row(name, f"{first[name]:,.1f}", f"{later[name]:,.1f}", f"{first[name] / later[name]:.2f}")
    Console().print(table)
    print(json.dumps({"benchmark": "first minute", **found, "streams": flags.streams}))


if __name__ == "__main__":
    main()
