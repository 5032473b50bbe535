"""Reader of the golden beam searches: what generate() of Hugging Face transformers finds with several beams.

scripts/golden/beams.py makes them. A model's `beams.npz` holds, for S settings and a few prompts P:

    eos_token_ids    int32 [n]              what ends a text
    max_output       int32                  the longest output, in tokens
    n_beams          int32 [S]              as many sequences are returned
    length_penalty float32 [S]
    early_stopping   int32 [S]              0 false, 1 true, 2 "never"
    prompt_tokens    int32 [sum]            prompts (with an encoder: the decoder's), one after another
    prompt_lengths   int32 [P]
    encoder_tokens   int32 [sum]            with an encoder: its inputs, one after another
    encoder_lengths  int32 [P]
    tokens           int32 [S, P, 4, max_output]   best first, with the token that ends it; -1 past the end
    scores         float32 [S, P, 4]        sum of log-probabilities / n tokens ** length_penalty; or nan
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.places import DATA

DIRECTORY = DATA / "golden"
NAMES = tuple(sorted(path.parent.name for path in DIRECTORY.glob("*/beams.npz")))
EARLY_STOPPING: tuple[bool | str, ...] = (False, True, "never")


@dataclass(frozen=True)
class Search:
    """One beam search and what it finds, best first."""

    prompt: tuple[int, ...]
    encoder_ids: tuple[int, ...]
    n_beams: int
    length_penalty: float
    early_stopping: bool | str
    tokens: tuple[tuple[int, ...], ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class GoldenBeams:
    """One model's golden searches."""

    directory: Path
    eos_token_ids: tuple[int, ...]
    max_output: int
    searches: tuple[Search, ...]


def load_beams(name: str) -> GoldenBeams:
    """The golden searches of `name`, one of NAMES."""
    directory = DIRECTORY / name
    with np.load(directory / "beams.npz") as arrays:
        prompts = _split(arrays["prompt_tokens"], arrays["prompt_lengths"])
        encoder_ids = [()] * len(prompts)
        if "encoder_tokens" in arrays:
            encoder_ids = _split(arrays["encoder_tokens"], arrays["encoder_lengths"])
        settings = [arrays[key].tolist() for key in ("n_beams", "length_penalty", "early_stopping")]
        searches = [
            Search(
                prompt=prompts[p],
                encoder_ids=encoder_ids[p],
                n_beams=n_beams,
                length_penalty=round(length_penalty, 4),
                early_stopping=EARLY_STOPPING[early_stopping],
                tokens=tuple(tuple(row[row >= 0].tolist()) for row in arrays["tokens"][s, p, :n_beams]),
                scores=tuple(arrays["scores"][s, p, :n_beams].tolist()),
            )
            for s, (n_beams, length_penalty, early_stopping) in enumerate(zip(*settings, strict=True))
            for p in range(len(prompts))
        ]
        return GoldenBeams(
            directory=directory,
            eos_token_ids=tuple(arrays["eos_token_ids"].tolist()),
            max_output=int(arrays["max_output"]),
            searches=tuple(searches),
        )


def _split(tokens: np.ndarray, lengths: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for row in np.split(tokens, np.cumsum(lengths)[:-1])]
