"""Chooses next tokens on the last stage: the programs, and the tables that they keep on the device.

There are a few programs for each number of rows R, whatever the bucket and the sampling parameters: biases
and penalties, constraints, three samplers, log-probabilities. An iteration runs those that its rows need
(`flat_batch.TokenPrograms`), so greedy rows pay for the greedy sampler alone. On a CPU with a C compiler a
sampler also computes the log-probabilities, while the logits are in the cache (native/token_choice.c).
"""

import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from orca_jax.execution.programs import Program, ToCompile
from orca_jax.execution.routed import DeviceRouted, joined
from orca_jax.grammar.token_mask import n_words
from orca_jax.iteration.flat_batch import DRAFT_COUNTED, FlatBatch, Sampler, SamplerArrays, TokenPrograms
from orca_jax.iteration.message import SAMPLED, ControlMessage
from orca_jax.model.sampler import IN_PROMPT, adjust, allow, greedy, logprobs, sample, uniform
from orca_jax.native.compiler import NotBuilt
from orca_jax.native.token_choice import choice_target, native_choice
from orca_jax.request.pooled_vector import Vector
from orca_jax.request.routed_experts import ExpertIds
from orca_jax.request.sampled import LOGPROB_WORDS, Sampled, as_records
from orca_jax.request.sampling_params import MAX_TOP_LOGPROBS


class Tables(NamedTuple):
    """State of rows with biases or penalties; other rows' entries may hold anything."""

    seen: jax.Array  # [n_rows, V] int32: a token's occurrences in the output, plus IN_PROMPT
    bias: jax.Array  # [n_rows, V] float32


class RowStart(NamedTuple):
    """A row's initial entries in the tables."""

    row: int
    seen: npt.NDArray[np.int32]  # [V]
    bias: npt.NDArray[np.float32]  # [V]


class PromptReads(NamedTuple):
    """Results for prompt tokens on their way to the host; a place is a row's index in the batch."""

    scores: dict[int, list[tuple[jax.Array, int]]]  # by place: parts, each LOGPROBS as words and its tokens
    pooled: list[tuple[jax.Array, list[int]]]  # parts: sums of hidden states so far, and their rows' places
    routed: Sequence[DeviceRouted]  # experts in each stage, first to last

    def arrays(self) -> Iterator[jax.Array]:
        """The arrays to copy from the device."""
        for parts in self.scores.values():
            yield from (part for part, _ in parts)
        yield from (part for part, _ in self.pooled)
        for stage in self.routed:
            yield from stage.arrays()

    def fetch(self) -> tuple[dict[int, npt.NDArray[np.void]], dict[int, Vector], dict[int, ExpertIds]]:
        """Wait for the device; the results by place, as in `Sampled`."""
        nothing = np.zeros((0, LOGPROB_WORDS), np.int32)  # a prompt of one token has no part
        prompts = {
            place: as_records(np.concatenate([nothing, *(np.asarray(part)[:n] for part, n in parts)]))
            for place, parts in self.scores.items()
        }
        pooled: dict[int, Vector] = {}
        for part, places in self.pooled:
            pooled |= zip(places, np.asarray(part), strict=False)  # padding rows follow
        return prompts, pooled, joined([stage.fetch() for stage in self.routed])


class DeviceTokens:
    """An iteration's samples on their way to the host: tokens [R] int32, and LOGPROBS as words."""

    def __init__(
        self, tokens: jax.Array, logprobs: jax.Array | None = None, reads: PromptReads | None = None
    ) -> None:
        self.tokens, self.logprobs, self._reads = tokens, logprobs, reads
        self._done: threading.Event | None = None
        for array in self._arrays():
            array.copy_to_host_async()

    def is_ready(self) -> bool:
        """Whether `fetch` would return at once."""
        # jax's stub lacks `is_ready`.
        return all(array.is_ready() for array in self._arrays())  # pyright: ignore[reportAttributeAccessIssue]

    def wait(self, seconds: float) -> None:
        """Wait for the device, at most `seconds`.

        Polling instead would take up to a fifth of a small machine's time from the device.
        """
        if self._done is None:  # the first of several waits
            self._done = threading.Event()
            threading.Thread(
                target=self._wait_for_device, args=(self._done,), name="orca-wait", daemon=True
            ).start()
        self._done.wait(seconds)

    def _wait_for_device(self, done: threading.Event) -> None:
        """Run on a thread that ends with the iteration, because jax has no wait with a limit."""
        with suppress(Exception):  # `fetch` raises it
            jax.block_until_ready([*self._arrays()])
        done.set()

    def fetch(self) -> Sampled:
        """Wait for the device and return everything. Raises what failed there."""
        records = None if self.logprobs is None else as_records(np.asarray(self.logprobs))
        tokens = np.asarray(self.tokens)
        if self._reads is None:
            return Sampled(tokens, records)
        return Sampled(tokens, records, *self._reads.fetch())

    def _arrays(self) -> Iterator[jax.Array]:
        yield self.tokens
        if self.logprobs is not None:
            yield self.logprobs
        if self._reads is not None:
            yield from self._reads.arrays()


