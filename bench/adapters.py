"""LoRA adapters by request: tokens per second of rows over several adapters, beside the same rows without.

    python -m bench.adapters [MODEL] [--adapters 8] [--rank 16] [--slots N] [--rows 32] [--tokens 64]

MODEL is a directory, by default bench/models/llama-12x768 with random weights. The adapters are random, for
all linear layers. Four batches take turns on one engine: rows of the model itself, rows of one adapter, rows
over all adapters in turn, and every second of those with the model's. With fewer `--slots` than adapters some
rows wait until theirs is on the device. The last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.peft import CONFIG, WEIGHTS
from orca_jax.checkpoint.safetensors_writer import Tensor, write_files
from orca_jax.families.adapters import adaptable
from orca_jax.families.hf_config import read_hf_config
from orca_jax.model_files.weight_files import SINGLE

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
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (directory / CONFIG).write_text(json.dumps(fields), encoding="utf-8")


def rate(llm: LLM, adapters: Sequence[str | None], n_tokens: int, vocab_size: int, run: int) -> float:
    """Output tokens per second of a row for each of `adapters`, their prompts included."""
    chance = np.random.default_rng(run)
    prompts = chance.integers(3, vocab_size, (len(adapters), N_INPUT)).tolist()
    params = SamplingParams(max_tokens=n_tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    results = llm.generate(prompts, params, adapter=list(adapters))
    return sum(len(result.token_ids) for result in results) / (time.perf_counter() - began)


def main() -> None:
    """Measure, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    for name, default in (("adapters", 8), ("rank", 16), ("rows", 32), ("tokens", 64), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--slots", type=int, help="adapters on the device at a time (default: all)")
    flags = parser.parse_args()
    names = [f"adapter-{i}" for i in range(flags.adapters)]
    over_all = [names[i % len(names)] for i in range(flags.rows)]
    batches: dict[str, list[str | None]] = {
        "the model": [None] * flags.rows,
        "one adapter": [names[0]] * flags.rows,
        "all adapters": [*over_all],
        "half without": [name if i % 2 else None for i, name in enumerate(over_all)],
    }
    with tempfile.TemporaryDirectory() as folder:
        directories = {name: Path(folder) / name for name in names}
        for seed, directory in enumerate(directories.values()):
            write_adapter(directory, flags.model, flags.rank, seed)
        has_weights = any(flags.model.glob("*.safetensors"))
        with LLM(
            flags.model,
            load_format="auto" if has_weights else "dummy",
            adapters=directories,
            max_loras=flags.slots or flags.adapters,
            max_lora_rank=flags.rank,
            max_batch_size=flags.rows,
            n_slots=flags.rows * (N_INPUT + flags.tokens + 32),
        ) as llm:
            vocab_size = llm.config.vocab_size
            for i, batch in enumerate(batches.values()):  # compiles
                rate(llm, batch, flags.tokens, vocab_size, 1000 + i)
            before = llm.compiles.programs
            rates = {name: list[float]() for name in batches}
            for run in range(flags.runs):
                for name, batch in batches.items():
                    rates[name].append(rate(llm, batch, flags.tokens, vocab_size, run))
            n_compiled = llm.compiles.programs - before
            dtype = llm.dtype
    median = {name: statistics.median(each) for name, each in rates.items()}
    table = Table("rows", "tokens/s", "over the model's")
    for name, value in median.items():
        table.add_row(name, f"{value:,.0f}", f"{value / median['the model']:.2f}")
    Console().print(table)
    facts = {"model": flags.model.name, "dtype": dtype, "adapters": flags.adapters, "rank": flags.rank}
    facts |= {"rows": flags.rows, "tokens": flags.tokens, "compiled meanwhile": n_compiled}
    print(json.dumps(facts | {"rates": rates, "median": median}))


if __name__ == "__main__":
    main()
