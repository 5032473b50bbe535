"""Reader of embedding_golden.npz: final hidden states of models like BERT, by transformers in float32.

scripts/golden/embeddings.py makes the files:

    prompt_tokens   int32 [all], prompt_lengths int32 [n]
    cls, last     float32 [n, size]  the hidden state of each prompt's first and last token
    mean          float32 [n, size]  the mean over the prompt's tokens

ranker_golden.npz is of a model that ranks pairs of texts:

    tokens  int32 [all], lengths int32 [n, 2]  the texts of each pair, without special tokens
    results       float32 [n]  the classifier's result for BEGIN, first, SEPARATOR, second, SEPARATOR

qwen3_ranker_golden.npz is of a Qwen3 ranker, which reads the two texts one after another:

    tokens, lengths            as above
    results       float32 [n, r]  the logits of "no" and "yes", or of the labels
    scores        float64 [n]  the probability of the second of two, or the sigmoid of the only one
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


QWEN3_RANKER_NAMES = sorted(path.parent.name for path in DIRECTORY.glob("*/qwen3_ranker_golden.npz"))


class Qwen3Ranked(NamedTuple):
    """A Qwen3 ranker's pairs of texts, as token ids, its results [n, r] and its scores [n]."""

    pairs: list[tuple[list[int], list[int]]]
    results: np.ndarray
    scores: np.ndarray


@cache
def load_qwen3_ranked(name: str) -> Qwen3Ranked:
    """The file of one Qwen3 ranker."""
    with np.load(DIRECTORY / name / "qwen3_ranker_golden.npz") as file:
        texts = np.split(file["tokens"], np.cumsum(file["lengths"].reshape(-1))[:-1])
        results, scores = file["results"], file["scores"]
    pairs = [(texts[i].tolist(), texts[i + 1].tolist()) for i in range(0, len(texts), 2)]
    return Qwen3Ranked(pairs, results, scores)
