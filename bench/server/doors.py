"""The time from a mistake on the command line to its message.

    python -m bench.server.doors [--runs 5] [--json FILE]

Runs `orca` with each mistake and takes the median of the runs, in seconds from the start of the process to
its end: on the clock, and as processor time of the process, which other programs on the machine change less.
A first run is not counted, so that the files are in memory. The aims are 0.3 seconds for a mistake in the
command line itself and 1 second for a mistake in a file or model that it names.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from orca_jax.model_files.found_model import DEMO_MODEL

FLAG_SECONDS, PATH_SECONDS = 0.3, 1.0  # the aims

_ROOT = Path(__file__).parents[2]
_LONGEST_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Mistake:
    """A command line, the words of its message, and the aim in seconds."""

    name: str
    arguments: tuple[str, ...]
    words: str
    aim: float


@dataclass(frozen=True, slots=True)
class Times:
    """The medians of a mistake's runs, in seconds."""

    name: str
    seconds: float
    cpu_seconds: float
    aim: float


def mistakes() -> list[Mistake]:
    """The mistakes, in a folder made by `prepare`."""
    prompt = ("generate", "a prompt", "--model")
    worker = ("--stage", "1", "--of", "2", "--listen", "127.0.0.1:0")
    return [
        Mistake("wrong command", ("serv",), "did you mean serve?", FLAG_SECONDS),
        Mistake("wrong flag", ("serve", "--max-batchsize", "8"), "did you mean", FLAG_SECONDS),
        Mistake("another engine's flag", ("serve", "--max-model-len", "8"), "--n-slots", FLAG_SECONDS),
        Mistake("wrong value of a flag", ("serve", "--port", "x"), "whole number", FLAG_SECONDS),
        Mistake("serve: no such directory", ("serve", "/nowhere"), "there is no directory", PATH_SECONDS),
        Mistake("generate: no such directory", (*prompt, "/nowhere"), "no directory", PATH_SECONDS),
        Mistake("chat: no such directory", ("chat", "/nowhere"), "no directory", PATH_SECONDS),
        Mistake("worker: no such directory", ("worker", "/nowhere", *worker), "no directory", PATH_SECONDS),
        Mistake("compile: no such directory", ("compile", "/nowhere"), "no directory", PATH_SECONDS),
        Mistake("plan: no such directory", ("plan", "/nowhere", "--device", "h100"), "no dir", PATH_SECONDS),
        Mistake("convert: no such directory", ("convert", "/nowhere", "new"), "no directory", PATH_SECONDS),
        Mistake("replay: no such file", ("replay", "/nowhere"), "cannot be read", PATH_SECONDS),
        Mistake("serve: a wrong config.json", ("serve", "wrong"), "model_type", PATH_SECONDS),
        Mistake("serve: no weights", ("serve", "no_weights"), "the weights are missing", PATH_SECONDS),
        Mistake("serve: a wrong settings file", ("serve", "--config", "a.yaml"), "line 1", PATH_SECONDS),
        Mistake("serve: a hub name, offline", ("serve", "org/name"), "HF_HUB_OFFLINE", PATH_SECONDS),
    ]


def prepare(folder: Path) -> None:
    """Make the files with mistakes."""
    config = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
    for name, values in (("wrong", {"model_type": "unheard_of"}), ("no_weights", {})):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config | values), encoding="utf-8")
    (folder / "a.yaml").write_text("port: many\n", encoding="utf-8")


def run_once(mistake: Mistake, folder: Path) -> tuple[float, float]:
    """Seconds on the clock and of processor time; asserts that the message is the right one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ORCA_")}
    environment |= {"PYTHONPATH": str(_ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}
    command = [sys.executable, "-m", "server.cli", *mistake.arguments]
    begin, before = time.monotonic(), os.times()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_LONGEST_SECONDS
    )
    seconds, after = time.monotonic() - begin, os.times()
    assert done.returncode == 2 and mistake.words in done.stderr, (mistake, done.stderr)
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, cpu


def measured(mistake: Mistake, folder: Path, runs: int) -> Times:
    """The medians of so many runs, after one that does not count."""
    run_once(mistake, folder)
    times = [run_once(mistake, folder) for _ in range(runs)]
    clock, cpu = (round(median(each), 3) for each in zip(*times, strict=True))
    return Times(mistake.name, clock, cpu, mistake.aim)


def main() -> None:
    """Measure, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each that count (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        results = [measured(mistake, folder, flags.runs) for mistake in mistakes()]
    table = Table(title=f"From start to message, median of {flags.runs}", title_justify="left")
    for column in ("mistake", "seconds", "processor, s", "aim, s"):
        table.add_column(column, justify="left" if column == "mistake" else "right")
    for each in results:
        table.add_row(each.name, f"{each.seconds:.2f}", f"{each.cpu_seconds:.2f}", f"{each.aim:g}")
    Console().print(table)
    text = json.dumps([asdict(each) for each in results])
    if flags.json is not None:
        flags.json.write_text(f"{text}\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
