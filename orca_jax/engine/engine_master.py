"""The engine master: sends each iteration's control message to worker 1, and gets its tokens from worker n.

It implements `engine_protocol.Engine`. Only `wait` waits for a device (ORCA 4.1: only the last stage
synchronises).
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from struct import pack
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from orca_jax.errors import EngineError
from orca_jax.grammar.token_mask import n_words
from orca_jax.iteration.message import (
    ADJUSTED,
    BIAS,
    CONSTRAINED,
    POOLED,
    POOLS_ALL,
    POOLS_LAST,
    ROUTED,
    SAMPLED,
    ControlMessage,
    EncoderInputs,
    MakeWords,
    neutral_sampling,
    no_copies,
)
from orca_jax.iteration.row import Row
from orca_jax.request.request import Request, RequestState
from orca_jax.request.sampled import Sampled, TokenLogprobs, token_logprobs
from orca_jax.scheduling.engine_protocol import Iteration, Returned, never
from orca_jax.scheduling.kv_manager import KVManager

_POLL_SECONDS = 100e-6  # much shorter than an iteration, much longer than a poll

_FINISHED = RequestState.FINISHED

_NO_IDS, _NO_BIASES = np.zeros(0, np.int32), np.zeros(0, BIAS)

_POOLS = {None: 0, "last": POOLS_LAST, "mean": POOLS_ALL}

# The fields that message.SAMPLING copies from SamplingParams, in its order.
_copied_fields = attrgetter(
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "top_k",
)
_Integer = TypeVar("_Integer", np.int32, np.intp)

_NOT_POOLED = ~np.uint8(POOLED)


class PendingTokens(Protocol):
    """The tokens of an issued batch, which may still be being computed."""

    def is_ready(self) -> bool:
        """Whether `fetch` would return at once."""
        ...

    def fetch(self) -> Sampled:
        """Wait for the tokens."""
        ...


class Workers(Protocol):
    """Workers 1 to n, which run iterations in the order they are issued."""

    def issue(self, message: ControlMessage, words: MakeWords) -> PendingTokens:
        """Start one iteration and return without waiting for the device.

        If rows are constrained, the workers call `words` for their token masks: here, and in each later call
        of `issue` or of any PendingTokens until it returns them.
        """
        ...


class _Sent(NamedTuple):
    """The rows of a message: each one's request, number of tokens, and row of the block table.

    `first` has each request's first row; None: each request has one row. A given output has a row for each of
    its tokens, a search one for each of its beams.
    """

    requests: Sequence[Request]
    lengths: Sequence[int]
    places: npt.NDArray[np.intp]  # [R]
    first: Sequence[int] | None = None


class _Issued(NamedTuple):
    """An iteration in flight."""

    tokens: PendingTokens
    sent: _Sent
    message: ControlMessage


class EngineMaster:
    """Turns batches of requests into iterations of the workers, in order.

    The constant data of a row is stored when a request starts in it: when the row is newly reserved, or when
    `n_computed` differs from its value after the row's last iteration, as after a loss. So a message consists
    of NumPy gathers. `vocab_size` is the model's. With `keeps_tokens`, the device of the first of the
    `n_workers` holds each row's last token. Otherwise tokens go through the host, which has received a
    request's token before the request is issued again (ORCA 4.1). `sleep` waits between two polls of a batch.
    After an EngineError from `issue` or `wait`, all iterations in flight and the K/V cache are lost; requests
    that resume must have `n_computed` 0.
    """

    def __init__(
        self,
        workers: Workers,
        kv: KVManager,
        *,
        vocab_size: int,
        n_workers: int = 1,
        keeps_tokens: bool = True,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.n_workers = n_workers
        self.keeps_tokens = keeps_tokens
        self._workers = workers
        self._kv = kv
        self._n_words = n_words(vocab_size)
        self._sleep = sleep
        self._n_issued = 0
        # By row [n_rows]; the first five are set when a request starts in the row.
        self._n_reserved = np.zeros(kv.n_rows, np.int64)  # identifies the request: KVManager.n_reserved
        self._sampling = neutral_sampling(kv.n_rows)
        self._n_prompt = np.zeros(kv.n_rows, np.int32)
        self._has_constraint = np.zeros(kv.n_rows, np.bool_)
        self._has_sampled = np.zeros(kv.n_rows, np.bool_)  # the row's initiation is over
        self._is_asked_of_prompts = False  # whether a row was ever to score or pool its prompt
        self._kv_length = np.zeros(kv.n_rows, np.int32)  # tokens in the cache after all issued iterations

    def issue(self, rows: Sequence[Row]) -> Iteration:
        """Start one iteration; never blocks on the device. Raises EngineError."""
        try:
            sent = self._sent(rows)
            message = self._control_message(sent)
            pending = self._workers.issue(message, partial(self._words, sent.requests, message))
        except EngineError:
            raise
        except Exception as error:
            raise self._failed(error) from error
        self._n_issued += 1
        return Iteration(rows, _Issued(pending, sent, message))

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        """The tokens of the oldest iteration; None if `interrupted` returned True before it was done.

        Raises EngineError.
        """
        issued: _Issued = iteration.pending
        pending, (requests, _, _, first), message = issued
        try:
            while interrupted is not never and not pending.is_ready():
                if interrupted():
                    return None
                self._sleep(_POLL_SECONDS)
            sampled = pending.fetch()
        except EngineError:
            raise
        except Exception as error:
            raise self._failed(error) from error
        token_ids = sampled.token_ids[: len(requests)].tolist()
        if sampled.logprobs is None and not (sampled.prompt_logprobs or sampled.pooled or sampled.routed):
            return Returned(token_ids)
        wanted = [(i, _n_logprobs(request)) for i, request in enumerate(requests)]
        records = sampled.logprobs
        returned = Returned(
            token_ids,
            {} if records is None else {i: token_logprobs(records[i], n) for i, n in wanted if n is not None},
            {
                i: [token_logprobs(record, requests[i].sampling.prompt_logprobs or 0) for record in prompt]
                for i, prompt in sampled.prompt_logprobs.items()
            },
            pooled=sampled.pooled,
            routed={
                i: (int(message.kv_length[i] - message.input_length[i]), ids)
                for i, ids in sampled.routed.items()
            },
        )
        return returned if first is None else _by_request(returned, iteration.rows, first)

    def _words(self, requests: Sequence[Request], message: ControlMessage) -> npt.NDArray[np.int32] | None:
        """Token masks of the constrained rows, [constrained rows, n_words]; None if a token is missing.

        For a request that has ended meanwhile, the mask allows every token: the result is discarded.
        """
        constrained: list[int] = np.flatnonzero(message.constrained).tolist()
        own = [requests[i] for i in constrained]
        n_before = message.token_index[constrained].tolist()
        for request, n in zip(own, n_before, strict=True):
            if len(request.output_ids) < n and request.state is not _FINISHED:
                return None
        words = np.full((len(constrained), self._n_words), -1, np.int32)
        for request, into in zip(own, words, strict=True):
            if request.state is not _FINISHED:
                assert request.constraint is not None
                try:
                    request.constraint.allowed(request.prompt_ids, request.output_ids, into)
                except Exception as error:  # ends only this request, with its next token
                    request.failure = f"{type(error).__name__}: {error}"
                    into[:] = -1
        return words

    def _failed(self, error: Exception) -> EngineError:
        return EngineError(f"iteration {self._n_issued} failed: {type(error).__name__}: {error}")

    def _sent(self, rows: Sequence[Row]) -> _Sent:
        """The rows of the message: several for a given output in an increment, and for a search."""
        requests, lengths = [request for request, _ in rows], [n_tokens for _, n_tokens in rows]
        places = [request.row for request in requests if request.beams is None and not request.given_ids]
        if len(places) == len(rows):
            return _Sent(requests, lengths, _array(places, np.intp))
        requests, lengths, places = list[Request](), list[int](), list[int]()
        first: list[int] = []
        for request, n_tokens in rows:
            first.append(len(requests))
            own = [request.row]
            if not request.in_initiation and request.beams is not None:
                own = self._kv.beam_rows(request.row)
            elif not request.in_initiation and request.given_ids:
                own *= n_tokens
            requests += [request] * len(own)
            lengths += [n_tokens if request.in_initiation else 1] * len(own)
            places += own
        return _Sent(requests, lengths, _array(places, np.intp), first)

    def _control_message(self, sent: _Sent) -> ControlMessage:
        requests, lengths, row, first = sent
        n = len(requests)
        start = _array([request.n_computed for request in requests], np.int32)
        input_length = _array(lengths, np.int32)
        starts = self._n_reserved.take(row) != self._kv.n_reserved.take(row)
        starts |= self._kv_length.take(row) != start
        for i in starts.nonzero()[0].tolist():
            self._store_row(requests[i], int(row[i]))
        given = beams = np.zeros(n, np.bool_)
        if first is not None:
            given = np.array([bool(request.given_ids) for request in requests], np.bool_)
            # Those that go on from their newest token.
            beams = np.array([r.beams is not None and not r.in_initiation for r in requests], np.bool_)
            self._end_initiation(row[beams])  # also in a row that is new to the search
            first_of = np.repeat(first, np.diff([*first, n]))  # of each row, the first of its request
            start = start + given * (np.arange(n) - first_of).astype(np.int32)
        kv_length = start + input_length
        self._kv_length[row] = kv_length
        initiation = ~self._has_sampled.take(row)
        told = initiation | given | beams  # rows whose input the host knows
        n_prompt = np.zeros(n, np.int32)
        next_token = n_prompt + np.int32(SAMPLED)
        row_end = np.add.accumulate(input_length, dtype=np.int32)
        token_ids = np.zeros(row_end[-1], np.int32)
        initiation_rows: list[int] = initiation.nonzero()[0].tolist()
        for i in initiation_rows if first is None else (initiation | given).nonzero()[0].tolist():
            known = requests[i].known_ids(int(start[i]), int(kv_length[i]) + 1)
            token_ids[row_end[i] - input_length[i] : row_end[i]] = known[: input_length[i]]
            next_token[i : i + 1] = known[input_length[i] :] or SAMPLED
            n_prompt[i] = self._n_prompt[row[i]] * initiation[i]
        samples = chooses = next_token == SAMPLED
        n_output = kv_length - self._n_prompt.take(row)
        if first is not None:  # given rows choose too: they are told what they would have chosen
            chooses = samples | (given & (n_output >= 0))
        token_index = n_output * samples
        sampling = self._sampling.take(row)  # of records ten times as fast as an index
        if initiation_rows:
            self._end_initiation(row[initiation & chooses])
        for i in (~samples).nonzero()[0].tolist():  # needs no sampler
            sampling["temperature"][i] = 0
            sampling["flags"][i] &= POOLS_ALL | ROUTED
            if not chooses[i]:
                sampling["logprobs"][i] = -1
        for i in (self._has_constraint.take(row) & samples).nonzero()[0].tolist():
            constraint = requests[i].constraint
            assert constraint is not None
            if constraint.acts(int(token_index[i])):
                sampling["flags"][i] |= CONSTRAINED
        for i in first or ():
            search = requests[i].beams
            if search is not None and beams[i]:
                newest = search.last_ids
                token_ids[row_end[i : i + len(newest)] - 1] = newest
        if not self.keeps_tokens:
            for i in (~told).nonzero()[0].tolist():
                token_ids[row_end[i] - 1] = requests[i].output_ids[-1]
        biases: list[tuple[int, int, float]] = []
        earlier_ids: list[int] = []
        for i in initiation_rows:
            if sampling["flags"][i] & ADJUSTED:
                earlier_ids += requests[i].known_ids(0, int(start[i]))
                biases += [(i, *bias) for bias in requests[i].sampling.logit_bias.items()]
        encoder: EncoderInputs | None = None
        if self._kv.max_encoder_blocks:
            table, encoder = self._encoder_inputs(requests, row, self._kv.block_table.take(row, axis=0))
        else:  # only what is in use: of a model with many positions it is little
            table = self._kv.block_table[row, : self._kv.n_blocks_for(int(kv_length.max()))]
        return ControlMessage(
            row=row.astype(np.int32),
            initiation=initiation,
            token_index=token_index,
            input_length=input_length,
            kv_length=kv_length,
            n_prompt=n_prompt,
            next_token=next_token,
            token_ids=token_ids,
            earlier_ids=np.array(earlier_ids, np.int32) if earlier_ids else _NO_IDS,
            token_on_device=~told if self.keeps_tokens else np.zeros(n, np.bool_),
            block_table=table,
            sampling=sampling,
            bias=np.array(biases, BIAS) if biases else _NO_BIASES,
            encoder=encoder,
            copies=np.array(self._kv.copies, np.int32) if self._kv.copies else no_copies(),
        )

    def _encoder_inputs(
        self, requests: Sequence[Request], row: npt.NDArray[np.intp], table: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int32], EncoderInputs]:
        """The decoder's part of block tables [R, all], and the encoder's with its inputs."""
        n = self._kv.max_encoder_blocks
        places = self._kv.encoder_blocks[row][:, np.newaxis] + np.arange(table.shape[1] - n)
        ids = [token_id for request in requests if request.n_to_encode for token_id in request.encoder_ids]
        length = np.array([len(request.encoder_ids) for request in requests], np.int32)
        own = EncoderInputs(length, np.array(ids, np.int32), table[:, :n])
        return np.take_along_axis(table, places, axis=1), own

    def _end_initiation(self, row: npt.NDArray[np.intp]) -> None:
        """The next iterations of these rows are increments, in which nothing of the prompt is computed."""
        self._has_sampled[row] = True
        if self._is_asked_of_prompts:
            self._sampling["prompt_logprobs"][row] = -1
            self._sampling["flags"][row] &= _NOT_POOLED

    def _store_row(self, request: Request, row: int) -> None:
        """Store the constant data of a row of the request."""
        params, n_logprobs = request.sampling, _n_logprobs(request)
        n_prompt_logprobs = params.prompt_logprobs if request.prompt_logprobs is None else None
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        flags = ADJUSTED if params.logit_bias or penalties != (1, 0, 0) else 0
        flags |= ROUTED if params.return_routed_experts else 0
        self._sampling[row] = (
            request.seed,
            *_copied_fields(params),
            -1 if n_logprobs is None else n_logprobs,
            -1 if n_prompt_logprobs is None else n_prompt_logprobs,
            flags | _POOLS[request.pooling],
        )
        if n_prompt_logprobs is not None or request.pooling is not None:
            self._is_asked_of_prompts = True
        if request.beams is not None:
            self._sampling["temperature"][row] = 0
        self._n_reserved[row] = self._kv.n_reserved[row]
        self._n_prompt[row] = len(request.prompt_ids)
        self._has_constraint[row] = request.constraint is not None
        self._has_sampled[row] = False


def _array(numbers: Sequence[int], dtype: type[_Integer]) -> npt.NDArray[_Integer]:
    """A read-only array of these numbers, in half the time that np.array takes."""
    code = "n" if dtype is np.intp else "i"
    return np.frombuffer(pack(f"{len(numbers)}{code}", *numbers), dtype)


def _n_logprobs(request: Request) -> int | None:
    """Of how many of the likeliest tokens it needs log-probabilities; None: not even of its own."""
    return request.sampling.logprobs if request.beams is None else request.beams.n_candidates


def _by_request(returned: Returned, rows: Sequence[Row], first: Sequence[int]) -> Returned:
    """The results by place in `rows`, of those by place in the message."""
    ends = [*first[1:], len(returned.token_ids)]

    def records(i: int) -> list[TokenLogprobs]:
        return [returned.logprobs[place] for place in range(first[i], ends[i]) if place in returned.logprobs]

    return Returned(
        [returned.token_ids[place] for place in first],
        {i: returned.logprobs[place] for i, place in enumerate(first) if place in returned.logprobs},
        {i: returned.prompt_logprobs[p] for i, p in enumerate(first) if p in returned.prompt_logprobs},
        {i: records(i) for i, (request, _) in enumerate(rows) if request.given_ids},
        {i: records(i) for i, (request, _) in enumerate(rows) if request.beams is not None},
        {i: returned.pooled[place] for i, place in enumerate(first) if place in returned.pooled},
        {i: returned.routed[place] for i, place in enumerate(first) if place in returned.routed},
    )
