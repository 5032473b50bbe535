"""A batch laid out token-major and padded to its bucket (ORCA 3.2, Figure 5: selective batching).

Requests in different phases and of different lengths cannot share a tensor [batch, length]. Here the tokens
of all requests are concatenated: 7 tokens of 4 requests are 7 rows of one array. Everything but attention
computes these rows alike; attention uses `row_start` to find each request's tokens. The whole batch is one
NumPy buffer of 32-bit words, copied to the device at once; `FlatLayout.split` slices it there.

T is the number of tokens in the bucket, R the number of its rows (requests).
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from orca_jax.config import Attention
from orca_jax.iteration.message import ADJUSTED, CONSTRAINED, DRAFTED, SAMPLED, ControlMessage
from orca_jax.iteration.shape import EngineShape, bucket_for

Sampler = Literal["greedy", "plain", "full"]

# The contexts, in tokens, for which decode has layouts, and so programs, of its own; None is the longest
# possible. With static shapes a row costs what its layout's longest would. cuDNN is called once for each
# layer, not once more for prompts' tiles. The other kinds follow the lengths; only a GPU's block table is
# better not sent as wide as the longest context.
DECODE_CONTEXTS: dict[Attention, tuple[int | None, ...]] = {
    "static": (64, 512, 4096, None),
    "cudnn": (4096, None),
    "kernel": (4096,),
    "interpreted": (4096,),
    "native": (),
    "follow_lengths": (),
}

# In 32-bit words: 256 bytes. XLA may pass a part of the buffer to a GPU kernel without a copy, and Mosaic
# kernels require this alignment.
_ALIGNMENT = 64


class Words(Protocol):
    """A one-dimensional int32 array, NumPy's or traced."""

    def __getitem__(self, words: slice, /) -> Any: ...


class FlatArrays(NamedTuple):
    """The parts of the buffer in order, all int32."""

    token_ids: Any  # [T]
    positions: Any  # [T] index of the token within its request
    slot_of_token: Any  # [T] where its key and value are written; n_slots (out of range) for padding
    last_row: Any  # [T] where take_last is 1: index in last_token
    take_last: Any  # [T] 1: the token is last_token[last_row]; 0: it is in token_ids
    row_start: Any  # [R + 1] index of each row's first token; the last entry is the number of tokens
    kv_length: Any  # [R] tokens in the cache after this iteration; 0 for padding
    block_table: Any  # [R, max_blocks]
    sampler: Any  # [len(SamplerArrays), R]
    encoder_length: Any  # [R] tokens of the encoder's input; this and the next are empty without an encoder
    encoder_table: Any  # [R, max_encoder_blocks]
    # Empty without recurrent layers. Neighbouring rows of one request are one row to a state.
    state_start: Any  # [R + 1] as row_start
    state_of_row: Any  # [R] where the request's state is; n_states (out of range) for padding
    kept_at: Any  # [R] the place of the state after a draft, n_states for none; empty without drafts
    adapter_of_token: Any  # [T] 0 for none, or 1 + the slot of the row's adapter; empty if no row has one


class SamplerArrays(NamedTuple):
    """The sampler's inputs, `[R]` int32 each; from `temperature` to `presence`, the bits of float32.

    `adjusted` is 0 for a row without biases and penalties, 1 in its initiation, and 2 in an increment, where
    the token of the previous iteration must still be counted. From DRAFT_COUNTED on it is that number plus
    the input token of a drafted output's row, which must still be counted. From `seed_low` on they are the
    first words of message.SAMPLING in their order, so that one copy lays them out.
    """

    row: Any  # index in last_token to store the next token at; n_rows (out of range) if none is sampled
    known: Any  # the known next token, whose log-probabilities are wanted; SAMPLED if a token is sampled
    token_index: Any
    adjusted: Any
    n_top: Any  # the number of top log-probabilities wanted besides the token's; -1: none at all
    seed_low: Any
    seed_high: Any
    temperature: Any
    top_p: Any
    min_p: Any
    repetition: Any
    frequency: Any
    presence: Any
    top_k: Any


DRAFT_COUNTED = 3  # see SamplerArrays

