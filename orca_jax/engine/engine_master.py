"""The engine master: one iteration's control message to worker 1, its tokens from worker n.

It implements `scheduler.Engine`. Nothing here waits for a device but `wait` (ORCA 4.1: only the last stage
synchronises).
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from orca_jax.errors import EngineError
from orca_jax.grammar.token_mask import n_words
from orca_jax.iteration.message import (
    ADJUSTED,
    BIAS,
    CONSTRAINED,
    ControlMessage,
    MakeWords,
    neutral_sampling,
)
from orca_jax.request.request import Request, RequestState
from orca_jax.request.sampled import Sampled, token_logprobs
from orca_jax.scheduling.engine_protocol import Returned, never
from orca_jax.scheduling.kv_manager import KVManager

_POLL_SECONDS = 100e-6  # far below an iteration, far above what a poll costs

# Looking a member of an Enum up costs more than all else that is done for a request here.
_INITIATION, _FINISHED = RequestState.INITIATION, RequestState.FINISHED

# What control.SAMPLING takes from SamplingParams as it is.
_KEPT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


class PendingTokens(Protocol):
    """What is sampled for each row of an issued batch, still being computed."""

    def is_ready(self) -> bool:
        """Whether `fetch` would return at once."""
        ...

    def fetch(self) -> Sampled:
        """Wait for it."""
        ...


class Workers(Protocol):
    """Run iterations in the order they are issued, worker 1 to n."""

    def issue(self, message: ControlMessage, words: MakeWords) -> PendingTokens:
        """Start one iteration and return without waiting for the device.

        `words` is called where there are constrained rows, now and, until they are made, at each later call
        of `issue` and of any PendingTokens.
        """
        ...


class EngineMaster:
    """Turns batches of requests into iterations of the workers, first in, first out.

    A row's sampling parameters and lengths are kept by row from its initiation on, so that an iteration's
    messages are numpy gathers. `vocab_size` is the model's. With `keeps_tokens` the first of the `n_workers`
    has each row's newest token on its device; else it goes by way of the host, which has read it before the
    request is issued again (ORCA 4.1). `sleep` is the wait between two looks at a batch. An EngineError from
    `issue` or `wait` means that nothing is in flight any more, and that keys and values are lost: a request
    that is to go on begins again with INITIATION.
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
        self._in_flight: deque[tuple[Sequence[Request], PendingTokens]] = deque()
        # By row, set at its initiation: [n_rows].
        self._sampling = neutral_sampling(kv.n_rows)
        # By row: tokens in the cache, and output tokens sampled, after all that was issued.
        self._kv_length = np.zeros(kv.n_rows, np.int32)
        self._token_index = np.zeros(kv.n_rows, np.int32)

    def issue(self, batch: Sequence[Request]) -> None:
        """Start one iteration for `batch`; never blocks on the device. Raises EngineError."""
        try:
            message = self._control_message(batch)
            words = partial(self._words, batch, message)
            self._in_flight.append((batch, self._workers.issue(message, words)))
        except EngineError:
            self._in_flight.clear()
            raise
        except Exception as error:
            raise self._failed(error) from error
        self._n_issued += 1

    def wait(self, interrupted: Callable[[], bool]) -> Returned | None:
        """The oldest issued batch with its tokens; None if `interrupted` turned true before it was done.

        Raises EngineError.
        """
        batch, pending = self._in_flight[0]
        try:
            while interrupted is not never and not pending.is_ready():
                if interrupted():
                    return None
                self._sleep(_POLL_SECONDS)
            sampled = pending.fetch()
        except EngineError:
            self._in_flight.clear()
            raise
        except Exception as error:
            raise self._failed(error) from error
        self._in_flight.popleft()
        token_ids = sampled.token_ids[: len(batch)].tolist()
        if sampled.logprobs is None and not sampled.prompt_logprobs:
            return Returned(batch, token_ids)
        asked = [(i, request.sampling.logprobs) for i, request in enumerate(batch)]
        records = sampled.logprobs
        return Returned(
            batch,
            token_ids,
            {} if records is None else {i: token_logprobs(records[i], n) for i, n in asked if n is not None},
            {
                i: [token_logprobs(record, batch[i].sampling.prompt_logprobs or 0) for record in prompt]
                for i, prompt in sampled.prompt_logprobs.items()
            },
        )

    def _words(self, batch: Sequence[Request], message: ControlMessage) -> npt.NDArray[np.int32] | None:
        """What may come next in each constrained row, [their number, n_words]; None before that is known.

        A request that has ended meanwhile may get any token: it is thrown away.
        """
        places: list[int] = np.flatnonzero(message.constrained).tolist()
        requests = [batch[i] for i in places]
        n_before = message.token_index[places].tolist()
        for request, n in zip(requests, n_before, strict=True):
            if len(request.output_ids) < n and request.state is not _FINISHED:
                return None
        words = np.full((len(places), self._n_words), -1, np.int32)
        for request, into in zip(requests, words, strict=True):
            if request.state is not _FINISHED:
                assert request.constraint is not None
                try:
                    request.constraint.allowed(request.prompt_ids, request.output_ids, into)
                except Exception as error:  # it ends with its next token; the others have no part in it
                    request.failure = f"{type(error).__name__}: {error}"
                    into[:] = -1
        return words

    def _failed(self, error: Exception) -> EngineError:
        """What is in flight behind a failure rests on caches that are lost: forget it."""
        self._in_flight.clear()
        return EngineError(f"iteration {self._n_issued} failed: {type(error).__name__}: {error}")

    def _control_message(self, batch: Sequence[Request]) -> ControlMessage:
        n = len(batch)
        row = np.array([r.row for r in batch], np.intp)
        first = [i for i, r in enumerate(batch) if r.state is _INITIATION]
        initiation = np.zeros(n, np.bool_)
        if first:
            initiation[first] = True
            for i in first:
                self._admit(batch[i])
        # An increment adds one token to the cache, and each iteration samples one.
        self._kv_length[row] += ~initiation
        kv_length = self._kv_length[row]
        token_index = self._token_index[row]
        self._token_index[row] += 1
        input_length = np.where(initiation, kv_length, np.int32(1))
        row_end = np.cumsum(input_length)
        token_ids = np.zeros(row_end[-1], np.int32)
        n_prompt = np.zeros(n, np.int32)
        biases: list[tuple[int, int, float]] = []
        for i in first:
            request = batch[i]
            known = request.prompt_ids + tuple(request.output_ids)
            token_ids[row_end[i] - len(known) : row_end[i]] = known
            n_prompt[i] = len(request.prompt_ids)
            biases += [(i, token_id, value) for token_id, value in request.sampling.logit_bias.items()]
        sampling = self._sampling[row]
        sampling["prompt_logprobs"][~initiation] = -1
        for i, request in enumerate(batch):
            if request.constraint is not None and request.constraint.acts(int(token_index[i])):
                sampling["flags"][i] |= CONSTRAINED
        on_device = ~initiation if self.keeps_tokens else np.zeros(n, np.bool_)
        if not self.keeps_tokens:
            for i, request in enumerate(batch):
                if not initiation[i]:
                    token_ids[row_end[i] - 1] = request.output_ids[-1]
        return ControlMessage(
            iteration=self._n_issued,
            row=row.astype(np.int32),
            initiation=initiation,
            token_index=token_index,
            input_length=input_length,
            kv_length=kv_length,
            n_prompt=n_prompt,
            token_ids=token_ids,
            token_on_device=on_device,
            block_table=self._kv.block_table.take(row, axis=0),
            sampling=sampling,
            bias=np.array(biases, BIAS),
        )

    def _admit(self, request: Request) -> None:
        """Note what stays with a row; one that runs again after a fault has output tokens already."""
        row, said = request.row, request.sampling
        to = self._sampling
        for name in _KEPT:
            to[name][row] = getattr(said, name)
        to["seed"][row] = request.seed
        to["logprobs"][row] = -1 if said.logprobs is None else said.logprobs
        asks = said.prompt_logprobs is not None and request.prompt_logprobs is None
        to["prompt_logprobs"][row] = said.prompt_logprobs if asks else -1
        penalties = (said.repetition_penalty, said.frequency_penalty, said.presence_penalty)
        to["flags"][row] = ADJUSTED if said.logit_bias or penalties != (1, 0, 0) else 0
        self._kv_length[row] = request.n_tokens
        self._token_index[row] = len(request.output_ids)
