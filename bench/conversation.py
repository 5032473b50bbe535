"""The turns of a conversation on a hybrid: how much sooner the first token comes with snapshots of states.

    python -m bench.conversation [--model M] [--turns 8] [--beginning 1000] [--message 80] [--answer 48]

Without M the model is of Qwen 3.5's kind, four layers of 512 with random weights, of which the last attends.
A conversation begins with a text of so many tokens. Each turn adds a message to all before it, and asks for
an answer. Two engines take turns: one with the prefix cache and its snapshots, one without. Their answers
must be equal. The last line is JSON.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from orca_jax import LLM, SamplingParams

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
}


class Turn(NamedTuple):
    """One turn: its prompt's tokens, those found, seconds to the first token, and the answer."""

    n_prompt: int
    n_found: int
    seconds: float
    token_ids: list[int]


def ask(llm: LLM, prompt: Sequence[int], n_answer: int) -> Turn:
    """Run one turn."""
    params = SamplingParams(max_tokens=n_answer, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    generation = llm.stream(prompt, params)
    next(generation)
    seconds = time.perf_counter() - started
    result = generation.result()
    return Turn(len(prompt), result.n_cached, seconds, result.token_ids)


def conversation(engines: Sequence[LLM], args: argparse.Namespace, seed: int) -> list[list[Turn]]:
    """Play a conversation on all engines, turn by turn; returns each turn's results."""
    rng, vocab_size = random.Random(seed), engines[0].service.model.vocab_size

    def text(n: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(n)]

    prompt, turns = text(args.beginning), list[list[Turn]]()
    for _ in range(args.turns):
        prompt += text(args.message)
        turns.append([ask(llm, prompt, args.answer) for llm in engines])
        prompt += turns[-1][0].token_ids
    return turns


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="first tokens of a conversation's turns on a hybrid")
    parser.add_argument("--model", help="a directory or a preset, with random weights (default: see above)")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--beginning", type=int, default=1000, help="tokens before the first message")
    parser.add_argument("--message", type=int, default=80, help="tokens of a message")
    parser.add_argument("--answer", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        if args.model is None:
            Path(directory, "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        sizes: dict[str, Any] = {"load_format": "dummy", "max_batch_size": 4, "n_slots": 16384}
        sizes["max_batch_tokens"] = 512  # few programs to compile
        engines = [LLM(args.model or directory, prefix_caching=on, **sizes) for on in (True, False)]
    runs = [conversation(engines, args, seed) for seed in range(args.runs + 1)][1:]  # the first warms up
    for llm in engines:
        llm.close()
    table = Table(title=f"first token, ms: median of {args.runs} conversations")
    for column in ("turn", "prompt", "found", "with snapshots", "without", "times sooner"):
        table.add_column(column, justify="right")
    rows = list[dict[str, Any]]()
    for number, turns in enumerate(zip(*runs, strict=True), 1):
        with_them, without = (statistics.median(turn[i].seconds for turn in turns) for i in (0, 1))
        (first, second), same = turns[0], all(a.token_ids == b.token_ids for a, b in turns)
        row = {
            "turn": number,
            "n_prompt": first.n_prompt,
            "n_found": first.n_found,
            "with_ms": round(with_them * 1e3, 1),
            "without_ms": round(without * 1e3, 1),
            "sooner": round(without / with_them, 2),
            "same_tokens": same,
        }
        assert second.n_found == 0
        rows.append(row)
        table.add_row(*(str(row[name]) for name in row if name != "same_tokens"))
    Console().print(table)
    later = statistics.median(row["sooner"] for row in rows[1:])
    print(json.dumps({"benchmark": "conversation", "sooner_after_the_first": later, "turns": rows}))
    return 0 if all(row["same_tokens"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
