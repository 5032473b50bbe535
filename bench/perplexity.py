"""The perplexity of a text for several models in turn, such as one model with weights in several forms.

    python -m bench.perplexity model.gguf path/to/dequantised [--text FILE] [--window 512] [--tokens 16384]

The text, by default 30 kB that the demo model was not trained on, is cut into windows, each scored from its
beginning (after the start token, where the tokenizer adds one). All models get the ids of the first one's
tokenizer. The perplexity is exp of the mean negative log-probability of all tokens but each window's first.
Shows the ratio to the last model's, which should be the most exact; the last line is JSON.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from orca_jax import LLM
from orca_jax.errors import OrcaError

TEXT = Path(__file__).parents[1] / "tests/data/held_out.txt"


def windows(ids: Sequence[int], first: Sequence[int], length: int) -> list[list[int]]:
    """Cut ids into windows of `length` tokens that begin with `first`; the rest at the end is dropped."""
    step = length - len(first)
    return [[*first, *ids[start : start + step]] for start in range(0, len(ids) - step + 1, step)]


def perplexity(scores: Sequence[Sequence[float]]) -> float:
    """exp of the mean negative log-probability."""
    return math.exp(-sum(map(sum, scores)) / sum(map(len, scores)))


def main(argv: Sequence[str] | None = None) -> int:
    """Score the text with each model."""
    parser = argparse.ArgumentParser(prog="python -m bench.perplexity", description="Perplexity of a text")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="each is compared with the last")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--window", type=int, default=512, help="tokens (512)")
    parser.add_argument("--tokens", type=int, default=16384, help="at most, of the text (16384)")
    flags = parser.parse_args(argv)
    if flags.window < 8:
        parser.error("--window must be at least 8")
    text = flags.text.read_text()
    found: dict[str, float] = {}
    pieces: list[list[int]] = []
    for name in flags.models:
        with LLM(name, compile_ahead=False) as llm:
            if not pieces:
                tokenizer = llm.tokenizer
                if tokenizer is None:
                    raise SystemExit(f"{name} has no tokenizer")
                first = tokenizer.encode("")
                ids = tokenizer.encode(text, add_special_tokens=False)[: flags.tokens]
                pieces = windows(ids, first, flags.window)
                if not pieces:
                    raise SystemExit(
                        f"the text has {len(ids)} tokens, which fill no window of {flags.window}"
                    )
            found[name] = perplexity(llm.score(pieces))
    base = found[flags.models[-1]]
    table = Table("model", "perplexity", "over the last")
    for name, value in found.items():
        table.add_row(name, f"{value:.4f}", f"{value / base:.5f}")
    Console(width=120).print(table)
    record = {
        "benchmark": "perplexity",
        "text": flags.text.name,
        "window": flags.window,
        "windows": len(pieces),
    }
    print(json.dumps(record | {"perplexity": found}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OrcaError as error:
        raise SystemExit(str(error)) from error
