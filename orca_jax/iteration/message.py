"""The control message: all that a worker must be told of one iteration (ORCA 4.1, Figure 8).

It travels host to host, ahead of the devices' work, and carries no activation. R is the number of
requests in the batch here, without padding; every array is one entry a request, in the batch's order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# What the constrained rows of an iteration allow, as token_words, [their number, n_words] int32; None as long
# as a token before it is not known. Called once the forward pass is on its way, because making them takes
# time, and never again once they were given.
MakeWords = Callable[[], npt.NDArray[np.int32] | None]

ADJUSTED = 1  # of a row's flags: it has biases or penalties
CONSTRAINED = 2  # not every token may come next: words of allowed tokens follow the message

# How a row's next token is chosen; fields as in SamplingParams. -1 log-probabilities: none are asked for.
SAMPLING = np.dtype(
    [
        ("seed", "<i8"),
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("repetition_penalty", "<f4"),
        ("frequency_penalty", "<f4"),
        ("presence_penalty", "<f4"),
        ("top_k", "<i4"),
        ("logprobs", "<i1"),
        ("prompt_logprobs", "<i1"),  # only in the iteration that computes them
        ("flags", "<u1"),
    ]
)

# What is added to a token's logit; `index` is the row's place in the batch.
BIAS = np.dtype([("index", "<i4"), ("token_id", "<i4"), ("value", "<f4")])


def neutral_sampling(n: int) -> npt.NDArray[np.void]:
    """SAMPLING [n] that changes nothing: greedy, every token in, nothing asked for."""
    rows = np.zeros(n, SAMPLING)
    rows["top_p"] = rows["repetition_penalty"] = 1
    rows["logprobs"] = rows["prompt_logprobs"] = -1
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class ControlMessage:
    """One iteration's requests.

    `token_index` counts the output tokens before the one that this iteration samples; with the seed it makes
    the key, so that a request's tokens don't depend on its neighbours. A request's input tokens are the last
    `input_length` of its `kv_length` ones. Where `token_on_device` stands, the one input token is in the
    device's `last_token[row]`, and 0 in `token_ids`. In its initiation a request's first `n_prompt` tokens
    are the prompt's; those behind it are output, of a request that runs again. `bias` has the biases of
    requests in their initiation; a worker keeps them with the row.
    """

    iteration: int
    row: npt.NDArray[np.int32]  # [R] place in the block table and in last_token
    initiation: npt.NDArray[np.bool_]  # [R]
    token_index: npt.NDArray[np.int32]  # [R]
    input_length: npt.NDArray[np.int32]  # [R] tokens that go in
    kv_length: npt.NDArray[np.int32]  # [R] tokens in the cache after these were written
    n_prompt: npt.NDArray[np.int32]  # [R] 0 after the initiation
    token_ids: npt.NDArray[np.int32]  # [sum of input_length] request by request
    token_on_device: npt.NDArray[np.bool_]  # [R]
    block_table: npt.NDArray[np.int32]  # [R, max_blocks]
    sampling: npt.NDArray[np.void]  # SAMPLING [R]
    bias: npt.NDArray[np.void]  # BIAS [any number]

    @property
    def constrained(self) -> npt.NDArray[np.bool_]:
        """[R]: the rows that words of allowed tokens follow for."""
        return (self.sampling["flags"] & CONSTRAINED) > 0
