"""The results of an iteration: a token per request, and log-probabilities for requests that want them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from orca_jax.request.pooled_vector import Vector
from orca_jax.request.routed_experts import ExpertIds
from orca_jax.request.sampling_params import MAX_TOP_LOGPROBS

# A token, its log-probability, and those of the most likely tokens in descending order. All fields are 4
# bytes wide, so that a device can write a record as int32 words.
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
    """A token with its log-probability, and the requested number of most likely (token id, log-probability).

    They are the model's, before temperature, penalties and everything else.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The results of an iteration for R rows; rows after the batch's are padding."""

    token_ids: npt.NDArray[np.int32]  # [R]
    logprobs: npt.NDArray[np.void] | None = None  # LOGPROBS [R]; None: no row asked for them
    # By index in the batch: LOGPROBS of the prompt's tokens except the first, which has no context.
    prompt_logprobs: Mapping[int, npt.NDArray[np.void]] = field(
        default_factory=dict[int, "npt.NDArray[np.void]"]
    )
    # By index in the batch: the sum of the hidden states that the row pools.
    pooled: Mapping[int, Vector] = field(default_factory=dict[int, Vector])
    # By index in the batch: the experts of the row's input tokens, [input_length, layers, k].
    routed: Mapping[int, ExpertIds] = field(default_factory=dict[int, ExpertIds])


def as_records(words: npt.NDArray[np.int32]) -> npt.NDArray[np.void]:
    """View words [n, LOGPROB_WORDS] as LOGPROBS [n], without a copy if they are contiguous."""
    return np.ascontiguousarray(words).view(LOGPROBS)[:, 0]


def token_logprobs(record: Any, n_top: int) -> TokenLogprobs:
    """Decode a record, with the `n_top` most likely tokens, or fewer if the vocabulary is smaller."""
    ids, values = record["top_ids"][:n_top].tolist(), record["top_logprobs"][:n_top].tolist()
    top = tuple((i, value) for i, value in zip(ids, values, strict=True) if value > -np.inf)
    return TokenLogprobs(int(record["token_id"]), float(record["logprob"]), top)
