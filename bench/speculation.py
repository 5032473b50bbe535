"""Speculative decoding on outputs that repeat their prompt: tokens per second, and how many drafts are right.

    python -m bench.speculation MODEL [--drafters off ngram suffix] [--tokens 4] [--streams 1 4 32] [--runs 3]

MODEL is a checkpoint with a chat template, such as SmolLM2-135M-Instruct. It is asked 20 times to repeat or
edit a passage, greedily, so many at a time; with more streams some are asked again. Each drafter has its own
engine, and they take turns; the first is what the others are compared with. `suffix` begins each run without
earlier outputs, and `suffix-again` with those of the runs before. `told:0.8` is told each token of the output
with a probability of 0.8 and else a wrong one, for the curves of the papers. Beside it stand the gain that
the engine's costs promise for the whole run, prompts included, and the measured gain's fraction of that
(target: 0.85 with four drafts). The outputs must be equal. The last line is JSON. `--keep FILE` keeps the
prompts and the outputs for `bench.peers.vllm_speculation`.

`--widened 16` serves a GPT-2 with feed-forward layers 16 times as wide, whose new units give 0: a slower
model of the same outputs, for which MODEL is a draft model that is nearly always right (`--drafters off
draft:MODEL`).
"""

import argparse
import json
import math
import random
import shutil
import statistics
import tempfile
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.safetensors_reader import StoredTensor, read_header
from orca_jax.checkpoint.safetensors_writer import Tensor, write_files
from orca_jax.config import ServingConfig
from orca_jax.iteration.shape import serving_buckets
from orca_jax.model_files.weight_files import SINGLE
from orca_jax.request.chat.chat_prompts import ChatPrompts
from orca_jax.request.chat.template_files import load_chat_template

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
TASKS = (
    "Repeat the following text exactly:",
    "Correct the mistakes in this text, and answer with the whole text:",
    "Answer with the first sentence or line of this text, word by word:",
    "Write this text in capital letters:",
    "Write this text twice, without any changes:",
)
QUESTIONS = [f"{task}\n\n{passage}" for task in TASKS for passage in PASSAGES]

Outputs = Mapping[tuple[int, ...], Sequence[int]]  # by prompt


class Told:
    """A drafter that is told each token of the output with a probability, and else drafts another one."""

    def __init__(self, output_ids: Sequence[int], right: float, vocab_size: int) -> None:
        self._output_ids = output_ids
        self._right = right
        self._vocab_size = vocab_size
        self._random = random.Random(len(output_ids))

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        following = self._output_ids[len(output_ids) :][:n]
        return [(one + (self._random.random() >= self._right)) % self._vocab_size for one in following]


class Run(NamedTuple):
    """One run of all prompts."""

    outputs: Outputs
    rate: float  # output tokens per second
    n_drafted: int
    n_accepted: int


class Drafting:
    """An engine with the drafter of a name on the command line."""

    def __init__(self, model: str, name: str, n_tokens: int) -> None:
        self.right = float(name.removeprefix("told:")) if name.startswith("told:") else None
        self._remembers = name.endswith("-again")
        drafter = "ngram" if self.right is not None else name.removesuffix("-again")
        sizes: dict[str, Any] = {"n_slots": 16384, "prefix_caching": False}
        self.llm = LLM(model, speculative=drafter, speculative_tokens=n_tokens, **sizes)
        self._n_runs = 0

    def tell(self, outputs: Outputs) -> None:
        """Let a drafter that is told know the outputs."""
        made, right = self.llm.service.speculation, self.right
        if made is not None and right is not None:
            size = made.vocab_size
            made.make = lambda prompt_ids, _: Told(outputs[tuple(prompt_ids)], right, size)

    def run(self, prompts: Sequence[Sequence[int]], streams: int, n_output: int) -> Run:
        """Continue all prompts, `streams` at a time."""
        self._n_runs += 1
        salt = "again" if self._remembers else str(self._n_runs)
        params = SamplingParams(max_tokens=n_output, temperature=0.0)
        before = self._counts()
        outputs = dict[tuple[int, ...], Sequence[int]]()
        n_tokens = 0
        asked = list(islice(cycle(prompts), max(len(prompts), streams)))
        started = time.perf_counter()
        for i in range(0, len(asked), streams):
            some = asked[i : i + streams]
            results = self.llm.generate(some, params, cache_salt=salt)
            for prompt, result in zip(some, results, strict=True):
                outputs[tuple(prompt)] = result.token_ids
                n_tokens += len(result.token_ids)
        rate = n_tokens / (time.perf_counter() - started)
        after = self._counts()
        return Run(outputs, rate, after[0] - before[0], after[1] - before[1])

    def _counts(self) -> tuple[int, int]:
        made = self.llm.service.speculation
        return (0, 0) if made is None else (made.n_drafted, made.n_accepted)


