"""The engine master: sends each iteration's control message to worker 1, and gets its tokens from worker n.

It implements `engine_protocol.Engine`. Only `wait` waits for a device (ORCA 4.1: only the last stage
synchronises).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from orca_jax.config import ServingConfig
from orca_jax.engine_memory import EngineMemory
from orca_jax.errors import EngineError
from orca_jax.families.model_config import ModelConfig
from orca_jax.grammar.token_mask import n_words
from orca_jax.iteration.message import ControlMessage, MakeWords
from orca_jax.iteration.rows.message_builder import BlockTables, MessageBuilder, SentRows
from orca_jax.request.pooled_vector import Vector
from orca_jax.request.request import Request, RequestState, Row, RowAnswer, SharedDrafter
from orca_jax.request.routed_experts import ExpertIds
from orca_jax.request.sampled import Sampled, TokenLogprobs, token_logprobs
from orca_jax.scheduling.adapter_slots import AdapterStore
from orca_jax.scheduling.engine_protocol import Iteration, Returned, never
from orca_jax.scheduling.kv_manager import KVManager

# Interval of checks for an interruption while waiting for tokens, whose arrival ends the wait at once.
LOOK_SECONDS = 1e-3

_FINISHED = RequestState.FINISHED
T = TypeVar("T")


class PendingTokens(Protocol):
    """The tokens of an issued batch, which may still be being computed."""

    def is_ready(self) -> bool:
        """Whether `fetch` would return at once."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until something has happened, such as that the tokens are here; at most `seconds`."""
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


class _Issued(NamedTuple):
    """An iteration in flight."""

    tokens: PendingTokens
    sent: SentRows
    message: ControlMessage


