"""What an iteration computed for its requests: a token each, and log-probabilities for those who asked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from orca_jax.request.sampling_params import MAX_TOP_LOGPROBS

# A token, the logarithm of its probability, and those of the likeliest in descending order; all 4 bytes wide,
# so that a device writes it as so many words.
LOGPROBS = np.dtype(
    [
        ("token_id", "<i4"),
        ("logprob", "<f4"),
        ("top_ids", "<i4", (MAX_TOP_LOGPROBS,)),
        ("top_logprobs", "<f4", (MAX_TOP_LOGPROBS,)),
    ]
)
LOGPROB_WORDS = LOGPROBS.itemsize // 4


class TokenLogprobs(NamedTuple):
    """A token with the logarithm of its probability, and as many of the likeliest, (token id, logarithm), as
    were asked for. They are the model's, before temperature, penalties and all else.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """R is at least the number of requests: rows behind them are padding."""

    token_ids: npt.NDArray[np.int32]  # [R]
    logprobs: npt.NDArray[np.void] | None = None  # LOGPROBS [R]; None: no row asked for them
    # By place in the batch: LOGPROBS of the prompt's tokens but the first, which nothing comes before.
    prompt_logprobs: Mapping[int, npt.NDArray[np.void]] = field(
        default_factory=dict[int, "npt.NDArray[np.void]"]
    )


def as_records(words: npt.NDArray[np.int32]) -> npt.NDArray[np.void]:
    """[n, LOGPROB_WORDS] as LOGPROBS [n], without a copy where it is contiguous."""
    return np.ascontiguousarray(words).view(LOGPROBS)[:, 0]


def token_logprobs(record: Any, n_top: int) -> TokenLogprobs:
    """One record, with the `n_top` likeliest; fewer where the vocabulary has fewer."""
    ids, values = record["top_ids"][:n_top].tolist(), record["top_logprobs"][:n_top].tolist()
    top = tuple((i, value) for i, value in zip(ids, values, strict=True) if value > -np.inf)
    return TokenLogprobs(int(record["token_id"]), float(record["logprob"]), top)
