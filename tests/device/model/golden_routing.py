"""Reader of routing.npz: the experts that Hugging Face transformers chooses in golden mixtures of experts.

scripts/golden/routing.py makes it. Of each, over the prompts whose logits are kept, one after the other:

    NAME.chosen  uint8 [tokens, layers with experts, k]  the best first
    NAME.gaps  float32 [tokens, layers with experts]     the worst chosen expert's logit less the best other's
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from tests.device.model.golden import DIRECTORY, load_golden


class PromptRouting(NamedTuple):
    """One prompt's experts."""

    prompt: tuple[int, ...]
    chosen: np.ndarray
    gaps: np.ndarray


@cache
def _arrays() -> dict[str, np.ndarray]:
    with np.load(DIRECTORY / "routing.npz") as arrays:
        return dict(arrays)


def routing_names() -> list[str]:
    """The models in the file."""
    return sorted(name.removesuffix(".chosen") for name in _arrays() if name.endswith(".chosen"))


def load_routing(name: str) -> list[PromptRouting]:
    """The experts of one model's prompts."""
    arrays, golden = _arrays(), load_golden(name)
    prompts = [golden.prompts[row] for row in golden.logits]
    starts = np.cumsum([len(prompt) for prompt in prompts])[:-1]
    each = zip(*(np.split(arrays[f"{name}.{kind}"], starts) for kind in ("chosen", "gaps")), strict=True)
    return [PromptRouting(prompt, *both) for prompt, both in zip(prompts, each, strict=True)]
