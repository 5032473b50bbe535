"""The perplexity of a text for several models in turn, such as one model with weights in several forms.

    python -m bench.perplexity model.gguf path/to/dequantised [--text FILE] [--window 512] [--tokens 16384]
        [--peer llama.cpp=PYTHON]

The text, by default 30 kB that the demo model was not trained on, is cut into windows, each scored from its
beginning (after the start token, where the tokenizer adds one). All models get the ids of the first one's
tokenizer. The perplexity is exp of the mean negative log-probability of all tokens but each window's first.
Shows the ratio to the last model's, which should be the most exact; the last line is JSON.

With `--peer` llama.cpp scores the same windows with each model that is a GGUF file: PYTHON is that of an
environment with the package xllamacpp. Its server has no scores of prompts, so each token is one request that
the token is forced upon by a bias, for which the server returns the probability without the bias.
"""

import argparse
import json
import math
import os
import sys
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.peers.engine_process import EngineProcess
from orca_jax import LLM
from orca_jax.errors import OrcaError
from orca_jax.gguf_file import SUFFIX

PEER = "llama.cpp"
TEXT = Path(__file__).parents[1] / "tests/data/held_out.txt"


def windows(ids: Sequence[int], first: Sequence[int], length: int) -> list[list[int]]:
    """Cut ids into windows of `length` tokens that begin with `first`; the rest at the end is dropped."""
    step = length - len(first)
    return [[*first, *ids[start : start + step]] for start in range(0, len(ids) - step + 1, step)]


def perplexity(scores: Sequence[Sequence[float]]) -> float:
    """exp of the mean negative log-probability."""
    return math.exp(-sum(map(sum, scores)) / sum(map(len, scores)))


def scores_of_llama_cpp(python: str, model: str, pieces: Sequence[list[int]]) -> list[list[float]]:
    """The log-probabilities of each piece's tokens after the first, by llama.cpp's server."""
    slots = min(4, len(pieces))
    flags = {
        "checkpoint": model,
        "cores": len(os.sched_getaffinity(0)),
        "max_batch_size": slots,
        "longest": len(pieces[0]) + 1,
        # A slot keeps the piece so far, whose windows would otherwise forget their first keys.
        "arguments": {"cache_prompt": True, "swa_full": True},
    }
    with EngineProcess(PEER, python, "bench.peers.llama_cpp_child") as child:
        child.start(flags)
        url = f"{child.about['url']}/completion"

        def scored_in(slot: int) -> list[list[float]]:
            return [
                [_llama_cpp_score(url, piece[:n], piece[n], slot) for n in range(1, len(piece))]
                for piece in pieces[slot::slots]
            ]

        with ThreadPoolExecutor(slots) as threads:
            return [scores for of_slot in threads.map(scored_in, range(slots)) for scores in of_slot]


def _llama_cpp_score(url: str, prompt: list[int], token: int, slot: int) -> float:
    """The log-probability of a token after a prompt."""
    body = {
        "prompt": prompt,
        "id_slot": slot,
        "n_predict": 1,
        "n_probs": 1,
        "temperature": 0,
        "logit_bias": [[token, 1000.0]],
    }
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        (found,) = json.load(answer)["completion_probabilities"]
    if found["id"] != token:
        raise SystemExit(f"{PEER} chose token {found['id']} against the bias of {token}")
    return found["logprob"]


def main(argv: Sequence[str] | None = None) -> int:
    """Score the text with each model."""
    parser = argparse.ArgumentParser(prog="python -m bench.perplexity", description="Perplexity of a text")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="each is compared with the last")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--window", type=int, default=512, help="tokens (512)")
    parser.add_argument("--tokens", type=int, default=16384, help="at most, of the text (16384)")
    parser.add_argument("--peer", metavar=f"{PEER}=PYTHON", help="scores the GGUF files among them too")
    flags = parser.parse_args(argv)
    if flags.window < 8:
        parser.error("--window must be at least 8")
    if flags.peer is not None and not flags.peer.startswith(f"{PEER}="):
        parser.error(f"--peer is {flags.peer}; it must be {PEER}=PYTHON")
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
        if flags.peer is not None and name.endswith(SUFFIX):
            scores = scores_of_llama_cpp(flags.peer.partition("=")[2], name, pieces)
            found[f"{PEER}: {name}"] = perplexity(scores)
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
