"""LoRA adapters by request: tokens per second of rows over several adapters, beside the same rows without.

    python -m bench.adapters [MODEL] [--adapters 8] [--rank 16] [--slots N] [--rows 32] [--tokens 64]
    python -m bench.adapters [MODEL] --many 1000 [--minutes 10] [--rank 16] [--slots 16] [--rows 16]

MODEL is a directory, by default bench/models/llama-12x768 with random weights. The adapters are random, for
all linear layers. Four batches take turns on one engine: rows of the model itself, rows of one adapter, rows
over all adapters in turn, and every second of those with the model's. With fewer `--slots` than adapters some
rows wait until theirs is on the device. `--keep` leaves model and adapters for bench/peers/vllm_adapters.py.

With `--many` that many adapters are named, and `--rows` clients each send one request after the other: in the
first and the last sixth of the time to the model itself, between them every second client to adapters drawn
by Zipf's law. The model's own rows are compared: the time of a token among others' adapters over that among
themselves. It fails if a request fails, a program is compiled, or the process's memory grows by over 5 %
from the second quarter of the mixed time to the last. The adapters are links to `--files` different ones, to
save disk; `--host-mb` bounds those in memory. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.peers.checkpoint import write_random_checkpoint
from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.peft import CONFIG, WEIGHTS
from orca_jax.checkpoint.safetensors_writer import Tensor, write_files
from orca_jax.errors import OrcaError
from orca_jax.families.adapters import adaptable
from orca_jax.families.hf_config import read_hf_config
from orca_jax.model_files.weight_files import SINGLE
from orca_jax.request.adapter import Adapter
from orca_jax.scheduling.adapter_slots import PutAdapter

MODEL = Path(__file__).parent / "models" / "llama-12x768"
N_INPUT = 32


def write_adapter(directory: Path, model: Path, rank: int, seed: int) -> None:
    """Write a random adapter of all linear layers of a family that stores each of them alone."""
    found, chance = read_hf_config(model), np.random.default_rng(seed)
    tensors: list[Tensor] = []

    def add(name: str, *shape: int) -> None:
        values = (0.02 * chance.standard_normal(shape)).astype(np.float32)
        tensors.append(Tensor(name, shape, values.dtype, lambda: values))

    attention = found.model.attention
    n_queries, n_keys = attention.n_heads * attention.head_size, attention.n_kv_heads * attention.head_size
    for name, parameter in adaptable(found.model).items():
        stored = found.family.stored_name(name, found.family.prefixes[0], found.model)
        n_in = int(np.prod(parameter.shape[-parameter.n_in :]))
        n_out = int(np.prod(parameter.shape[: -parameter.n_in]))
        sizes = {1: [n_out], 2: [n_out // 2] * 2, 3: [n_queries, n_keys, n_keys]}[len(stored.names)]
        for tensor, size in zip(stored.names, sizes, strict=True):
            module = f"base_model.model.{tensor.removesuffix('.weight')}"
            add(f"{module}.lora_A.weight", rank, n_in)
            add(f"{module}.lora_B.weight", size, rank)
    directory.mkdir()
    write_files(directory, tensors, max_bytes=1 << 40)
    (directory / SINGLE).rename(directory / WEIGHTS)
    leaves = sorted({tensor.name.split(".")[-3] for tensor in tensors})
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": leaves, "bias": "none"}
    (directory / CONFIG).write_text(json.dumps(fields), encoding="utf-8")


def rate(llm: LLM, adapters: Sequence[str | None], n_tokens: int, vocab_size: int, run: int) -> float:
    """Output tokens per second of a row for each of `adapters`, their prompts included."""
    chance = np.random.default_rng(run)
    prompts = chance.integers(3, vocab_size, (len(adapters), N_INPUT)).tolist()
    params = SamplingParams(max_tokens=n_tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    results = llm.generate(prompts, params, adapter=list(adapters))
    return sum(len(result.token_ids) for result in results) / (time.perf_counter() - began)


@dataclass
class Phase:
    """Figures that clients saw in a part of a run; times are in seconds."""

    n_ended: dict[str, int] = field(default_factory=lambda: {"the model": 0, "an adapter": 0})
    per_token: list[float] = field(default_factory=list[float])  # of each request to the model itself
    longest_gap: float = 0.0  # between two tokens of one
    failures: list[str] = field(default_factory=list[str])
    memory: list[int] = field(default_factory=list[int])  # of the process, in kB, at equal intervals


def resident_kb() -> int:
    """The process's memory."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("a process has memory")