_FIRST_COPIED = SamplerArrays._fields.index("seed_low")  # from here on, fields are words of SAMPLING
_N_COPIED = len(SamplerArrays._fields) - _FIRST_COPIED


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The static sizes of a bucket's buffer: `n_tokens` T, `n_rows` R, and `max_blocks` per row.

    A decoder row also has `max_encoder_blocks` blocks of the encoder; 0 without an encoder. In the encoder's
    batches the encoder's blocks are the `max_blocks`. With `one_each`, as in decode, T is R, and row r has
    token r and no other. `states` are the entries for recurrent layers, which keep states of up to
    `max_drafts` drafts of a request, and `adapters` those for LoRA adapters. Each part begins at a multiple
    of 64 words, and so does the end of the buffer. Unused words are 0.
    """

    n_tokens: int
    n_rows: int
    max_blocks: int
    max_encoder_blocks: int = 0
    one_each: bool = False
    states: bool = False
    adapters: bool = False
    max_drafts: int = 0

    def __post_init__(self) -> None:
        assert not self.one_each or self.n_tokens == self.n_rows, "each row has one token"

    @property
    def shapes(self) -> FlatArrays:
        t, r = (self.n_tokens,), (self.n_rows,)
        return FlatArrays(
            token_ids=t, positions=t, slot_of_token=t, last_row=t, take_last=t,
            row_start=(self.n_rows + 1,), kv_length=r, block_table=(self.n_rows, self.max_blocks),
            sampler=(len(SamplerArrays._fields), self.n_rows),
            encoder_length=(self.n_rows * (self.max_encoder_blocks > 0),),
            encoder_table=(self.n_rows, self.max_encoder_blocks),
            state_start=((self.n_rows + 1) * self.states,), state_of_row=(self.n_rows * self.states,),
            kept_at=(self.n_rows * (self.max_drafts > 0),), adapter_of_token=(self.n_tokens * self.adapters,),
        )  # fmt: skip

    @property
    def in_words(self) -> str:
        """The number of tokens as a phrase, and in decode the blocks of a row."""
        tokens = f"{self.n_tokens} tokens" if self.n_tokens > 1 else "1 token"
        words = f"{tokens} of decode, up to {self.max_blocks} blocks each" if self.one_each else tokens
        return f"{words}, with adapters" if self.adapters else words

    @property
    def size(self) -> int:
        """The buffer's size in 32-bit words, a multiple of 64."""
        return aligned(_places(self)[-1][0].stop)

    @property
    def last_tokens(self) -> "FlatLayout | None":
        """The layout of a batch of each row's last token; None if the bucket is no larger than that."""
        if self.n_tokens == self.n_rows:
            return None
        return replace(self, n_tokens=self.n_rows, one_each=True)

    def split(self, buffer: Words) -> FlatArrays:
        """Slice and reshape a buffer `[size]` int32 into its parts.

        They are views of a NumPy buffer, or traced slices of a traced one.
        """
        parts: list[Any] = []
        for words, shape in _places(self):
            part = buffer[words]
            parts.append(part if len(shape) == 1 else part.reshape(shape))
        return FlatArrays(*parts)


@lru_cache(maxsize=256)  # enough for the buckets of a few engines
def _places(layout: FlatLayout) -> tuple[tuple[slice, tuple[int, ...]], ...]:
    """The slice of the buffer and the shape of each part."""
    places: list[tuple[slice, tuple[int, ...]]] = []
    start = 0
    for shape in layout.shapes:
        n_words = math.prod(shape)
        places.append((slice(start, start + n_words), shape))
        start += aligned(n_words)
    return tuple(places)


