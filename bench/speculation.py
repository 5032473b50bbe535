"""Speculative decoding on outputs that repeat their prompt: tokens per second, and how many drafts are right.

    python -m bench.speculation MODEL [--drafters off ngram] [--tokens 4] [--streams 1 4] [--runs 3]

MODEL is a checkpoint with a chat template, such as SmolLM2-135M-Instruct. It is asked to repeat passages,
greedily, so many at a time. Each drafter has an engine, and they take turns. The outputs must be equal. The
last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from orca_jax import LLM, SamplingParams

PASSAGES = (
    "The Amazon rainforest covers most of the Amazon basin of South America. The basin has 7,000,000 square "
    "kilometres, of which 5,500,000 are covered by the rainforest. Most of the forest is in Brazil, with 60 "
    "percent, followed by Peru with 13 percent and Colombia with 10 percent.",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n",
    "The quarterly meeting took place on Tuesday. Mrs. Garcia opened it at nine and greeted the new members. "
    "Mr. Chen reported that sales of garden tools had risen by four percent. The board decided to open a "
    "second shop in Lyon next spring.",
    "Photosynthesis is a system of processes by which organisms, such as most plants, algae and bacteria, "
    "convert light energy, typically from sunlight, into the chemical energy necessary for their metabolism.",
)


class Run(NamedTuple):
    """One run of all passages."""

    token_ids: list[list[int]]
    rate: float  # output tokens per second
    n_drafted: int
    n_accepted: int


def run(llm: LLM, streams: int, n_output: int) -> Run:
    """Ask for all passages, `streams` at a time."""
    params = SamplingParams(max_tokens=n_output, temperature=0.0)
    made = llm.service.speculation
    before = (0, 0) if made is None else (made.n_drafted, made.n_accepted)
    outputs = list[list[int]]()
    started = time.perf_counter()
    for i in range(0, len(PASSAGES), streams):
        asked = [f"Repeat the following text exactly:\n\n{passage}" for passage in PASSAGES[i : i + streams]]
        conversations = [[{"role": "user", "content": text}] for text in asked]
        outputs += [result.token_ids for result in llm.chat(conversations, params)]
    rate = sum(map(len, outputs)) / (time.perf_counter() - started)
    after = (0, 0) if made is None else (made.n_drafted, made.n_accepted)
    return Run(outputs, rate, after[0] - before[0], after[1] - before[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="tokens per second with and without drafts")
    parser.add_argument("model")
    parser.add_argument("--drafters", nargs="+", default=["off", "ngram"])
    parser.add_argument("--tokens", type=int, default=4, help="drafts of a request in an iteration")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--output", type=int, default=80, help="output tokens of a passage")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args(argv)
    sizes: dict[str, Any] = {"n_slots": 8192, "prefix_caching": False}
    engines = {
        name: LLM(args.model, speculative=name, speculative_tokens=args.tokens, **sizes)
        for name in args.drafters
    }
    table = Table(title=f"{args.model}: tokens/s, median of {args.runs} (least and most)")
    for column in ("streams", "drafter", "tokens/s", "over the first", "right drafts"):
        table.add_column(column, justify="right")
    cases = list[dict[str, Any]]()
    for streams in args.streams:
        runs: dict[str, list[Run]] = {name: [] for name in engines}
        for i in range(args.runs + 1):
            for name, llm in engines.items():
                one = run(llm, streams, args.output)
                if i:  # the first compiles
                    runs[name].append(one)
        first = runs[args.drafters[0]]
        for name, each in runs.items():
            rates = [one.rate for one in each]
            rate = statistics.median(rates)
            case = {
                "streams": streams,
                "drafter": name,
                "tokens_per_second": round(rate, 1),
                "over_first": round(rate / statistics.median(one.rate for one in first), 2),
                "right": round(each[-1].n_accepted / max(1, each[-1].n_drafted), 2),
                "same_tokens": each[-1].token_ids == first[-1].token_ids,
            }
            cases.append(case)
            spread = f"{rate:.1f} ({min(rates):.1f} to {max(rates):.1f})"
            table.add_row(str(streams), name, spread, str(case["over_first"]), str(case["right"]))
    for llm in engines.values():
        llm.close()
    Console().print(table)
    print(json.dumps({"benchmark": "speculation", "tokens": args.tokens, "cases": cases}))
    return 0 if all(case["same_tokens"] for case in cases) else 1


if __name__ == "__main__":
    raise SystemExit(main())