class EngineMaster:
    """Turns batches of requests into iterations of the workers, in order.

    `vocab_size` is the model's. With `keeps_tokens`, the device of the first of the `n_workers` holds each
    row's last token. Otherwise tokens go through the host, which has received a request's token before the
    request is issued again (ORCA 4.1). An interruptible wait looks for interruptions every `look_seconds`.
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
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self.n_workers = n_workers
        self.keeps_tokens = keeps_tokens
        self._workers = workers
        self._kv = kv
        self._n_words = n_words(vocab_size)
        self._look_seconds = look_seconds
        self._n_issued = 0
        tables = BlockTables(
            block_size=kv.block_size,
            block_table=kv.block_table,
            n_reserved=kv.n_reserved,
            encoder_blocks=kv.encoder_blocks,
            max_encoder_blocks=kv.max_encoder_blocks,
            rows_of=kv.beams.rows_of,
        )
        self._builder = MessageBuilder(tables, keeps_tokens=keeps_tokens)

    def issue(self, rows: Sequence[Row]) -> Iteration:
        """Start one iteration; never blocks on the device. Raises EngineError."""
        kv = self._kv
        try:
            sent = self._builder.rows(rows)
            message = self._builder.message(sent, kv.copies, kv.state_copies, kv.host_copies)
            pending = self._workers.issue(message, partial(self._words, sent.requests, message))
        except EngineError:
            raise
        except Exception as error:
            raise self._failed(error) from error
        self._n_issued += 1
        for tier in kv.tiers:
            tier.n_issued += 1
        return Iteration(rows, _Issued(pending, sent, message))

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        """The tokens of the oldest iteration; None if `interrupted` returned True before it was done.

        Raises EngineError.
        """
        issued: _Issued = iteration.pending
        pending, sent, message = issued
        try:
            while interrupted is not never and not pending.is_ready():
                if interrupted():
                    return None
                pending.wait(self._look_seconds)
            sampled = pending.fetch()
        except EngineError:
            raise
        except Exception as error:
            raise self._failed(error) from error
        token_ids = sampled.token_ids[: len(sent.requests)].tolist()
        has_more = sampled.logprobs is not None or sent.places
        if not (has_more or sampled.prompt_logprobs or sampled.pooled or sampled.routed):
            return Returned(token_ids)
        answers = _answers(sampled, token_ids, sent) if has_more else {}
        if sent.first is not None:
            token_ids = [token_ids[i] for i in sent.first[:-1]]
        return Returned(token_ids, answers, *_of_prompts(sampled, sent, message))

    def _words(self, requests: Sequence[Request], message: ControlMessage) -> npt.NDArray[np.int32] | None:
        """Token masks of the constrained rows, [constrained rows, n_words]; None if a token is missing.

        For a request that has ended meanwhile, the mask allows every token: the result is discarded.
        """
        constrained: list[int] = np.flatnonzero(message.constrained).tolist()
        waiting = [requests[i] for i in constrained]
        n_before = message.token_index[constrained].tolist()
        for request, n in zip(waiting, n_before, strict=True):
            n_known = len(request.output_ids) + len(request.kind.sent)
            if n_known < n and request.state is not _FINISHED:
                return None
        words = np.full((len(constrained), self._n_words), -1, np.int32)
        of_drafts = dict[Request, npt.NDArray[np.int32]]()
        for request, n, into in zip(waiting, n_before, words, strict=True):
            if request.state is not _FINISHED:
                try:
                    self._write_mask(request, n - len(request.output_ids), into, of_drafts)
                except Exception as error:  # ends only this request, with its next token
                    request.failure = f"{type(error).__name__}: {error}"
                    into[:] = -1
        return words

    def _write_mask(
        self,
        request: Request,
        n_drafts: int,
        into: npt.NDArray[np.int32],
        of_drafts: dict[Request, npt.NDArray[np.int32]],
    ) -> None:
        """Write the mask after the output and the first `n_drafts` drafts; `of_drafts` keeps all of these."""
        constraint, drafts = request.constraint, request.kind.sent
        assert constraint is not None
        if n_drafts <= 0:
            constraint.allowed(request.prompt_ids, request.output_ids, into)
            return
        if request not in of_drafts:
            of_drafts[request] = np.full((len(drafts), self._n_words), -1, np.int32)
            constraint.allowed_after(request.prompt_ids, request.output_ids, drafts, of_drafts[request])
        into[:] = of_drafts[request][n_drafts - 1]

    def _failed(self, error: Exception) -> EngineError:
        return EngineError(f"iteration {self._n_issued} failed: {type(error).__name__}: {error}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltEngine:
    """An engine, the K/V manager of its caches, and its sizes.

    `buckets` are the total-token sizes of the compiled programs. `dtype` is the dtype of weights, keys and
    values. `device`, `stages` and `attention` are texts to show at start-up. `close` ends the engine's
    connections, processes and threads, and is idempotent. `memory` may be missing before `start_engine` adds
    it. `compile_later(on_buckets)`, if any, starts compiling the programs of more buckets while the engine
    serves, and calls `on_buckets` with all buckets in use after each. `adapters` is missing without room
    for LoRA adapters, and `drafter` without a draft model. `devices_per_stage` is 0 if the stages have
    different numbers.
    """

    engine: EngineMaster
    kv: KVManager
    model: ModelConfig
    serving: ServingConfig
    buckets: tuple[int, ...]
    dtype: str
    device: str
    stages: str
    attention: str
    close: Callable[[], None]
    memory: EngineMemory | None = None
    compile_later: Callable[[Callable[[tuple[int, ...]], object]], object] | None = None
    adapters: AdapterStore | None = None
    drafter: SharedDrafter | None = None
    devices_per_stage: int = 1


def _answers(sampled: Sampled, token_ids: Sequence[int], sent: SentRows) -> dict[int, RowAnswer]:
    """The answers of rows with more than one token or with log-probabilities, by place in the batch."""
    requests, records, first = sent.requests, sampled.logprobs, sent.first
    if records is None:
        assert first is not None, "an iteration of plain rows has no other answers"
        return {place: (token_ids[first[place] : first[place + 1]], ()) for place in sent.places}
    given = set(sent.places)
    answers = dict[int, RowAnswer]()
    for place, rows in enumerate(sent.groups):
        request = requests[rows[0]]
        n_top = request.kind.n_logprobs(request)
        logprobs = [] if n_top is None else [token_logprobs(records[i], n_top) for i in rows]
        if logprobs or place in given:
            answers[place] = token_ids[rows.start : rows.stop], logprobs
    return answers


def _of_prompts(
    sampled: Sampled, sent: SentRows, message: ControlMessage
) -> tuple[dict[int, list[TokenLogprobs]], Mapping[int, Vector], dict[int, tuple[int, ExpertIds]]]:
    """The results about input tokens, by the request's place in the batch, as in Returned."""
    if not (sampled.prompt_logprobs or sampled.pooled or sampled.routed):
        return {}, {}, {}
    requests = sent.requests
    prompts = {
        i: [token_logprobs(record, requests[i].sampling.prompt_logprobs or 0) for record in records]
        for i, records in sampled.prompt_logprobs.items()
    }
    routed = {
        i: (int(message.kv_length[i] - message.input_length[i]), ids) for i, ids in sampled.routed.items()
    }
    if sent.first is None:
        return prompts, sampled.pooled, routed
    place = {i: place for place, i in enumerate(sent.first[:-1])}

    def by_request(results: Mapping[int, T]) -> dict[int, T]:
        return {place[i]: result for i, result in results.items() if i in place}

    return by_request(prompts), by_request(sampled.pooled), by_request(routed)