class TokenChooser:
    """Chooses rows' next tokens from their logits, with tables for `n_rows` admitted requests.

    `place` is the sharding of all arrays. Without `native` everything runs in JAX, even where it could run in
    C. With `drafts` the programs that count drafts are compiled ahead too.
    """

    def __init__(
        self,
        vocab_size: int,
        n_rows: int,
        place: jax.sharding.Sharding,
        *,
        native: bool = True,
        drafts: bool = False,
    ) -> None:
        self._vocab_size, self._n_rows, self._place = vocab_size, n_rows, place
        self._drafts = drafts
        self._native = native and all(map(has_native_choice, place.device_set))
        choose = _choose_natively if self._native else _choose
        shape = (n_rows, vocab_size)

        def no_tokens() -> tuple[jax.Array, Tables]:
            tables = Tables(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
            return jnp.zeros(n_rows, jnp.int32), tables

        def by_rows(
            logits: jax.Array, *others: Any, sampler: Sampler | None = None, drafts: bool = False
        ) -> Hashable:
            return logits.shape[0], sampler, drafts

        self._empty = Program(jax.jit(no_tokens, out_shardings=place), key=lambda: ())
        self._set_row = Program(jax.jit(_set_row, donate_argnames="tables"), key=lambda *_: ())
        self._adjust = Program(
            jax.jit(_adjust, static_argnames="drafts", donate_argnames="tables"), key=by_rows
        )
        self._count = Program(
            jax.jit(_count_kept, donate_argnames="tables"), key=lambda tokens, *_: tokens.shape
        )
        self._allow = Program(jax.jit(allow), key=by_rows)
        self._choose = Program(
            jax.jit(choose, static_argnames="sampler", donate_argnames="last_token"), key=by_rows
        )
        self._logprobs = Program(jax.jit(_next_logprobs), key=by_rows)
        self.last_token: jax.Array  # [n_rows] int32
        self._tables: Tables
        self.renew()

    def renew(self) -> None:
        """Forget every row."""
        self.last_token, self._tables = self._empty()

    def give_up(self) -> None:
        """Free the device's memory; `renew` must follow before the next choice."""
        del self.last_token, self._tables

    def begin_rows(self, message: ControlMessage) -> None:
        """Set up the tables of rows with biases or penalties that start to sample, or resume after a loss."""
        for start in row_starts(message, self._vocab_size):
            parts = jax.device_put((np.int32(start.row), start.seen, start.bias), self._place)
            self._tables = self._set_row(self._tables, *parts)

    def choose(
        self,
        raw: jax.Array,
        rows: jax.Array,
        programs: TokenPrograms,
        words: npt.NDArray[np.int32] | None = None,
        reads: PromptReads | None = None,
    ) -> DeviceTokens:
        """Start choosing each row's next token, and computing LOGPROBS if a row asks for them.

        `raw` [R, V] float32 are the model's logits, `rows` [n, R] the buffer's SamplerArrays, and `words`
        [R, n_words] all rows' token masks (`row_words`). `reads` goes to the host with the tokens.
        """
        logits = raw
        if programs.adjust:
            tables, last = self._tables, self.last_token
            logits, self._tables = self._adjust(logits, rows, tables, last, drafts=programs.drafts)
        if words is not None:
            logits = self._allow(logits, jax.device_put(words, self._place))
        choice = self._choose(logits, raw, rows, self.last_token, sampler=programs.sampler)
        tokens, self.last_token, records = choice
        if programs.drafts:
            self._tables = self._count(tokens, rows, self._tables)
        if programs.logprobs and records is None:
            records = self._logprobs(raw, rows, tokens)
        return DeviceTokens(tokens, records if programs.logprobs else None, reads)

    def programs(self, n_rows: Iterable[int]) -> Iterator[ToCompile]:
        """All programs that batches of each of these numbers of rows may need."""

        def array(dtype: Any, *shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self._place)

        int32, float32, vocabulary = jnp.int32, jnp.float32, self._vocab_size
        last_token = array(int32, self._n_rows)
        tables = Tables(array(int32, self._n_rows, vocabulary), array(float32, self._n_rows, vocabulary))
        row = array(int32), array(int32, vocabulary), array(float32, vocabulary)
        yield ToCompile("no tokens seen", self._empty.compile)
        yield ToCompile("a row's start", partial(self._set_row.compile, tables, *row))
        for r in n_rows:
            logits, rows = array(float32, r, vocabulary), array(int32, len(SamplerArrays._fields), r)
            words, tokens = array(int32, r, n_words(vocabulary)), array(int32, r)
            said = f"{r} rows" if r > 1 else "1 row"
            adjust = partial(self._adjust.compile, logits, rows, tables, last_token)
            yield ToCompile(f"biases and penalties, {said}", partial(adjust, drafts=False))
            if self._drafts:
                with_drafts = f"biases and penalties with drafts, {said}"
                yield ToCompile(with_drafts, partial(adjust, drafts=True))
                yield ToCompile(f"kept drafts, {said}", partial(self._count.compile, tokens, rows, tables))
            yield ToCompile(f"constraints, {said}", partial(self._allow.compile, logits, words))
            for sampler in get_args(Sampler):
                choose = partial(self._choose.compile, logits, logits, rows, last_token, sampler=sampler)
                yield ToCompile(f"{sampler} sampler, {said}", choose)
            if not self._native:
                logprobs = partial(self._logprobs.compile, logits, rows, tokens)
                yield ToCompile(f"log-probabilities, {said}", logprobs)


def has_native_choice(device: Any) -> bool:
    """Whether this jax.Device chooses tokens in C."""
    try:
        return device.platform == "cpu" and bool(choice_target())
    except NotBuilt:
        return False


def row_words(
    words: npt.NDArray[np.int32], message: ControlMessage, flat: FlatBatch
) -> npt.NDArray[np.int32]:
    """The token masks of all rows [R, n_words], from those of the constrained rows."""
    every = np.full((flat.layout.n_rows, words.shape[1]), -1, np.int32)  # all tokens allowed
    every[np.flatnonzero(message.constrained)] = words
    return every


def row_starts(message: ControlMessage, vocab_size: int) -> list[RowStart]:
    """Initial table entries of rows with biases or penalties that start to sample, or resume after a loss."""
    starts: list[RowStart] = []
    ends = np.cumsum(message.input_length)
    n_earlier = message.kv_length - message.input_length
    start = 0  # in earlier_ids
    for i in np.flatnonzero(message.set_up):
        earlier = message.earlier_ids[start : start + n_earlier[i]]
        start += n_earlier[i]
        tokens = np.concatenate((earlier, message.token_ids[ends[i] - message.input_length[i] : ends[i]]))
        prompt, output = np.split(tokens, [message.n_prompt[i]])
        seen = np.bincount(output, minlength=vocab_size).astype(np.int32)
        seen[prompt] |= IN_PROMPT
        bias = np.zeros(vocab_size, np.float32)
        entries = message.bias[message.bias["index"] == i]
        bias[entries["token_id"]] = entries["value"]
        starts.append(RowStart(int(message.row[i]), seen, bias))
    return starts


def packed_logprobs(
    logits: jax.Array, tokens: jax.Array, n_top: jax.Array, *, native: bool = False
) -> jax.Array:
    """sampled.LOGPROBS as words [R, LOGPROB_WORDS]: logits [R, V] float32, tokens [R] int32.

    Every row gets at least as many of the most likely tokens as the largest `n_top` (SamplerArrays).
    """
    if native:
        none = jnp.zeros(tokens.shape, jnp.float32)
        n_each = jnp.broadcast_to(jnp.maximum(n_top.max(), 0), tokens.shape)
        return native_choice(logits, logits, tokens, none, none, none, n_each, max_top=MAX_TOP_LOGPROBS)[1]
    chosen, ids, top = logprobs(logits, tokens, MAX_TOP_LOGPROBS, n_top > 0)
    bits = partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
    return jnp.concatenate([tokens[:, None], bits(chosen)[:, None], ids, bits(top)], axis=1)


def _next_logprobs(logits: jax.Array, rows: jax.Array, tokens: jax.Array) -> jax.Array:
    """packed_logprobs of each row's token: the one that its request forces, or the sampled one."""
    batch = SamplerArrays(*rows)
    return packed_logprobs(logits, jnp.where(batch.known == SAMPLED, tokens, batch.known), batch.n_top)


def _set_row(tables: Tables, row: jax.Array, seen: jax.Array, bias: jax.Array) -> Tables:
    return Tables(tables.seen.at[row].set(seen, mode="drop"), tables.bias.at[row].set(bias, mode="drop"))


def _adjust(
    logits: jax.Array, rows: jax.Array, tables: Tables, last_token: jax.Array, *, drafts: bool = False
) -> tuple[jax.Array, Tables]:
    """Count each row's previous token, then apply biases and penalties.

    With `drafts`, drafted rows count their input and the inputs before it, without keeping these counts.
    """
    batch = SamplerArrays(*rows)
    last = last_token.at[batch.row].get(mode="clip")
    seen = tables.seen.at[batch.row, last].add(batch.adjusted == 2, mode="drop")
    counts = seen.at[batch.row].get(mode="clip")
    if drafts:
        before, inputs = _inputs_before(batch)
        each = jnp.arange(len(before))[:, None]
        counts = counts.at[each, inputs[None, :]].add(before)
    has = (batch.adjusted > 0)[:, None]
    adjusted = adjust(
        logits,
        jnp.where(has, counts, 0),
        jnp.where(has, tables.bias.at[batch.row].get(mode="clip"), 0.0),
        _real(batch.repetition),
        _real(batch.frequency),
        _real(batch.presence),
    )
    return adjusted, Tables(seen, tables.bias)


def _inputs_before(batch: SamplerArrays) -> tuple[jax.Array, jax.Array]:
    """[R, R]: whether a row is drafted, of the first row's request and not after it; and the inputs [R]."""
    place = jnp.arange(len(batch.row))
    drafted = batch.adjusted >= DRAFT_COUNTED
    same = (batch.row[:, None] == batch.row[None, :]) & drafted[:, None] & drafted[None, :]
    inputs = jnp.where(drafted, batch.adjusted - DRAFT_COUNTED, 0)
    return same & (place[None, :] <= place[:, None]), inputs


def _count_kept(tokens: jax.Array, rows: jax.Array, tables: Tables) -> Tables:
    """Count the newest token of each drafted output, and the drafts after it that are right.

    `tokens` [R] were sampled. A draft is right if all before it are, and the row before sampled it.
    """
    batch = SamplerArrays(*rows)
    before, inputs = _inputs_before(batch)
    is_first = before.sum(1) == 1
    is_wrong = ~is_first & (inputs != jnp.roll(tokens, 1))
    kept = before.any(1) & ~(before & is_wrong[None, :]).any(1)
    return Tables(tables.seen.at[batch.row, inputs].add(kept, mode="drop"), tables.bias)


def _choose(
    logits: jax.Array, raw: jax.Array, rows: jax.Array, last_token: jax.Array, *, sampler: Sampler
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Each row's next token [R] int32, last_token [n_rows] updated with it, and no log-probabilities.

    logits [R, V] float32 are adjusted, `raw` are the model's.
    """
    del raw
    batch = SamplerArrays(*rows)
    tokens = greedy(logits) if sampler == "greedy" else _sample(logits, batch, cut=sampler == "full")
    return tokens, last_token.at[batch.row].set(tokens, mode="drop"), None


def _choose_natively(
    logits: jax.Array, raw: jax.Array, rows: jax.Array, last_token: jax.Array, *, sampler: Sampler
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """As _choose, with the log-probabilities of the rows that ask for them, as packed_logprobs packs them."""
    batch = SamplerArrays(*rows)
    known, none = batch.known, jnp.zeros(len(logits), jnp.float32)
    draw = (none, none, none)
    if sampler != "greedy":
        number = uniform(batch.seed_low, batch.seed_high, batch.token_index)
        draw = (_real(batch.temperature), _real(batch.min_p), number)
    if sampler == "full":
        cut = (known == SAMPLED) & ((batch.top_k > 0) | (_real(batch.top_p) < 1))
        known = jnp.where(cut, _sample(logits, batch, cut=True), known)
    tokens, words = native_choice(logits, raw, known, *draw, batch.n_top, max_top=MAX_TOP_LOGPROBS)
    return tokens, last_token.at[batch.row].set(tokens, mode="drop"), words


def _sample(logits: jax.Array, batch: SamplerArrays, *, cut: bool) -> jax.Array:
    return sample(
        logits,
        _real(batch.temperature),
        batch.top_k,
        _real(batch.top_p),
        _real(batch.min_p),
        batch.seed_low,
        batch.seed_high,
        batch.token_index,
        cut=cut,
    )


def _real(bits: Any) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
