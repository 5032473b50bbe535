"""The time until a server is ready: with nothing compiled, and again with the programs cached on disk.

    python -m bench.start [--model gpt2] [--flags="--max-batch-size=8"]
    python -m bench.start --engine [--model gpt2]       without endpoints, and without their libraries

Starts `orca serve` twice with random weights and a compile cache that is empty at first. The number of
compiles is read from /metrics. Times are those of the whole process, from its start until it accepts
requests. With --engine the process has only the engine, compiled ahead, and its first request is timed as
well.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from bench.server.server_process import ServerProcess
from orca_jax.families.presets import PRESETS

_SPLIT = re.compile(r"loaded in ([\d.]+) s, (\d+) programs compiled in ([\d.]+) s")
METRIC = re.compile(r"^orca_(compiles|compiles_from_disk)_total\{[^}]*\} (\S+)$", re.MULTILINE)
_LONGEST_SECONDS = 1800.0
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Start:
    """One start, in seconds: until ready, and of that to load and to compile; `cpu` is of all threads.

    `programs` are the server's; by then JAX had requested `compiles` from XLA, `from_disk` of them cached.
    """

    ready: float
    load: float
    compile: float
    cpu: float
    programs: int
    compiles: int
    from_disk: int
    first_request: float | None = None  # seconds of two tokens on a ready engine


def start(model: str, flags: list[str], folder: str) -> Start:
    """Start a server and stop it again."""
    begin = time.monotonic()
    words = (model, "--load-format=dummy", f"--compile-cache={folder}", *flags)
    with ServerProcess(words, compile_ahead=True) as server:
        server.wait_until_ready(_LONGEST_SECONDS)
        ready, cpu = time.monotonic() - begin, server.cpu_seconds()
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
            metrics = dict(METRIC.findall(answer.read().decode()))
        split = _SPLIT.search(server.stderr())
        server.stop(_LONGEST_SECONDS)  # slow on a busy machine
    assert split is not None, "the server says how long it took"
    return Start(
        ready=ready,
        load=float(split[1]),
        compile=float(split[3]),
        cpu=cpu,
        programs=int(split[2]),
        compiles=int(float(metrics["compiles"])),
        from_disk=int(float(metrics["compiles_from_disk"])),
    )


def start_engine(preset: str, folder: str) -> Start:
    """Start only the engine, printing its output. Raises CalledProcessError."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "bench.device.start_engine", preset, folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as process:
        assert process.stdout is not None
        report: dict[str, float] = {}
        ready = 0.0
        for line in process.stdout:
            if line.startswith("{"):
                report, ready = json.loads(line), time.monotonic() - begin
            else:
                print(f"  {line}", end="", flush=True)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Start(
        ready=ready - report["first_request"],
        load=report["load"],
        compile=report["compile"],
        cpu=report["cpu"],
        programs=int(report["programs"]),
        compiles=int(report["compiles"]),
        from_disk=int(report["from_disk"]),
        first_request=report["first_request"],
    )


def main() -> None:
    """Start twice, print a table and, as the last line, JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__)
    parser.add_argument("--model", default="gpt2", help="a preset, or a directory (default: gpt2)")
    parser.add_argument("--flags", default="", help="more flags of orca serve")
    parser.add_argument("--engine", action="store_true", help="only the engine, of a preset")
    flags = parser.parse_args()
    if flags.engine and (flags.flags or flags.model not in PRESETS):
        parser.error("--engine needs a preset, and takes no --flags")
    starts = dict[str, Start]()
    with tempfile.TemporaryDirectory(prefix="orca-start-") as folder:
        for name in ("first", "second"):
            print(f"the {name} start of {flags.model}", flush=True)
            one = (
                start_engine(flags.model, folder)
                if flags.engine
                else start(flags.model, flags.flags.split(), folder)
            )
            starts[name] = one
            print(f"ready in {one.ready:.1f} s, of which {one.compile:.1f} s compiling", flush=True)
    which = "the engine of" if flags.engine else "orca serve"
    table = Table(title=f"{which} {flags.model} {flags.flags}, random weights, jax {jax.__version__}")
    table.add_column("start")
    for column in (
        "ready s",
        "load s",
        "compile s",
        "CPU s",
        "programs",
        "JAX compiles",
        "from disk",
        "1st request s",
    ):
        table.add_column(column, justify="right")
    for name, one in starts.items():
        times = (one.ready, one.load, one.compile, one.cpu)
        counts = (one.programs, one.compiles, one.from_disk)
        first = "" if one.first_request is None else f"{one.first_request:.3f}"
        table.add_row(name, *(f"{seconds:.1f}" for seconds in times), *map(str, counts), first)
    Console(width=110).print(table)
    ratio = starts["second"].ready / starts["first"].ready
    print(f"the second start takes {100 * ratio:.0f} % of the first")
    print(
        json.dumps({"bench": "start", "ratio": ratio} | {name: asdict(one) for name, one in starts.items()})
    )


if __name__ == "__main__":
    main()
