"""How long a server takes to be ready: with nothing compiled, and again with what that left on disk.

    python -m bench.start [--model gpt2] [--flags="--max-batch-size=8"]
    python -m bench.start --engine [--model gpt2]       without endpoints, and without their libraries

Starts `orca serve` twice with random weights, and a folder of compiled programs that is empty at first. What
JAX compiled is asked of /metrics. Times are of the whole process, from its start until it takes requests.
With --engine the process has the engine alone, compiled ahead, and its first request is timed as well.
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
_METRIC = re.compile(r"^orca_(compiles|compiles_from_disk)_total\{[^}]*\} (\S+)$", re.MULTILINE)
_LONGEST_SECONDS = 1800.0
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Start:
    """One start, in seconds: until ready, and of that to load and to compile; `cpu` is of all threads.

    `programs` are the server's; JAX asked XLA for `compiles` by then, and `from_disk` of them were on disk.
    """

    ready: float
    load: float
    compile: float
    cpu: float
    programs: int
    compiles: int
    from_disk: int
    first_request: float | None = None  # of a ready engine, two tokens


def start(model: str, flags: list[str], folder: str) -> Start:
    """Start one and end it again."""
    begin = time.monotonic()
    told = (model, "--load-format=dummy", f"--compile-cache={folder}", *flags)
    with ServerProcess(told, compile_ahead=True) as server:
        server.wait_until_ready(_LONGEST_SECONDS)
        ready, cpu = time.monotonic() - begin, server.cpu_seconds()
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
            metrics = dict(_METRIC.findall(answer.read().decode()))
        split = _SPLIT.search(server.stderr())
        server.stop(_LONGEST_SECONDS)  # on a busy machine that takes a while
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
    """Start the engine alone; what it says meanwhile is printed. Raises CalledProcessError."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "bench.device.start_engine", preset, folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as process:
        assert process.stdout is not None
        said: dict[str, float] = {}
        ready = 0.0
        for line in process.stdout:
            if line.startswith("{"):
                said, ready = json.loads(line), time.monotonic() - begin
            else:
                print(f"  {line}", end="", flush=True)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Start(
        ready=ready - said["first_request"],
        load=said["load"],
        compile=said["compile"],
        cpu=said["cpu"],
        programs=int(said["programs"]),
        compiles=int(said["compiles"]),
        from_disk=int(said["from_disk"]),
        first_request=said["first_request"],
    )


def main() -> None:
    """Start twice, print a table and last one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__)
    parser.add_argument("--model", default="gpt2", help="a preset, or a directory (default: gpt2)")
    parser.add_argument("--flags", default="", help="more flags of orca serve")
    parser.add_argument("--engine", action="store_true", help="the engine alone, of a preset")
    said = parser.parse_args()
    if said.engine and (said.flags or said.model not in PRESETS):
        parser.error("--engine is of a preset, and takes no --flags")
    starts = dict[str, Start]()
    with tempfile.TemporaryDirectory(prefix="orca-start-") as folder:
        for name in ("first", "second"):
            print(f"the {name} start of {said.model}", flush=True)
            one = (
                start_engine(said.model, folder)
                if said.engine
                else start(said.model, said.flags.split(), folder)
            )
            starts[name] = one
            print(f"ready in {one.ready:.1f} s, of which {one.compile:.1f} s compiling", flush=True)
    which = "the engine of" if said.engine else "orca serve"
    table = Table(title=f"{which} {said.model} {said.flags}, random weights, jax {jax.__version__}")
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