def widened(directory: Path, n: int, into: Path) -> Path:
    """Write a GPT-2 that computes the same with feed-forward layers `n` times as wide."""

    def read(stored: StoredTensor) -> np.ndarray:
        count = math.prod(stored.shape)
        values = np.fromfile(stored.file, stored.element, count=count, offset=stored.offset)
        values = values.reshape(stored.shape)
        if "mlp.c_fc" in stored.name:  # [inputs, outputs], and its bias
            return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, (n - 1) * values.shape[-1])])
        if stored.name.endswith("mlp.c_proj.weight"):
            return np.pad(values, [(0, (n - 1) * values.shape[0]), (0, 0)])
        return values

    config = json.loads((directory / "config.json").read_text("utf-8"))
    config["n_inner"] = n * (config["n_inner"] or 4 * config["n_embd"])
    shutil.copytree(directory, into, ignore=shutil.ignore_patterns("*.safetensors"))
    (into / "config.json").write_text(json.dumps(config), "utf-8")
    header = read_header(directory / SINGLE)
    tensors = map(read, header.values())
    write_files(
        into,
        [
            Tensor(name, values.shape, values.dtype, lambda values=values: values)
            for name, values in zip(header, tensors, strict=True)
        ],
        1 << 40,
    )
    return into


def promised_gain(
    serving: ServingConfig, streams: int, right: float, n_drafts: int, *, n_input: float, n_output: float
) -> float:
    """The gain of so many drafts a request by the engine's costs, with prompts, which drafts do not speed up.

    The requests have `n_input` and `n_output` tokens on average.
    """
    buckets, costs = serving_buckets(serving), serving.iteration_costs

    def cost(n_tokens: int) -> float:
        return costs[bisect_left(buckets, n_tokens)]

    n_drafts = min(n_drafts, serving.max_batch_size // streams - 1)
    n_whole, n_rest = divmod(round(streams * n_input), serving.max_batch_tokens)
    prompts = n_whole * cost(serving.max_batch_tokens) + (cost(n_rest) if n_rest else 0.0)
    n_decoded = n_output - 1  # the prompts' iteration samples the first
    kept = sum(right**i for i in range(n_drafts + 1))
    plain = prompts + n_decoded * cost(streams)
    return plain / (prompts + n_decoded / kept * cost(streams * (n_drafts + 1)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="tokens per second with and without drafts")
    parser.add_argument("model")
    parser.add_argument("--drafters", nargs="+", default=["off", "ngram", "suffix"])
    parser.add_argument("--tokens", type=int, default=4, help="drafts of a request in an iteration")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--output", type=int, default=80, help="output tokens of a prompt")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="a file for the prompts and outputs, in token ids")
    parser.add_argument("--widened", type=int, help="serve a GPT-2 with feed-forward layers so much wider")
    args = parser.parse_args(argv)
    model = args.model
    with tempfile.TemporaryDirectory() as folder:
        if args.widened is not None:
            model = str(widened(Path(model), args.widened, Path(folder) / "widened"))
        engines = {name: Drafting(model, name, args.tokens) for name in args.drafters}
    llm = engines[args.drafters[0]].llm
    prompts = chat_prompts(llm)
    table = Table(title=f"{args.model}: tokens/s, median of {args.runs} (least and most)")
    for column in (
        "streams",
        "drafter",
        "tokens/s",
        "over the first",
        "promised",
        "of promised",
        "right drafts",
    ):
        table.add_column(column, justify="right")
    cases = list[dict[str, Any]]()
    for streams in args.streams:
        runs: dict[str, list[Run]] = {name: [] for name in engines}
        known: Outputs = {}
        for i in range(args.runs + 1):
            for name, engine in engines.items():
                if known:
                    engine.tell(known)
                one = engine.run(prompts, streams, args.output)
                known = known or one.outputs
                if i:  # the first compiles
                    runs[name].append(one)
        if args.keep is not None:
            outputs = [list(known[tuple(prompt)]) for prompt in prompts]
            args.keep.write_text(json.dumps({"prompts": prompts, "outputs": outputs}), "utf-8")
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
                "same_tokens": each[-1].outputs == first[-1].outputs,
            }
            right, serving = engines[name].right, engines[name].llm.serving
            if right is not None:
                gain = promised_gain(
                    serving,
                    streams,
                    right,
                    args.tokens,
                    n_input=statistics.mean(map(len, prompts)),
                    n_output=statistics.mean(map(len, known.values())),
                )
                case["promised"] = round(gain, 2)
                case["of_promised"] = round(case["over_first"] / gain, 2)
            cases.append(case)
            spread = f"{rate:.1f} ({min(rates):.1f} to {max(rates):.1f})"
            shown = (str(case.get(key, "")) for key in ("over_first", "promised", "of_promised", "right"))
            table.add_row(str(streams), name, spread, *shown)
    for engine in engines.values():
        engine.llm.close()
    Console().print(table)
    print(json.dumps({"benchmark": "speculation", "tokens": args.tokens, "cases": cases}))
    return 0 if all(case["same_tokens"] for case in cases) else 1


def chat_prompts(llm: LLM) -> list[list[int]]:
    """The questions as the model's chat template shows them."""
    templates = load_chat_template(llm.text_directory, None)
    prompts = ChatPrompts(
        model=llm.name,
        tokenizer=llm.tokenizer,
        templates=templates,
        directory=llm.text_directory,
        has_encoder=False,
    )
    return prompts.listed([[{"role": "user", "content": question}] for question in QUESTIONS])


if __name__ == "__main__":
    raise SystemExit(main())
