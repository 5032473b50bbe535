"""A batch laid out token-major and padded to its bucket (ORCA 3.2, Figure 5: selective batching).

All tokens of all requests stand side by side, whatever their phase or length: 7 tokens of 4 requests are
7 rows of one array. Attention finds each request's own tokens again by `row_start`. numpy in and out; one
buffer of 32-bit words goes to the device in one copy, and `FlatLayout.split` cuts it there again.

T is the bucket's tokens, R its rows (requests).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from orca_jax.iteration.message import ADJUSTED, CONSTRAINED, ControlMessage

Sampler = Literal["greedy", "plain", "full"]

# 32-bit words: 256 bytes. XLA may hand a GPU kernel a part of the buffer in place, and a Mosaic kernel takes
# no array that begins anywhere else.
ALIGNED = 64


class Words(Protocol):
    """A one-dimensional int32 array: numpy's, or a traced one."""

    def __getitem__(self, words: slice, /) -> Any: ...


class FlatArrays(NamedTuple):
    """The parts of the buffer in their order, all int32."""

    token_ids: Any  # [T]
    positions: Any  # [T] index of the token within its request
    slot_of_token: Any  # [T] where its key and value go; n_slots (nowhere) for padding
    last_row: Any  # [T] place in last_token of the request's newest token, where take_last is 1
    take_last: Any  # [T] 1: the token is last_token[last_row]; 0: it is in token_ids
    row_start: Any  # [R + 1] index of each row's first token; the last entry is the number of tokens
    kv_length: Any  # [R] tokens in the cache after these were written; 0 for padding
    block_table: Any  # [R, max_blocks]
    sampler: Any  # [len(SamplerArrays), R] what the sampler needs


class SamplerArrays(NamedTuple):
    """What the sampler needs, `[R]` int32 each; from `temperature` on they are the bits of float32.

    `adjusted` is 0 for a row without biases and penalties. Else it is 1, or 2 where the token of the
    iteration before is not counted yet.
    """

    row: Any  # place in last_token where the next token goes; n_rows (nowhere) where none is sampled
    top_k: Any
    token_index: Any
    seed_low: Any
    seed_high: Any
    adjusted: Any
    temperature: Any
    top_p: Any
    min_p: Any
    repetition: Any
    frequency: Any
    presence: Any


