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
        ("prompt_logprobs", "<i1"),  # only in the iterations that compute them
        ("flags", "<u1"),
    ]
)

SAMPLED = -1  # instead of a known token: it is sampled

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

    A row's input tokens are the last `input_length` of its `kv_length` ones. It is in its initiation
    (prefill) while they are known tokens: the whole prompt or a piece of it, and after a loss the output so
    far as well. After that each iteration is an increment (decode): its one input token is the one that the
    row sampled before. Where `token_on_device` is set it is in the device's `last_token[row]`, and 0 in
    `token_ids`.

    A row samples a token unless the one after its input is known: `next_token`. `token_index` counts the
    output tokens before the sampled one; with the seed it makes the key, so that a request's tokens do not
    depend on its neighbours. The initiation ends with the first token that is sampled. There, rows that are
    ADJUSTED get their biases, and `earlier_ids` are their tokens in front of the input; a worker keeps both
    with the row.
    """

    row: npt.NDArray[np.int32]  # [R] place in the block table and in last_token
    initiation: npt.NDArray[np.bool_]  # [R]
    token_index: npt.NDArray[np.int32]  # [R] 0 where nothing is sampled
    input_length: npt.NDArray[np.int32]  # [R] tokens that go in
    kv_length: npt.NDArray[np.int32]  # [R] tokens in the cache after these were written
    n_prompt: npt.NDArray[np.int32]  # [R] tokens of the prompt; 0 after the initiation
    next_token: npt.NDArray[np.int32]  # [R] SAMPLED, or the token after the input
    token_ids: npt.NDArray[np.int32]  # [sum of input_length] request by request
    earlier_ids: npt.NDArray[np.int32]  # [any number] request by request
    token_on_device: npt.NDArray[np.bool_]  # [R]
    block_table: npt.NDArray[np.int32]  # [R, max_blocks]
    sampling: npt.NDArray[np.void]  # SAMPLING [R]
    bias: npt.NDArray[np.void]  # BIAS [any number]

    @property
    def samples(self) -> npt.NDArray[np.bool_]:
        """[R]: the rows whose next token is not known, and so is sampled."""
        return self.next_token == SAMPLED

    @property
    def set_up(self) -> npt.NDArray[np.bool_]:
        """[R]: the rows with biases or penalties whose initiation ends here, where a worker takes them in."""
        return self.initiation & self.samples & ((self.sampling["flags"] & ADJUSTED) > 0)

    @property
    def n_scored(self) -> npt.NDArray[np.int32]:
        """[R]: of how many of the prompt's tokens log-probabilities are computed, where they are asked for.

        The input tokens score those after them, up to the prompt's last.
        """
        start = self.kv_length - self.input_length
        scored = np.clip(np.minimum(self.kv_length, self.n_prompt - 1) - start, 0, None)
        return np.where(self.sampling["prompt_logprobs"] >= 0, scored, 0)

    @property
    def constrained(self) -> npt.NDArray[np.bool_]:
        """[R]: the rows that words of allowed tokens follow for."""
        return (self.sampling["flags"] & CONSTRAINED) > 0
