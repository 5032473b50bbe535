"""The control message: everything a worker needs to know about an iteration (ORCA 4.1, Figure 8).

It goes from host to host, ahead of the devices' work, and carries no activations. R is the number of requests
in the batch, without padding. Arrays have one entry per request, in batch order, unless noted.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orca_jax.request.request import SAMPLED

# Returns the token masks of an iteration's constrained rows, [constrained rows, n_words] int32, or None while
# a previous token is unknown. Masks take time to compute, so it is called after the forward pass has started,
# again and again until it returns the masks.
MakeWords = Callable[[], npt.NDArray[np.int32] | None]

# A row's flags.
ADJUSTED = 1  # has biases or penalties
CONSTRAINED = 2  # has a token mask, which follows the message
POOLS_LAST = 4  # wants the final hidden state of its last input token
POOLS_ALL = 8  # wants the sum of the final hidden states of all its input tokens
POOLS_FIRST = 64  # wants the final hidden state of its first input token
POOLED = POOLS_LAST | POOLS_ALL | POOLS_FIRST
ROUTED = 16  # wants the experts that its input tokens choose
DRAFTED = 32  # is ADJUSTED, and its penalties count its known input token and those of the rows before it

# How a row's next token is chosen; fields as in SamplingParams. -1 log-probabilities: not requested.
# The words up to `top_k` are copied as they are into the flat batch: flat_batch.SamplerArrays ends with them.
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
        ("prompt_logprobs", "<i1"),  # set only in the iterations that compute them
        ("flags", "<u1"),
    ]
)

# A value added to a token's logit; `index` is the row's index in the batch.
BIAS = np.dtype([("index", "<i4"), ("token_id", "<i4"), ("value", "<f4")])


_NO_COPIES = np.zeros((0, 2), np.int32)


def no_copies() -> npt.NDArray[np.int32]:
    """An empty list of copies, `[0, 2]`."""
    return _NO_COPIES


def neutral_sampling(n: int) -> npt.NDArray[np.void]:
    """SAMPLING [n] for greedy sampling without biases, penalties, constraints or log-probabilities."""
    rows = np.zeros(n, SAMPLING)
    rows["top_p"] = rows["repetition_penalty"] = 1
    rows["logprobs"] = rows["prompt_logprobs"] = -1
    return rows


class EncoderInputs(NamedTuple):
    """The encoder's inputs of an iteration's rows.

    A row whose input begins with its first token also runs the encoder, over its part of `token_ids`. The
    results stay in the cache, in the blocks of `block_table`.
    """

    length: npt.NDArray[np.int32]  # [R] tokens of the encoder's input
    token_ids: npt.NDArray[np.int32]  # [sum of `length` where a row runs the encoder] row by row
    block_table: npt.NDArray[np.int32]  # [R, max_encoder_blocks]


@dataclass(frozen=True, slots=True, eq=False)
class ControlMessage:
    """The requests of one iteration.

    A row's input is the last `input_length` of its `kv_length` tokens. In its initiation (prefill) these are
    known tokens: the prompt or a chunk of it, and after a loss also the output so far. Each later iteration
    is an increment (decode), whose single input token is the one that the row sampled last. If
    `token_on_device` is set, that token is `last_token[row]` on the device, and 0 in `token_ids`.

    A row samples a token unless the token after its input, `next_token`, is known; requested
    log-probabilities are then of that token. In its increments, a request whose output is scored has a row of
    one token for each token that it computes, side by side in the tokens' order. A beam search has a row for
    each beam; the host chooses its tokens, so they are never on the device alone. `token_index` counts the
    output tokens before the sampled one. Together with the seed it is the random key, so a request's tokens
    do not depend on the other rows. A row's first sampled token ends its initiation. In that iteration the
    message carries the biases of ADJUSTED rows and, in `earlier_ids`, their tokens before the input; the
    worker keeps both.
    """

    row: npt.NDArray[np.int32]  # [R] index in the block table and in last_token
    initiation: npt.NDArray[np.bool_]  # [R]
    token_index: npt.NDArray[np.int32]  # [R] 0 for rows that do not sample
    input_length: npt.NDArray[np.int32]  # [R] input tokens
    kv_length: npt.NDArray[np.int32]  # [R] tokens in the cache after this iteration
    n_prompt: npt.NDArray[np.int32]  # [R] prompt tokens; 0 after the initiation
    next_token: npt.NDArray[np.int32]  # [R] SAMPLED, or the token after the input
    token_ids: npt.NDArray[np.int32]  # [sum of input_length] row by row
    earlier_ids: npt.NDArray[np.int32]  # [any number] row by row
    token_on_device: npt.NDArray[np.bool_]  # [R]
    block_table: npt.NDArray[np.int32]  # [R, at least the blocks that the longest row's `kv_length` takes]
    sampling: npt.NDArray[np.void]  # SAMPLING [R]
    bias: npt.NDArray[np.void]  # BIAS [any number]
    encoder: EncoderInputs | None = None
    adapter: npt.NDArray[np.int32] | None = None  # [R] 0, or 1 + the adapter's slot; None: no row has one
    # [any number, 2] adapters to write into slots before the iteration: version, slot. Workers in the engine
    # master's process are told by a call instead.
    put_adapters: npt.NDArray[np.int32] = field(default_factory=no_copies)
    # [any number, 2] blocks to copy before the iteration: from, to
    copies: npt.NDArray[np.int32] = field(default_factory=no_copies)
    # [any number, 2] blocks to copy before that: first out to the host's memory, block and place, then in
    # from it, place and block
    to_host: npt.NDArray[np.int32] = field(default_factory=no_copies)
    from_host: npt.NDArray[np.int32] = field(default_factory=no_copies)
    # [any number, 2] recurrent layers' states to copy, from and to: before the iteration snapshots that new
    # rows go on from, and after it rows of which snapshots are made. Snapshot s is state n_rows + s.
    states_before: npt.NDArray[np.int32] = field(default_factory=no_copies)
    states_after: npt.NDArray[np.int32] = field(default_factory=no_copies)
    # [any number, 2] indices of drafted outputs' rows [R], each with the place that keeps the state after its
    # token. A request's last row is not among them: its state stays at the request's row. States are copied
    # from such places as well: before the iteration to rows whose drafts were rejected, and after it to
    # snapshots.
    states_kept: npt.NDArray[np.int32] = field(default_factory=no_copies)

    @property
    def samples(self) -> npt.NDArray[np.bool_]:
        """[R]: rows that sample a token."""
        return self.next_token == SAMPLED

    @property
    def encodes(self) -> npt.NDArray[np.bool_]:
        """[R]: rows that run the encoder."""
        starts = self.kv_length == self.input_length
        return starts if self.encoder is not None else np.zeros_like(starts)

    @property
    def set_up(self) -> npt.NDArray[np.bool_]:
        """[R]: ADJUSTED rows whose initiation ends here, with their biases and earlier tokens."""
        return self.initiation & self.samples & ((self.sampling["flags"] & ADJUSTED) > 0)

    @property
    def n_scored(self) -> npt.NDArray[np.int32]:
        """[R]: the number of prompt tokens whose log-probabilities are computed; 0 if not requested.

        Each input token scores the token after it, up to the last prompt token.
        """
        start = self.kv_length - self.input_length
        scored = np.clip(np.minimum(self.kv_length, self.n_prompt - 1) - start, 0, None)
        return np.where(self.sampling["prompt_logprobs"] >= 0, scored, 0)

    @property
    def n_pooled(self) -> npt.NDArray[np.int32]:
        """[R]: the number of input tokens whose final hidden states are summed; mostly 0.

        They are the last ones, or with POOLS_FIRST the first.
        """
        flags = self.sampling["flags"]
        one = (flags & (POOLS_LAST | POOLS_FIRST)) > 0
        pooled = np.where(flags & POOLS_ALL, self.input_length, one)
        return pooled.astype(np.int32)

    @property
    def routed_rows(self) -> list[tuple[int, int]]:
        """The rows that want their tokens' experts, each with its number of input tokens."""
        wants = np.flatnonzero(self.sampling["flags"] & ROUTED)
        return list(zip(wants.tolist(), self.input_length[wants].tolist(), strict=True))

    @property
    def constrained(self) -> npt.NDArray[np.bool_]:
        """[R]: rows whose token masks follow the message."""
        return (self.sampling["flags"] & CONSTRAINED) > 0
