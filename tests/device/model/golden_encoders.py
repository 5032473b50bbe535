"""Reader of the golden files of models with an encoder, which scripts/golden/encoders.py makes.

A model's `encoder_golden.npz` holds, for 24 inputs of 1 to 60 tokens:

    encoder_tokens  int32 [sum of lengths]   the encoder's inputs, one after another
    encoder_lengths int32 [24]
    outputs         int32 [24, 16]           greedy tokens after decoder_start_token_id, or forced ones
    gaps          float32 [24, 16]           best logit less the second best; 1 where the token is forced
    logits_rows     int32 [3]                inputs of which logits are kept,
    prefixes        int32 [3, 9]             for these tokens of the decoder,
    logits        float32 [3, 9, vocab_size]   at each of them
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.device.model.golden import DIRECTORY, MARGIN

NAMES = tuple(sorted(path.parent.name for path in DIRECTORY.glob("*/encoder_golden.npz")))


@dataclass(frozen=True)
class GoldenEncoder:
    """One model's golden files. The greedy tokens run on past any end-of-sequence token (ignore_eos)."""

    name: str
    directory: Path
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    gaps: tuple[tuple[float, ...], ...]
    logits: tuple[tuple[int, tuple[int, ...], np.ndarray], ...]  # an input, the decoder's tokens, [9, V]

    def sure(self, row: int) -> tuple[int, ...]:
        """The tokens of `outputs[row]` before the first whose choice is within the margin."""
        doubtful = [i for i, gap in enumerate(self.gaps[row]) if gap < MARGIN]
        return self.outputs[row][: doubtful[0]] if doubtful else self.outputs[row]


def quick_and_long(names: Sequence[str], quick: Collection[str]) -> list[Any]:
    """The parameters of a test: those of `quick`, and the others for the long tests."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.long) for name in names]


def load_golden_encoder(name: str) -> GoldenEncoder:
    """The golden files of `name`, one of NAMES."""
    directory = DIRECTORY / name
    with np.load(directory / "encoder_golden.npz") as arrays:
        starts = np.cumsum(arrays["encoder_lengths"])[:-1]
        return GoldenEncoder(
            name=name,
            directory=directory,
            inputs=tuple(tuple(row.tolist()) for row in np.split(arrays["encoder_tokens"], starts)),
            outputs=tuple(map(tuple, arrays["outputs"].tolist())),
            gaps=tuple(map(tuple, arrays["gaps"].tolist())),
            logits=tuple(
                (int(row), tuple(prefix.tolist()), logits)
                for row, prefix, logits in zip(
                    arrays["logits_rows"], arrays["prefixes"], arrays["logits"], strict=True
                )
            ),
        )
