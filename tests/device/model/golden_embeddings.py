"""Reader of embedding_golden.npz: final hidden states of models like BERT, by transformers in float32.

scripts/golden/embeddings.py makes the files:

    prompt_tokens   int32 [all], prompt_lengths int32 [n]
    cls, last     float32 [n, size]  the hidden state of each prompt's first and last token
    mean          float32 [n, size]  the mean over the prompt's tokens
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from tests.device.model.golden import DIRECTORY

EMBEDDING_NAMES = sorted(path.parent.name for path in DIRECTORY.glob("*/embedding_golden.npz"))


class Embeddings(NamedTuple):
    """A model's prompts, and the expected vectors by pooling, each [n, size]."""

    prompts: list[list[int]]
    vectors: dict[str, np.ndarray]


@cache
def load_embeddings(name: str) -> Embeddings:
    """The file of one model."""
    with np.load(DIRECTORY / name / "embedding_golden.npz") as file:
        prompts = np.split(file["prompt_tokens"], np.cumsum(file["prompt_lengths"])[:-1])
        vectors = {pooling: file[pooling] for pooling in ("cls", "last", "mean")}
    return Embeddings([each.tolist() for each in prompts], vectors)
