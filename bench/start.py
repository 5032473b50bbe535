"""How long a server takes to be ready: with nothing compiled, and again with what that left on disk.

    python -m bench.start [--model gpt2] [--flags="--max-batch-size=8"]

Starts `orca serve` twice with random weights, and a folder of compiled programs that is empty at first. What
JAX compiled is asked of /metrics. Times are of the whole process, from its start until it takes requests.
"""

import argparse
import json
import re
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass

import jax
from rich.console import Console
from rich.table import Table

from bench.server_process import ServerProcess

_SPLIT = re.compile(r"loaded in ([\d.]+) s, (\d+) programs compiled in ([\d.]+) s")
_METRIC = re.compile(r"^orca_(compiles|compiles_from_disk)_total\{[^}]*\} (\S+)$", re.MULTILINE)
_LONGEST_SECONDS = 1800.0


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


def main() -> None:
    """Start twice, print a table and last one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__)
    parser.add_argument("--model", default="gpt2", help="a preset, or a directory (default: gpt2)")
    parser.add_argument("--flags", default="", help="more flags of orca serve")
    said = parser.parse_args()
    console, starts = Console(stderr=True), dict[str, Start]()
    with tempfile.TemporaryDirectory(prefix="orca-start-") as folder:
        for name in ("first", "second"):
            with console.status(f"the {name} start of {said.model}"):
                starts[name] = start(said.model, said.flags.split(), folder)
    table = Table(title=f"orca serve {said.model} {said.flags}, random weights, jax {jax.__version__}")
    table.add_column("start")
    for column in ("ready s", "load s", "compile s", "CPU s", "programs", "JAX compiles", "from disk"):
        table.add_column(column, justify="right")
    for name, one in starts.items():
        times = (one.ready, one.load, one.compile, one.cpu)
        counts = (one.programs, one.compiles, one.from_disk)
        table.add_row(name, *(f"{seconds:.1f}" for seconds in times), *map(str, counts))
    Console(width=110).print(table)
    ratio = starts["second"].ready / starts["first"].ready
    print(f"the second start takes {100 * ratio:.0f} % of the first")
    print(
        json.dumps({"bench": "start", "ratio": ratio} | {name: asdict(one) for name, one in starts.items()})
    )


if __name__ == "__main__":
    main()
