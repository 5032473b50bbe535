"""Reader of the golden files: small models and what Hugging Face transformers computes on them in float32.

scripts/golden/decoders.py makes them. A model's `golden.npz` holds, for 64 prompts of 1 to `n_positions - 1`
tokens:

    prompt_tokens  int32 [sum of lengths]   prompts, one after another
    prompt_lengths int32 [64]
    outputs        int32 [64, 16]           greedy tokens, -1 past the end (the model's length, or 16)
    gaps         float32 [64, 16]           best logit less the second best, 0 past the end
    logits_rows    int32 [3]                prompts whose logits are kept,
    logits       float32 [sum of their lengths, vocab_size]   at every position of theirs
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.places import DATA

DIRECTORY = DATA / "golden"
NAMES = tuple(sorted(path.parent.name for path in DIRECTORY.glob("*/golden.npz")))
MARGIN = 1e-4  # where the two best logits are closer, rounding may choose


@dataclass(frozen=True)
class Golden:
    """One model's golden files. The greedy tokens run on past any end-of-sequence token (ignore_eos)."""

    name: str
    directory: Path
    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    gaps: tuple[tuple[float, ...], ...]
    logits: dict[int, np.ndarray]  # prompt -> [n tokens, vocab_size] float32

    def sure(self, row: int) -> tuple[int, ...]:
        """The tokens of `outputs[row]` before the first whose choice is within the margin.

        What follows a doubtful token depends on it, so nothing after it is compared.
        """
        doubtful = [i for i, gap in enumerate(self.gaps[row]) if gap < MARGIN]
        return self.outputs[row][: doubtful[0]] if doubtful else self.outputs[row]


def load_golden(name: str) -> Golden:
    """The golden files of `name`, one of NAMES."""
    directory = DIRECTORY / name
    with np.load(directory / "golden.npz") as arrays:
        starts = np.cumsum(arrays["prompt_lengths"])[:-1]
        prompts = [tuple(row.tolist()) for row in np.split(arrays["prompt_tokens"], starts)]
        real = arrays["outputs"] >= 0
        outputs = [tuple(row[ok].tolist()) for row, ok in zip(arrays["outputs"], real, strict=True)]
        gaps = [tuple(row[ok].tolist()) for row, ok in zip(arrays["gaps"], real, strict=True)]
        rows = arrays["logits_rows"].tolist()
        logits = np.split(arrays["logits"], np.cumsum([len(prompts[row]) for row in rows])[:-1])
    return Golden(
        name=name,
        directory=directory,
        prompts=tuple(prompts),
        outputs=tuple(outputs),
        gaps=tuple(gaps),
        logits=dict(zip(rows, logits, strict=True)),
    )