def aligned(n_words: int) -> int:
    """Round up to a multiple of 64 words, where the next part of a buffer may begin."""
    return -(-n_words // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class TokenPrograms:
    """The programs that a batch's rows need to choose their tokens.

    In order: `adjust` applies biases and penalties, `allow` applies token masks, `sampler` chooses tokens,
    and `logprobs` computes log-probabilities. `sampler` is the cheapest that serves all rows: `greedy` if all
    temperatures are 0, `plain` if no sampled row uses top_k or top_p, else `full`. All three are greedy for
    rows with temperature 0. With `drafts`, adjusted rows have drafts that are counted.
    """

    sampler: Sampler = "greedy"
    adjust: bool = False
    allow: bool = False
    logprobs: bool = False
    drafts: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """A padded batch: `buffer` is int32 `[layout.size]`, `arrays` are views of it.

    `n_tokens` and `n_rows` do not count padding.
    """

    layout: FlatLayout
    buffer: npt.NDArray[np.int32]
    arrays: FlatArrays
    n_tokens: int
    n_rows: int
    programs: TokenPrograms


def token_programs(sampling: npt.NDArray[np.void]) -> TokenPrograms:
    """The programs that these rows need, SAMPLING [R]."""
    flags = sampling["flags"]
    flags = int(np.bitwise_or.reduce(flags)) if np.count_nonzero(flags) else 0  # mostly no row has flags
    return TokenPrograms(
        sampler_for(sampling),
        adjust=bool(flags & ADJUSTED),
        allow=bool(flags & CONSTRAINED),
        logprobs=bool(np.count_nonzero(sampling["logprobs"] >= 0)),
        drafts=bool(flags & DRAFTED),
    )


def sampler_for(sampling: npt.NDArray[np.void]) -> Sampler:
    """The cheapest sampler that serves all these rows, SAMPLING [R]."""
    sampled = sampling["temperature"] > 0
    if not np.count_nonzero(sampled):  # takes half the time of `any`
        return "greedy"
    cut = (sampling["top_k"] > 0) | (sampling["top_p"] < 1)
    return "full" if np.count_nonzero(cut & sampled) else "plain"


def flat_batch(
    message: ControlMessage,
    *,
    bucket: int,
    max_bs: int,
    block_size: int,
    n_slots: int,
    n_rows: int,
    max_blocks: int | None = None,
    one_each: bool = False,
    n_states: int = 0,
    adapters: bool = False,
    max_drafts: int = 0,
) -> FlatBatch:
    """Lay out the requests of `message` in a new buffer of `bucket` tokens and min(bucket, max_bs) rows.

    Rows are in batch order, each with its tokens contiguous. `n_slots` is the number of slots in whole
    blocks, and serves as the slot of padding tokens: it is out of range, so their writes are dropped.
    Likewise `n_rows`, the size of `last_token`, is the row of padding rows, and `n_states`, which is 0
    without recurrent layers, their state. Padding tokens have id 0 and position 0; padding rows have no
    tokens, kv_length 0, temperature 0 and top_p 1. Each row of the block
    table has `max_blocks` blocks; None: as many as in the message. With `one_each`, which needs a message of
    one token a row, there are `bucket` rows, and `max_blocks` need only hold what the rows have so far. A
    message with adapters needs `adapters`.
    """
    real_rows, n_blocks = message.block_table.shape
    real_tokens = message.token_ids.shape[0]
    encoder = message.encoder
    max_encoder_blocks = 0 if encoder is None else encoder.block_table.shape[1]
    rows_of_bucket = bucket if one_each else min(bucket, max_bs)
    layout = FlatLayout(
        bucket,
        rows_of_bucket,
        max_blocks or n_blocks,
        max_encoder_blocks,
        one_each,
        n_states > 0,
        adapters,
        max_drafts,
    )
    assert adapters or message.adapter is None, "rows have adapters, and the layout has no place for them"
    assert real_rows <= layout.n_rows and real_tokens <= bucket, f"{real_rows} rows, {real_tokens} tokens"
    assert not one_each or real_tokens == real_rows, f"{real_rows} rows, {real_tokens} tokens"
    buffer, arrays = padding(layout, real_tokens, real_rows, n_slots=n_slots, n_rows=n_rows)

    # Per row.
    row_start = arrays.row_start
    row_start[1 : real_rows + 1] = np.add.accumulate(message.input_length, dtype=np.int32)
    row_start[real_rows + 1 :] = real_tokens
    if n_states:
        first = np.flatnonzero(np.diff(message.row, prepend=-1))  # each state's first row
        arrays.state_start[: len(first)] = row_start[first]
        arrays.state_start[len(first) :] = real_tokens
        arrays.state_of_row[: len(first)] = message.row[first]
        arrays.state_of_row[len(first) :] = n_states
    if max_drafts:
        arrays.kept_at.fill(n_states)
        arrays.kept_at[message.states_kept[:, 0]] = message.states_kept[:, 1]
    else:
        assert not len(message.states_kept), "the layout has no place for states of drafts"
    arrays.kv_length[:real_rows] = message.kv_length
    n_sent = min(n_blocks, layout.max_blocks)  # later blocks of a row hold nothing yet
    arrays.block_table[:real_rows, :n_sent] = message.block_table[:, :n_sent]
    if encoder is not None:
        arrays.encoder_length[:real_rows] = encoder.length
        arrays.encoder_table[:real_rows] = encoder.block_table
    stored_at, known, token_index, adjusted, n_top = arrays.sampler[:_FIRST_COPIED, :real_rows]
    known[:] = message.next_token
    stored_at[:] = message.row
    stored_at[known != SAMPLED] = n_rows
    token_index[:] = message.token_index
    n_top[:] = message.sampling["logprobs"]
    arrays.sampler[_FIRST_COPIED:, :real_rows] = _copied_words(message.sampling)
    programs = token_programs(message.sampling)
    if programs.adjust:
        has_changes = (message.sampling["flags"] & ADJUSTED) > 0
        adjusted[:] = np.where(message.initiation, 1, 2) * has_changes
    if programs.drafts:
        drafted = np.flatnonzero(message.sampling["flags"] & DRAFTED)
        adjusted[drafted] = DRAFT_COUNTED + message.token_ids[row_start[drafted]]

    # Per token. If all rows are increments, each is one token, so no map from token to row is needed.
    kv_length, row, take_last = message.kv_length, message.row, message.token_on_device
    if real_tokens == real_rows:
        owner = np.arange(real_rows, dtype=np.intp)
        positions = kv_length - 1
    else:
        owner = np.arange(real_rows, dtype=np.intp).repeat(message.input_length)
        # Index + shift is position: a row's last token has index row_end - 1 and position kv_length - 1.
        shift = kv_length - row_start[1 : real_rows + 1]
        positions = np.arange(real_tokens, dtype=np.int32) + shift.take(owner)
        row, take_last = row.take(owner), take_last.take(owner)
    if message.adapter is not None:
        arrays.adapter_of_token[:real_tokens] = message.adapter.take(owner)
    arrays.token_ids[:real_tokens] = message.token_ids
    arrays.positions[:real_tokens] = positions
    place = positions // block_size
    block = message.block_table.take(owner * n_blocks + place)  # faster than indexing
    arrays.slot_of_token[:real_tokens] = (block - place) * block_size + positions
    arrays.take_last[:real_tokens] = take_last
    arrays.last_row[:real_tokens] = row * take_last  # 0 where unused, which is in range
    return FlatBatch(layout, buffer, arrays, real_tokens, real_rows, programs)


def _copied_words(sampling: npt.NDArray[np.void]) -> npt.NDArray[np.int32]:
    """A view of the first words of SAMPLING [R], as the last SamplerArrays have them: [_N_COPIED, R]."""
    return np.ndarray((_N_COPIED, len(sampling)), np.int32, sampling, strides=(4, sampling.itemsize))


def padding(
    layout: FlatLayout, real_tokens: int, real_rows: int, *, n_slots: int, n_rows: int
) -> tuple[npt.NDArray[np.int32], FlatArrays]:
    """A new buffer, and its parts, with padding after `real_tokens` tokens and `real_rows` sampler rows."""
    buffer = np.zeros(layout.size, np.int32)
    arrays = layout.split(buffer)
    arrays.slot_of_token[real_tokens:] = n_slots
    if real_rows < layout.n_rows:
        sampler = SamplerArrays(*arrays.sampler[:, real_rows:])
        sampler.row.fill(n_rows)
        sampler.known.fill(SAMPLED)
        sampler.n_top.fill(-1)
        sampler.top_p.view(np.float32).fill(1)
        sampler.repetition.view(np.float32).fill(1)
    return buffer, arrays


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The layouts of an engine.

    `buckets` ascend: those of the shape, or fewer whose last holds every batch. A deterministic engine has
    two, the smaller for decodes and the larger for prefills, and uses the same sampler for a sampled row
    whatever the other rows need.

    Any batch fits in its bucket's mixed layout. With `decode_contexts` (DECODE_CONTEXTS), a batch of decodes
    takes a layout with one token a row, and with the least of these contexts that holds every row's. So only
    the buckets of decodes have several layouts.
    """

    shape: EngineShape
    buckets: tuple[int, ...]
    decode_contexts: tuple[int | None, ...] = ()

    @property
    def layouts(self) -> list[FlatLayout]:
        """A mixed layout per bucket, and a layout per decode bucket and tier of context.

        With room for adapters there is each of them without and with adapters, so that batches without one
        run the programs of an engine that has none.
        """
        shape = self.shape
        mixed = [
            FlatLayout(
                n,
                min(n, shape.max_rows),
                shape.max_blocks,
                shape.max_encoder_blocks,
                states=shape.states,
                max_drafts=shape.max_drafts,
            )
            for n in self.buckets
        ]
        of_decodes = bucket_for(min(shape.max_rows, self.buckets[-1]), self.buckets)
        plain = mixed + [
            FlatLayout(n, n, tier, shape.max_encoder_blocks, one_each=True, states=shape.states)
            for n in self.buckets
            if n <= of_decodes
            for tier in self.tiers
        ]
        return self._with_adapted(plain)

    def _with_adapted(self, plain: list[FlatLayout]) -> list[FlatLayout]:
        adapted = [replace(layout, adapters=True) for layout in plain] if self.shape.max_adapters else []
        return adapted if self._always_adapted else plain + adapted

    def adapted(self, message: ControlMessage) -> bool:
        """Whether the message's batches have a layout with adapters."""
        return message.adapter is not None or self._always_adapted

    @property
    def _always_adapted(self) -> bool:
        """Whether batches without adapters have the layouts with them.

        In a deterministic engine another program could change the bits of rows without one.
        """
        return self.shape.deterministic and self.shape.max_adapters > 0

    @property
    def tiers(self) -> tuple[int, ...]:
        """Blocks of a row in each decode layout of a bucket, ascending."""
        shape = self.shape
        contexts = self.decode_contexts
        if shape.deterministic and shape.max_drafts:
            return ()  # a token must be computed alike with drafts and without
        if shape.deterministic:
            # A row's tier, and so the order of its sums, would depend on the other rows.
            contexts = tuple(context for context in contexts if context is None)
        return decode_tiers(shape.max_blocks, shape.block_size, contexts) if contexts else ()

    @property
    def encoder_layouts(self) -> list[FlatLayout]:
        """One layout per bucket of the encoder, or two as in `layouts`; none without an encoder."""
        shape = self.shape
        plain = [
            FlatLayout(n, min(n, shape.max_rows), shape.max_encoder_blocks) for n in shape.encoder_buckets
        ]
        return self._with_adapted(plain)

    def lay_out(self, message: ControlMessage) -> FlatBatch:
        """Lay out an iteration in the smallest bucket that holds it, or if deterministic in its phase's."""
        shape = self.shape
        bucket = bucket_for(message.token_ids.shape[0], self.buckets)
        if shape.deterministic and message.initiation.any():
            assert message.initiation.all(), "a deterministic engine never mixes phases"
            bucket = self.buckets[-1]
        tier = self._tier_of(message)
        flat = flat_batch(
            message,
            bucket=bucket,
            max_bs=shape.max_rows,
            block_size=shape.block_size,
            n_slots=shape.n_slots,
            n_rows=shape.n_rows,
            max_blocks=tier or shape.max_blocks,
            one_each=tier is not None,
            n_states=shape.n_states if shape.states else 0,
            adapters=self.adapted(message),
            max_drafts=0 if tier is not None else shape.max_drafts,
        )
        if shape.deterministic and flat.programs.sampler != "greedy":
            flat = replace(flat, programs=replace(flat.programs, sampler="full"))
        return flat

    def _tier_of(self, message: ControlMessage) -> int | None:
        """The blocks of a row in the decode layout that holds this batch; None if it takes a mixed one."""
        tiers, n_rows = self.tiers, len(message.kv_length)
        if not tiers or message.token_ids.shape[0] != n_rows:
            return None
        if self.shape.deterministic and message.initiation.any():
            return None
        if self.shape.states and (message.row[1:] == message.row[:-1]).any():
            return None  # a state has several tokens
        needed = -(-int(message.kv_length.max()) // self.shape.block_size)
        return next((tier for tier in tiers if tier >= needed), None)


@lru_cache(maxsize=64)
def decode_tiers(max_blocks: int, block_size: int, contexts: tuple[int | None, ...]) -> tuple[int, ...]:
    """Blocks of a row in each decode layout, ascending; `contexts` are BatchSizes.decode_contexts."""
    tiers = {-(-context // block_size) for context in contexts if context is not None}
    shorter = sorted(tier for tier in tiers if tier < max_blocks)
    return (*shorter, max_blocks) if None in contexts else tuple(shorter)


def batch_sizes(shape: EngineShape, attention: Attention = "native") -> BatchSizes:
    """The layouts of an engine of this shape and kind of attention, with all its buckets."""
    return BatchSizes(shape, shape.buckets, DECODE_CONTEXTS[attention])
