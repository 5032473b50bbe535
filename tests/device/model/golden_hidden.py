"""Reader of hidden.npz: final hidden states that Hugging Face transformers computes in float32.

scripts/golden/hidden.py makes it. Of one golden model of each family without an encoder, by its name:

    NAME.rows    int32 [n]        prompts of the model's golden.npz
    NAME.last  float32 [n, size]  the hidden state of each prompt's last token, as the head reads it
    NAME.mean  float32 [n, size]  the mean over the prompt's tokens
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from tests.device.model.golden import DIRECTORY, load_golden


class HiddenStates(NamedTuple):
    """A model's prompts, and each one's pooled states."""

    prompts: list[tuple[int, ...]]
    last: np.ndarray
    mean: np.ndarray


@cache
def _arrays() -> dict[str, np.ndarray]:
    with np.load(DIRECTORY / "hidden.npz") as arrays:
        return dict(arrays)


def hidden_names() -> list[str]:
    """The models in the file."""
    return sorted(name.removesuffix(".rows") for name in _arrays() if name.endswith(".rows"))


def load_hidden(name: str) -> HiddenStates:
    """The hidden states of one model."""
    arrays, prompts = _arrays(), load_golden(name).prompts
    return HiddenStates(
        [prompts[row] for row in arrays[f"{name}.rows"]], arrays[f"{name}.last"], arrays[f"{name}.mean"]
    )
