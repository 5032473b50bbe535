"""The time to sample the next tokens, by feature, against the floor of reading the logits once.

    python -m bench.sampler [--rows 1,32,128] [--vocab 50257,151936] [--repeat 30] [--only greedy,temperature]

Each of the chooser's programs runs on random logits with a spread like a model's; its results stay on the
device. The floor is measured in the same run: the maximum of each row, which reads the same array once. Where
C chooses the tokens, the choice in JAX is measured too. All take turns in each round, forwards and backwards.
The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from orca_jax.execution.sampling import TokenChooser, has_native_choice
from orca_jax.grammar.token_mask import n_words
from orca_jax.host_memory import keep_large_buffers
from orca_jax.iteration.flat_batch import SamplerArrays, TokenPrograms, token_programs
from orca_jax.iteration.message import ADJUSTED, CONSTRAINED, SAMPLED, neutral_sampling
from orca_jax.sharding.device_group import DeviceGroup, device_name

# The features that a batch's rows request, as fields of message.SAMPLING.
FEATURES: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "temperature 1": {"temperature": 1},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "top_k, top_p and min_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
    "penalties or biases": {"flags": ADJUSTED, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "a grammar, or other constraints": {"flags": CONSTRAINED},
    "greedy, its logprobs": {"logprobs": 0},
    "greedy, 5 logprobs": {"logprobs": 5},
    "greedy, 20 logprobs": {"logprobs": 20},
    "temperature, its logprobs": {"temperature": 0.8, "logprobs": 0},
    "temperature 1, its logprobs": {"temperature": 1, "logprobs": 0},
    "temperature 1, 5 logprobs": {"temperature": 1, "logprobs": 5},
    "temperature 1, 20 logprobs": {"temperature": 1, "logprobs": 20},
    "all of it": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.05,
        "flags": ADJUSTED | CONSTRAINED,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "logprobs": 5,
    },
}


class Bench:
    """A chooser with logits of one size, in JAX unless `native`, and the arguments for each feature."""

    def __init__(self, n_rows: int, vocab_size: int, *, native: bool) -> None:
        group = DeviceGroup((jax.devices()[0],))
        self.chooser = TokenChooser(vocab_size, n_rows, group.place(), native=native)
        normal = jax.random.normal(jax.random.key(n_rows), (n_rows, vocab_size), jnp.float32)
        self.logits = jax.block_until_ready(jax.device_put(3 * normal, group.place()))
        self.words = np.full((n_rows, n_words(vocab_size)), -1, np.int32)
        self._largest = jax.jit(lambda logits: logits.max(axis=-1))
        self._n_rows = n_rows

    def floor(self) -> object:
        """Read the logits once."""
        return self._largest(self.logits)

    def feature(self, fields: dict[str, float]) -> Callable[[], object]:
        """One iteration's sampling if every row asks for this feature."""
        sampling = neutral_sampling(self._n_rows)
        for name, value in fields.items():
            sampling[name] = value
        programs = token_programs(sampling)
        rows = jax.device_put(_rows(sampling), self.logits.sharding)
        words = self.words if programs.allow else None
        return lambda: self.chooser.choose(self.logits, rows, programs, words)


def _rows(sampling: np.ndarray) -> np.ndarray:
    """The buffer's SamplerArrays [n, R] for these rows in the middle of their outputs."""
    n = len(sampling)
    real = {name: sampling[name].view(np.int32) for name in ("temperature", "top_p", "min_p")}
    return np.stack(
        SamplerArrays(
            row=np.arange(n, dtype=np.int32),
            known=np.full(n, SAMPLED, np.int32),
            top_k=sampling["top_k"],
            token_index=np.full(n, 7, np.int32),
            seed_low=np.arange(n, dtype=np.int32),
            seed_high=np.zeros(n, np.int32),
            adjusted=np.where(sampling["flags"] & ADJUSTED, 2, 0).astype(np.int32),
            n_top=sampling["logprobs"].astype(np.int32),
            repetition=np.ascontiguousarray(sampling["repetition_penalty"]).view(np.int32),
            frequency=np.ascontiguousarray(sampling["frequency_penalty"]).view(np.int32),
            presence=np.ascontiguousarray(sampling["presence_penalty"]).view(np.int32),
            **real,
        )
    )


def measure(n_rows: int, vocab_size: int, repeat: int, features: Sequence[str]) -> list[dict[str, Any]]:
    """Seconds of each of these FEATURES and of the floor, medians and least."""
    device = jax.devices()[0]
    benches = {"": Bench(n_rows, vocab_size, native=True)}
    if has_native_choice(device):
        benches["jax_"] = Bench(n_rows, vocab_size, native=False)
    runs: dict[tuple[str, str], Callable[[], object]] = {("", "floor"): benches[""].floor}
    for name in features:
        for kind, bench in benches.items():
            runs[kind, name] = bench.feature(FEATURES[name])
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for turn in range(repeat + 2):
        for key, run in [*runs.items()][:: -1 if turn % 2 else 1]:
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[key].append(time.perf_counter() - start)
    results: list[dict[str, Any]] = []
    floor = times["", "floor"][2:]
    for name in features:
        sampling = neutral_sampling(1)
        for field, value in FEATURES[name].items():
            sampling[field] = value
        result = {
            "rows": n_rows,
            "vocab": vocab_size,
            "feature": name,
            "programs": _program_names(token_programs(sampling)),
            "floor_seconds": statistics.median(floor),
            "least_floor_seconds": min(floor),
        }
        for kind in benches:
            taken = times[kind, name][2:]
            result |= {f"{kind}seconds": statistics.median(taken), f"least_{kind}seconds": min(taken)}
        result["over_floor"] = result["seconds"] / result["floor_seconds"]
        results.append(result)
    return results


def _program_names(programs: TokenPrograms) -> str:
    parts = [name for name in ("adjust", "allow") if getattr(programs, name)]
    return " + ".join([*parts, programs.sampler, *(["logprobs"] if programs.logprobs else [])])


def _table(results: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="sampling the next tokens, median")
    columns = ("rows", "vocabulary", "feature", "programs", "microseconds", "in JAX", "floor", "over floor")
    for column in columns:
        table.add_column(column, justify="left" if column in ("feature", "programs") else "right")
    for one in results:
        table.add_row(
            str(one["rows"]),
            f"{one['vocab']:,}",
            one["feature"],
            one["programs"],
            f"{1e6 * one['seconds']:,.0f}",
            f"{1e6 * one.get('jax_seconds', one['seconds']):,.0f}",
            f"{1e6 * one['floor_seconds']:,.0f}",
            f"{one['over_floor']:.1f}",
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="the time to sample the next tokens")
    parser.add_argument("--rows", default="1,32,128", help="rows, comma-separated")
    parser.add_argument("--vocab", default="50257,151936", help="sizes of vocabularies")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--only", default="", help="features whose names begin so, comma-separated")
    args = parser.parse_args(argv)
    features = [name for name in FEATURES if name.startswith(tuple(args.only.split(",")))]
    if jax.devices()[0].platform == "cpu":
        keep_large_buffers()  # as an engine does
    sizes = [(int(r), int(v)) for v in args.vocab.split(",") for r in args.rows.split(",")]
    results: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("sampling", total=len(sizes))
        for n_rows, vocab_size in sizes:
            results += measure(n_rows, vocab_size, args.repeat, features)
            progress.advance(task)
    console = Console(width=120)
    console.print(_table(results))
    report = {"device": device_name(jax.devices()[0]), "jax": jax.__version__, "sampler": results}
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
