"""The engine master: one iteration's control message and flat batch to worker 1, its tokens from worker n.

It implements `scheduler.Engine`. Nothing here waits for a device but `wait` (ORCA 4.1: only the last stage
synchronises).
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from orca_jax.buckets import bucket_for
from orca_jax.config import ServingConfig
from orca_jax.control import ControlMessage, SamplingRows
from orca_jax.errors import EngineError
from orca_jax.flat_batch import FlatBatch, flat_batch
from orca_jax.kv_manager import KVManager
from orca_jax.request import Request, RequestState
from orca_jax.scheduler import Returned

_POLL_SECONDS = 100e-6  # far below an iteration, far above what a poll costs

# Looking a member of an Enum up costs more than all else that is done for a request here.
_INITIATION = RequestState.INITIATION


class PendingTokens(Protocol):
    """The next token of each row of an issued batch, still being computed."""

    def is_ready(self) -> bool:
        """Whether `fetch` would return at once."""
        ...

    def fetch(self) -> npt.NDArray[np.int32]:
        """Wait for the tokens: int32, one a row, at least as many as the batch has requests."""
        ...


class Worker(Protocol):
    """Runs iterations in the order they are issued; the first of its kind feeds the others."""

    def issue(self, message: ControlMessage, flat: FlatBatch) -> PendingTokens:
        """Start one iteration and return without waiting for the device."""
        ...


class EngineMaster:
    """Turns batches of requests into iterations of a worker, first in, first out.

    A row's sampling parameters and lengths are kept by row from its initiation on, so that an iteration's
    messages are numpy gathers. `sleep` is the wait between two looks at a batch that may be interrupted.
    An EngineError from `issue` or `wait` means that nothing is in flight any more, and that keys and values
    are lost: a request that is to go on begins again with INITIATION.
    """

    def __init__(
        self,
        worker: Worker,
        kv: KVManager,
        *,
        config: ServingConfig,
        bucket_sizes: Sequence[int],
        n_workers: int = 1,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        assert bucket_sizes[-1] >= config.max_batch_tokens, "a batch could be larger than every bucket"
        self.n_workers = n_workers
        self._worker = worker
        self._kv = kv
        self._config = config
        self._bucket_sizes = tuple(bucket_sizes)
        self._sleep = sleep
        self._n_issued = 0
        self._in_flight: deque[tuple[Sequence[Request], PendingTokens]] = deque()
        # By row, set at its initiation: [n_rows].
        self._temperature = np.zeros(kv.n_rows, np.float32)
        self._top_p = np.ones(kv.n_rows, np.float32)
        self._top_k = np.zeros(kv.n_rows, np.int32)
        self._seed = np.zeros(kv.n_rows, np.int64)
        # By row: tokens in the cache, and output tokens sampled, after all that was issued.
        self._kv_length = np.zeros(kv.n_rows, np.int32)
        self._token_index = np.zeros(kv.n_rows, np.int32)

    def issue(self, batch: Sequence[Request]) -> None:
        """Start one iteration for `batch`; never blocks on the device. Raises EngineError."""
        try:
            message = self._control_message(batch)
            self._in_flight.append((batch, self._start(message)))
        except EngineError:
            self._in_flight.clear()
            raise
        except Exception as error:
            raise self._failed(error) from error
        self._n_issued += 1

    def wait(self, interrupted: Callable[[], bool]) -> Returned | None:
        """The oldest issued batch with its tokens; None if `interrupted` turned true before it was done.

        With one worker nothing can be issued beside a batch in flight, so nothing is worth an interruption.
        Raises EngineError.
        """
        batch, pending = self._in_flight[0]
        try:
            while self.n_workers > 1 and not pending.is_ready():
                if interrupted():
                    return None
                self._sleep(_POLL_SECONDS)
            token_ids = pending.fetch()[: len(batch)].tolist()
        except EngineError:
            self._in_flight.clear()
            raise
        except Exception as error:
            raise self._failed(error) from error
        self._in_flight.popleft()
        return Returned(batch, token_ids)

    def _start(self, message: ControlMessage) -> PendingTokens:
        """One iteration of the worker, which has its batch laid out here."""
        flat = flat_batch(
            message,
            bucket=bucket_for(message.token_ids.shape[0], self._bucket_sizes),
            max_bs=self._config.max_batch_size,
            block_size=self._kv.block_size,
            n_slots=self._kv.n_blocks * self._kv.block_size,
            n_rows=self._kv.n_rows,
        )
        return self._worker.issue(message, flat)

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
        for i in first:
            known = batch[i].prompt_ids + tuple(batch[i].output_ids)
            token_ids[row_end[i] - len(known) : row_end[i]] = known
        # A token is where it was sampled, on worker n: worker 1 has it only where the two are one. Else it
        # goes by way of the host, which has read it before the request could be issued again (ORCA 4.1).
        on_device = ~initiation if self.n_workers == 1 else np.zeros(n, np.bool_)
        if self.n_workers > 1:
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
            token_ids=token_ids,
            token_on_device=on_device,
            block_table=self._kv.block_table.take(row, axis=0),
            sampling=SamplingRows(
                temperature=self._temperature[row],
                top_p=self._top_p[row],
                top_k=self._top_k[row],
                seed=self._seed[row],
            ),
        )

    def _admit(self, request: Request) -> None:
        """Note what stays with a row; one that runs again after a fault has output tokens already."""
        row, sampling = request.row, request.sampling
        self._temperature[row] = sampling.temperature
        self._top_p[row] = sampling.top_p
        self._top_k[row] = sampling.top_k
        self._seed[row] = request.seed
        self._kv_length[row] = request.n_tokens
        self._token_index[row] = len(request.output_ids)