def clients(llm: LLM, n: int, names: Sequence[str], seconds: float, n_tokens: int, *, seed: int) -> Phase:
    """Let `n` clients send requests for some time, every second one to adapters if there are `names`.

    Outputs have half to one and a half times `n_tokens`, so that prompts come one by one in any case: clients
    that all begin together share an iteration for their prompts, and those that wait for adapters do not.
    """
    phase, lock, until = Phase(), threading.Lock(), time.perf_counter() + seconds
    shares = 1.0 / np.arange(1, len(names) + 1)

    def client(number: int) -> None:
        chance = np.random.default_rng((seed, number))
        while time.perf_counter() < until:
            adapter = None
            if names and number % 2:
                adapter = names[int(chance.choice(len(names), p=shares / shares.sum()))]
            prompt, times = chance.integers(3, llm.config.vocab_size, N_INPUT).tolist(), list[float]()
            n_output = int(chance.integers(n_tokens // 2, 3 * n_tokens // 2, endpoint=True))
            params = SamplingParams(max_tokens=n_output, temperature=0.0, ignore_eos=True)
            try:
                times += [time.perf_counter() for _ in llm.stream(prompt, params, adapter=adapter)]
            except OrcaError as error:
                with lock:
                    phase.failures.append(f"{adapter}: {error}")
                continue
            with lock:
                phase.n_ended["the model" if adapter is None else "an adapter"] += 1
                if adapter is None:
                    phase.per_token.append((times[-1] - times[0]) / (n_output - 1))
                    phase.longest_gap = max(phase.longest_gap, *np.diff(times))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(max(0.5, seconds / 60))
            phase.memory.append(resident_kb())
    return phase


def many(llm: LLM, names: Sequence[str], flags: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Run clients of many adapters; return the facts, and what was wrong."""
    seconds, n_read = 60 * flags.minutes, [0]
    store = llm.service.adapter_store
    assert store is not None
    read = store.read

    def counted(adapter: Adapter) -> PutAdapter:
        n_read[0] += 1
        return read(adapter)

    store.read = counted
    clients(llm, flags.rows, names, seconds / 20, flags.tokens, seed=0)
    before, n_read[0] = llm.compiles.programs, 0
    alone = [clients(llm, flags.rows, (), seconds / 6, flags.tokens, seed=1)]
    mixed = clients(llm, flags.rows, names, seconds * 2 / 3, flags.tokens, seed=2)
    alone.append(clients(llm, flags.rows, (), seconds / 6, flags.tokens, seed=3))
    n_compiled = llm.compiles.programs - before
    base = statistics.median([value for phase in alone for value in phase.per_token])
    among = statistics.median(mixed.per_token)
    quarter = max(1, len(mixed.memory) // 4)
    second, last = max(mixed.memory[quarter : 2 * quarter]), max(mixed.memory[-quarter:])
    failures = [one for phase in (*alone, mixed) for one in phase.failures]
    facts = {
        "minutes": flags.minutes,
        "requests": mixed.n_ended,
        "failures": len(failures),
        "adapters put on the device": n_read[0],
        "compiled meanwhile": n_compiled,
        "memory MB, second quarter and last": [round(second / 1e3), round(last / 1e3)],
        "the model's token, ms: alone, among adapters": [round(1e3 * base, 2), round(1e3 * among, 2)],
        "ratio": round(among / base, 3),
        "longest gap ms: alone, among adapters": [
            round(1e3 * max(phase.longest_gap for phase in alone)),
            round(1e3 * mixed.longest_gap),
        ],
    }
    wrong = failures[:5]
    wrong += [f"{n_compiled} programs were compiled"] if n_compiled else []
    wrong += ["the memory grew"] if last > 1.05 * second else []
    return facts, wrong


def write_links(directories: Sequence[Path]) -> None:
    """Make the other directories of links to the files of the first ones, which are written."""
    written = [directory for directory in directories if directory.exists()]
    for i, directory in enumerate(directories[len(written) :]):
        directory.mkdir()
        for path in written[i % len(written)].iterdir():
            os.link(path, directory / path.name)
    n_bytes = sum(path.stat().st_size for one in written for path in one.iterdir())
    print(f"{len(directories)} adapters, {n_bytes / 1e6:,.0f} MB in files", file=sys.stderr)


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    for name, default in (("adapters", 8), ("rank", 16), ("rows", 32), ("tokens", 64), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--slots", type=int, help="adapters on the device at a time (default: all)")
    parser.add_argument("--many", type=int, help="name so many adapters, and send requests for --minutes")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="write model and adapters there")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--files", type=int, default=32, help="different adapters of --many")
    parser.add_argument("--host-mb", type=int, default=256, help="megabytes of adapters in host memory")
    flags = parser.parse_args()
    names = [f"adapter-{i}" for i in range(flags.many or flags.adapters)]
    with engine(flags, names) as llm:
        if flags.many:
            facts, wrong = many(llm, names, flags)
        else:
            facts, wrong = batches(llm, names, flags), []
        facts = {"model": flags.model.name, "dtype": llm.dtype, "adapters": len(names), **facts}
    facts |= {"rank": flags.rank, "rows": flags.rows, "tokens": flags.tokens}
    print(json.dumps(facts))
    if wrong:
        sys.exit("; ".join(wrong))


@contextmanager
def engine(flags: argparse.Namespace, names: Sequence[str]) -> Iterator[LLM]:
    """An engine with adapters of these names, all of whose programs are compiled."""
    with ExitStack() as stack:
        folder = flags.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = flags.model
        if flags.keep is not None:
            folder.mkdir(parents=True)
            write_random_checkpoint(model := folder / "model", read_hf_config(flags.model).model)
        directories = {name: folder / name for name in names}
        n_different = flags.files if flags.many else len(names)
        for seed, directory in enumerate([*directories.values()][:n_different]):
            write_adapter(directory, flags.model, flags.rank, seed)
        write_links([*directories.values()])
        with LLM(
            model,
            load_format="auto" if any(model.glob("*.safetensors")) else "dummy",
            adapters=directories,
            max_loras=flags.slots or (16 if flags.many else flags.adapters),
            max_lora_rank=flags.rank,
            lora_host_bytes=flags.host_mb << 20,
            max_batch_size=flags.rows,
            n_slots=flags.rows * (N_INPUT + 3 * flags.tokens // 2 + 32),
            compile_ahead=True,
            on_compile="error",
        ) as llm:
            yield llm


def batches(llm: LLM, names: Sequence[str], flags: argparse.Namespace) -> dict[str, Any]:
    """Measure four kinds of batches in turn, and print a table of them."""
    over_all = [names[i % len(names)] for i in range(flags.rows)]
    kinds: dict[str, list[str | None]] = {
        "the model": [None] * flags.rows,
        "one adapter": [names[0]] * flags.rows,
        "all adapters": [*over_all],
        "half without": [name if i % 2 else None for i, name in enumerate(over_all)],
    }
    vocab_size, rates = llm.config.vocab_size, {name: list[float]() for name in kinds}
    for i, batch in enumerate(kinds.values()):  # reads all weights once
        rate(llm, batch, flags.tokens, vocab_size, 1000 + i)
    before = llm.compiles.programs
    for run in range(flags.runs):
        for name, batch in kinds.items():
            rates[name].append(rate(llm, batch, flags.tokens, vocab_size, run))
    median = {name: statistics.median(each) for name, each in rates.items()}
    table = Table("rows", "tokens/s", "over the model's")
    for name, value in median.items():
        table.add_row(name, f"{value:,.0f}", f"{value / median['the model']:.2f}")
    Console().print(table)
    return {"compiled meanwhile": llm.compiles.programs - before, "rates": rates, "median": median}


if __name__ == "__main__":
    main()