# Of SamplerArrays, with the fields of message.SAMPLING that they are.
_REALS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition": "repetition_penalty",
    "frequency": "frequency_penalty",
    "presence": "presence_penalty",
}


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The static sizes of a bucket's buffer: `n_tokens` T, `n_rows` R, `max_blocks` blocks in a row.

    Each part begins at a multiple of ALIGNED words, and so does whatever is put behind the buffer; the words
    between them are 0 and nobody reads them.
    """

    n_tokens: int
    n_rows: int
    max_blocks: int

    @property
    def shapes(self) -> FlatArrays:
        """The shape of each part."""
        t, r = (self.n_tokens,), (self.n_rows,)
        return FlatArrays(
            token_ids=t, positions=t, slot_of_token=t, last_row=t, take_last=t,
            row_start=(self.n_rows + 1,), kv_length=r, block_table=(self.n_rows, self.max_blocks),
            sampler=(len(SamplerArrays._fields), self.n_rows),
        )  # fmt: skip

    @property
    def size(self) -> int:
        """32-bit words of the whole buffer, a multiple of ALIGNED."""
        return sum(_aligned(math.prod(shape)) for shape in self.shapes)

    def split(self, buffer: Words) -> FlatArrays:
        """Cut a buffer `[size]` int32 into its parts, by slicing and reshaping alone.

        Of a numpy buffer they are views; of a traced array they are traced slices.
        """
        parts: list[Any] = []
        start = 0
        for shape in self.shapes:
            n_words = math.prod(shape)
            part = buffer[start : start + n_words]
            parts.append(part if len(shape) == 1 else part.reshape(shape))
            start += _aligned(n_words)
        return FlatArrays(*parts)


def _aligned(n_words: int) -> int:
    return -(-n_words // ALIGNED) * ALIGNED


@dataclass(frozen=True, slots=True)
class TokenPrograms:
    """The programs that choose the tokens of a batch, no more than its rows need.

    `sampler` is the smallest that serves all rows: `greedy` if all temperatures are 0, `plain` if no sampled
    row cuts by top_k or top_p, else `full`. A row of temperature 0 is greedy in each of them. Before
    it, `adjust` acts on biases and penalties, `allow` on constraints; behind it `logprobs` are computed.
    """

    sampler: Sampler = "greedy"
    adjust: bool = False
    allow: bool = False
    logprobs: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """A padded batch: `buffer` is int32 `[layout.size]`, `arrays` are views of it.

    `n_tokens` and `n_rows` count what is real.
    """

    layout: FlatLayout
    buffer: npt.NDArray[np.int32]
    arrays: FlatArrays
    n_tokens: int
    n_rows: int
    programs: TokenPrograms


def token_programs(sampling: npt.NDArray[np.void]) -> TokenPrograms:
    """The programs for these rows, SAMPLING [R]."""
    flags = int(np.bitwise_or.reduce(sampling["flags"]))
    return TokenPrograms(
        sampler_for(sampling),
        adjust=bool(flags & ADJUSTED),
        allow=bool(flags & CONSTRAINED),
        logprobs=bool((sampling["logprobs"] >= 0).any()),
    )


def sampler_for(sampling: npt.NDArray[np.void]) -> Sampler:
    """The smallest sampler that serves all these rows, SAMPLING [R]."""
    sampled = sampling["temperature"] > 0
    if not sampled.any():
        return "greedy"
    cut = (sampling["top_k"] > 0) | (sampling["top_p"] < 1)
    return "full" if (cut & sampled).any() else "plain"


def flat_batch(
    message: ControlMessage, *, bucket: int, max_bs: int, block_size: int, n_slots: int, n_rows: int
) -> FlatBatch:
    """Lay the requests of `message` out in a fresh buffer of `bucket` tokens and min(bucket, max_bs) rows.

    `n_slots` counts the slots of whole blocks and is the slot of padding tokens, out of range so that their
    write is dropped; `n_rows` is the size of `last_token` and likewise the row of padding rows. Padding
    tokens have id 0 and position 0; padding rows own no token, have kv_length 0, temperature 0, top_p 1.
    The tokens of a row are side by side, the rows in the order of the batch.
    """
    real_rows, max_blocks = message.block_table.shape
    real_tokens = message.token_ids.shape[0]
    layout = FlatLayout(bucket, min(bucket, max_bs), max_blocks)
    assert real_rows <= layout.n_rows and real_tokens <= bucket, f"{real_rows} rows, {real_tokens} tokens"
    buffer, to = _padding(layout, n_slots=n_slots, n_rows=n_rows)

    # Per row.
    row_start = to.row_start
    np.cumsum(message.input_length, out=row_start[1 : real_rows + 1])
    row_start[real_rows + 1 :] = real_tokens
    to.kv_length[:real_rows] = message.kv_length
    to.block_table[:real_rows] = message.block_table
    sampling, sampler = message.sampling, SamplerArrays(*to.sampler)
    seed = sampling["seed"]
    sampler.row[:real_rows] = np.where(message.samples, message.row, n_rows)
    sampler.token_index[:real_rows] = message.token_index
    sampler.top_k[:real_rows] = sampling["top_k"]
    sampler.seed_low[:real_rows] = (seed & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
    sampler.seed_high[:real_rows] = seed >> 32
    programs = token_programs(sampling)
    if programs.adjust:
        adjusted = (sampling["flags"] & ADJUSTED) > 0
        sampler.adjusted[:real_rows] = np.where(message.initiation, 1, 2) * adjusted
    for name, source in _REALS.items():
        getattr(sampler, name).view(np.float32)[:real_rows] = sampling[source]

    # Per token. Increments alone need no map from token to row: each row is one token.
    kv_length, row, take_last = message.kv_length, message.row, message.token_on_device
    if real_tokens == real_rows:
        owner = np.arange(real_rows, dtype=np.intp)
        positions = kv_length - 1
    else:
        owner = np.repeat(np.arange(real_rows, dtype=np.intp), message.input_length)
        # A row's tokens are its last ones: from index to position is as far as from its end to kv_length.
        shift = kv_length - row_start[1 : real_rows + 1]
        positions = np.arange(real_tokens, dtype=np.int32) + shift[owner]
        row, take_last = row[owner], take_last[owner]
    to.token_ids[:real_tokens] = message.token_ids
    to.positions[:real_tokens] = positions
    to.slot_of_token[:real_tokens] = (
        message.block_table[owner, positions // block_size] * block_size + positions % block_size
    )
    to.take_last[:real_tokens] = take_last
    to.last_row[:real_tokens] = row * take_last  # where nothing is taken 0, which is in range
    return FlatBatch(layout, buffer, to, real_tokens, real_rows, programs)


def padding_batch(layout: FlatLayout, *, n_slots: int, n_rows: int) -> FlatBatch:
    """A batch of no request, to run programs that nobody has a request for yet: it writes nowhere."""
    buffer, to = _padding(layout, n_slots=n_slots, n_rows=n_rows)
    return FlatBatch(layout, buffer, to, 0, 0, TokenPrograms())


def _padding(layout: FlatLayout, *, n_slots: int, n_rows: int) -> tuple[npt.NDArray[np.int32], FlatArrays]:
    """A buffer in which every token and row is padding, and its parts."""
    buffer = np.zeros(layout.size, np.int32)
    to = layout.split(buffer)
    to.slot_of_token.fill(n_slots)
    sampler = SamplerArrays(*to.sampler)
    sampler.row.fill(n_rows)
    sampler.top_p.view(np.float32).fill(1)
    sampler.repetition.view(np.float32).fill(1)
    return buffer, to
