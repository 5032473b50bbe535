"""Conversations whose users pause while others fill the device: first tokens with a host tier and without.

    python -m bench.host_tier [--model M] [--conversations 6] [--turns 8] [--beginning 1000] [--message 80]
        [--answer 48] [--n-slots 4096]

Without M the model is a Llama of four layers of 512 with random weights. All conversations take turns, so
that between two turns of one the others need more slots than there are. Each turn adds a message to all before
it, and asks for an answer. Two engines answer each turn: one with a host tier, one without. Their answers must
be equal. The last line is JSON.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.conversation import Turn, ask
from orca_jax import LLM

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


def rounds(
    engines: Sequence[LLM], args: argparse.Namespace, n_turns: int, seed: int
) -> list[list[list[Turn]]]:
    """Play all conversations on all engines; returns each turn's results of each conversation."""
    rng, vocab_size = random.Random(seed), engines[0].service.model.vocab_size

    def text(n: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(n)]

    prompts = [text(args.beginning) for _ in range(args.conversations)]
    turns = list[list[list[Turn]]]()
    for _ in range(n_turns):
        answers = list[list[Turn]]()
        for prompt in prompts:
            prompt += text(args.message)
            answers.append([ask(llm, prompt, args.answer) for llm in engines])
            prompt += answers[-1][0].token_ids
        turns.append(answers)
    return turns


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="first tokens of conversations that pause")
    parser.add_argument("--model", help="a directory or a preset, with random weights (default: see above)")
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--beginning", type=int, default=1000, help="tokens before the first message")
    parser.add_argument("--message", type=int, default=80, help="tokens of a message")
    parser.add_argument("--answer", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--n-slots", type=int, default=4096, help="tokens that the device has room for")
    parser.add_argument("--host-bytes", type=int, default=1 << 30)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        if args.model is None:
            Path(directory, "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        sizes: dict[str, Any] = {"load_format": "dummy", "max_batch_size": 4, "n_slots": args.n_slots}
        sizes["max_batch_tokens"] = 512  # few programs to compile
        engines = [
            LLM(args.model or directory, kv_host_bytes=n_bytes, **sizes) for n_bytes in (args.host_bytes, 0)
        ]
    rounds(engines, args, 2, seed=0)  # compiles
    turns = rounds(engines, args, args.turns, seed=1)
    tier = engines[0].service.scheduler.kv.host
    assert tier is not None
    counts = {"stored": tier.n_stored, "read": tier.n_read, "evicted": tier.n_evicted}
    for llm in engines:
        llm.close()
    table = Table(title=f"first token, ms: median of {args.conversations} conversations")
    for column in ("turn", "prompt", "found", "found without", "with the tier", "without", "times sooner"):
        table.add_column(column, justify="right")
    rows = list[dict[str, Any]]()
    for number, answers in enumerate(turns, 1):
        with_it, without = (statistics.median(turn[i].seconds for turn in answers) for i in (0, 1))
        row = {
            "turn": number,
            "n_prompt": answers[0][0].n_prompt,
            "n_found": statistics.median_low(turn[0].n_found for turn in answers),
            "n_found_without": statistics.median_low(turn[1].n_found for turn in answers),
            "with_ms": round(with_it * 1e3, 1),
            "without_ms": round(without * 1e3, 1),
            "sooner": round(without / with_it, 2),
            "same_tokens": all(a.token_ids == b.token_ids for a, b in answers),
        }
        rows.append(row)
        table.add_row(*(str(row[name]) for name in row if name != "same_tokens"))
    Console().print(table)
    later = statistics.median(row["sooner"] for row in rows[1:])
    print(
        json.dumps(
            {"benchmark": "host tier", "sooner_after_the_first": later, "blocks": counts, "turns": rows}
        )
    )
    return 0 if all(row["same_tokens"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
