"""The cost of `deterministic`: the same requests on engines without and with it, in turn.

    python -m bench.deterministic [--preset demo] [--requests 48] [--runs 3]

Requests have 8 to 128 random tokens and outputs of 16 to 96, all arrive at once, and half are sampled. They
run at the default `max_batch_tokens` and at the smallest allowed, because each prefill is padded to it.
Programs are compiled beforehand. The last line is JSON.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from bench.device.bare_engine import BareEngine
from orca_jax.config import Sizes
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.presets import PRESETS
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams

LONGEST = 128
MAX_BATCH_SIZE = 16


def requests(model: ModelConfig, n: int) -> list[Request]:
    """The same requests at each call."""
    rng = random.Random(0)
    prompts = [[rng.randrange(model.vocab_size) for _ in range(rng.randint(8, LONGEST))] for _ in range(n)]
    sampling = [
        SamplingParams(max_tokens=rng.randint(16, 96), temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
        for i in range(n)
    ]
    return [
        Request(str(i), tuple(prompt), len(prompt) + one.max_tokens, one, seed=i)
        for i, (prompt, one) in enumerate(zip(prompts, sampling, strict=True))
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="what --deterministic costs")
    parser.add_argument("--preset", default="demo", choices=sorted(PRESETS))
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args(argv)
    model = PRESETS[args.preset]
    n_tokens = sum(request.sampling.max_tokens for request in requests(model, args.requests))
    whole = max(2048, model.n_positions)
    cases = list(dict.fromkeys([(whole, False), (whole, True), (model.n_positions, True)]))
    times: dict[tuple[int, bool], list[float]] = {case: [] for case in cases}
    engines: dict[tuple[int, bool], BareEngine] = {}
    for tokens, deterministic in cases:
        sizes = Sizes(
            max_batch_size=MAX_BATCH_SIZE,
            n_slots=MAX_BATCH_SIZE * model.n_positions,  # for each engine: all are in memory at once
            max_batch_tokens=tokens,
            deterministic=deterministic,
        )
        engines[tokens, deterministic] = BareEngine(model, sizes)
    for run in range(args.runs + 1):  # the first compiles
        for (tokens, deterministic), engine in engines.items():
            start = time.perf_counter()
            engine.run(requests(model, args.requests))
            seconds = time.perf_counter() - start
            if run:
                times[tokens, deterministic].append(seconds)
            which = f"max_batch_tokens {tokens}{', deterministic' * deterministic}"
            rate = f"{n_tokens / seconds:,.0f} tokens/s" if run else f"compiled within {seconds:.1f} s"
            print(f"run {run} of {args.runs}: {which}: {rate}", flush=True)
    plain = times[cases[0]]
    table = Table(title=f"{args.preset}, {args.requests} requests, {n_tokens:,} output tokens")
    for column in ("max_batch_tokens", "deterministic", "tokens/s", "time over plain, pair by pair"):
        table.add_column(column, justify="right")
    rows: list[dict[str, Any]] = []
    for (tokens, deterministic), seconds in times.items():
        ratio = statistics.median(own / other for own, other in zip(seconds, plain, strict=True))
        rate = n_tokens / statistics.median(seconds)
        rows.append(
            {
                "max_batch_tokens": tokens,
                "deterministic": deterministic,
                "seconds": seconds,
                "tokens_per_second": rate,
                "over_plain": ratio,
            }
        )
        table.add_row(f"{tokens:,}", "yes" if deterministic else "no", f"{rate:,.0f}", f"{ratio:.2f}")
    Console().print(table)
    report = {"preset": args.preset, "jax": jax.__version__, "cases": rows}
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
