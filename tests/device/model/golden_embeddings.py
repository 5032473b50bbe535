"""Reader of embedding_golden.npz: final hidden states of models like BERT, by transformers in float32.

scripts/golden/embeddings.py makes the files:

    prompt_tokens   int32 [all], prompt_lengths int32 [n]
    cls, last     float32 [n, size]  the hidden state of each prompt's first and last token
    mean          float32 [n, size]  the mean over the prompt's tokens

ranker_golden.npz is of a model that ranks pairs of texts:

    tokens  int32 [all], lengths int32 [n, 2]  the texts of each pair, without special tokens
    results       float32 [n]  the classifier's result for BEGIN, first, SEPARATOR, second, SEPARATOR
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


RANKER_NAMES = sorted(path.parent.name for path in DIRECTORY.glob("*/ranker_golden.npz"))
BEGIN, SEPARATOR = 2, 3


class Ranked(NamedTuple):
    """A ranker's pairs of texts, as token ids, and its results."""

    pairs: list[tuple[list[int], list[int]]]
    results: np.ndarray


def load_ranked(name: str) -> Ranked:
    """The file of one ranker."""
    with np.load(DIRECTORY / name / "ranker_golden.npz") as file:
        texts = np.split(file["tokens"], np.cumsum(file["lengths"].reshape(-1))[:-1])
        results = file["results"]
    pairs = [(texts[i].tolist(), texts[i + 1].tolist()) for i in range(0, len(texts), 2)]
    return Ranked(pairs, results)
