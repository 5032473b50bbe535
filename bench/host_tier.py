"""Conversations whose users pause while others fill the device: first tokens with a host tier and without.

    python -m bench.host_tier [--model M | --hybrid] [--conversations 6] [--turns 8] [--beginning 1000]
        [--message 80] [--answer 48] [--n-slots 4096] [--disk]

Without M the model is a Llama of four layers of 512 with random weights, or with --hybrid that of
bench.conversation, most of whose layers are recurrent. All conversations take turns, so
that between two turns of one the others need more slots than there are. Each turn adds a message to all
before it, and asks for an answer. Two engines answer each turn: one with a host tier, one without. Their
answers must be equal. With --disk both are then restarted for one more turn, the first with a disk tier.
The last line is JSON.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.conversation import CONFIG as HYBRID
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


class Conversations:
    """Conversations that take turns."""

    def __init__(self, args: argparse.Namespace, vocab_size: int, seed: int) -> None:
        self._args, self._vocab_size, self._rng = args, vocab_size, random.Random(seed)
        self._prompts = [self._text(args.beginning) for _ in range(args.conversations)]

    def _text(self, n: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(n)]

    def turn(self, engines: Sequence[LLM]) -> list[list[Turn]]:
        """Play a turn of each conversation on all engines; returns each conversation's results."""
        answers = list[list[Turn]]()
        for prompt in self._prompts:
            prompt += self._text(self._args.message)
            answers.append([ask(llm, prompt, self._args.answer) for llm in engines])
            prompt += answers[-1][0].token_ids
        return answers


def row_of(number: int, answers: list[list[Turn]]) -> dict[str, Any]:
    """The figures of a turn."""
    with_it, without = (statistics.median(turn[i].seconds for turn in answers) for i in (0, 1))
    return {
        "turn": number,
        "n_prompt": answers[0][0].n_prompt,
        "n_found": statistics.median_low(turn[0].n_found for turn in answers),
        "n_found_without": statistics.median_low(turn[1].n_found for turn in answers),
        "with_ms": round(with_it * 1e3, 1),
        "without_ms": round(without * 1e3, 1),
        "sooner": round(without / with_it, 2),
        "same_tokens": all(a.token_ids == b.token_ids for a, b in answers),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="first tokens of conversations that pause")
    parser.add_argument("--model", help="a directory or a preset, with random weights (default: see above)")
    parser.add_argument("--hybrid", action="store_true", help="a model with recurrent layers")
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--beginning", type=int, default=1000, help="tokens before the first message")
    parser.add_argument("--message", type=int, default=80, help="tokens of a message")
    parser.add_argument("--answer", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--n-slots", type=int, default=4096, help="tokens that the device has room for")
    parser.add_argument("--host-bytes", type=int, default=1 << 30)
    parser.add_argument("--disk", action="store_true", help="also restart with a disk tier, for a last turn")
    args = parser.parse_args(argv)
    sizes: dict[str, Any] = {"load_format": "dummy", "max_batch_size": 4, "n_slots": args.n_slots}
    sizes["max_batch_tokens"] = 512  # few programs to compile
    with tempfile.TemporaryDirectory() as directory:
        model = args.model or directory
        if args.model is None:
            config = json.dumps(HYBRID if args.hybrid else CONFIG)
            Path(directory, "config.json").write_text(config, encoding="utf-8")
        tier: dict[str, Any] = {"kv_host_bytes": args.host_bytes}
        if args.disk:
            tier["kv_disk"] = Path(directory, "blocks")

        def started() -> list[LLM]:
            engines = [LLM(model, **tier, **sizes), LLM(model, **sizes)]
            warm = Conversations(args, engines[0].service.model.vocab_size, seed=int(time.time()))
            warm.turn(engines)  # compiles
            warm.turn(engines)
            return engines

        engines = started()
        asked = Conversations(args, engines[0].service.model.vocab_size, seed=1)
        rows = [row_of(number, asked.turn(engines)) for number in range(1, args.turns + 1)]
        host = engines[0].service.scheduler.kv.host
        assert host is not None
        counts = {"stored": host.n_stored, "read": host.n_read, "evicted": host.n_evicted}
        for llm in engines:
            llm.close()
        if args.disk:
            engines = started()
            rows.append(row_of(args.turns + 1, asked.turn(engines)))
            for llm in engines:
                llm.close()
    table = Table(title=f"first token, ms: median of {args.conversations} conversations")
    for column in ("turn", "prompt", "found", "found without", "with the tier", "without", "times sooner"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(str(row[name]) for name in row if name != "same_tokens"))
    Console().print(table)
    later = statistics.median(row["sooner"] for row in rows[1 : args.turns])
    figures = {"benchmark": "host tier", "sooner_after_the_first": later, "blocks": counts, "turns": rows}
    if args.disk:
        figures["sooner_after_a_restart"] = rows[-1]["sooner"]
    print(json.dumps(figures))
    return 0 if all(row["same_tokens"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
