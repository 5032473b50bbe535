"""Orca, the service: a request pool, the scheduler on a thread of its own, and delivery.

It knows neither endpoints nor JAX: an engine and a K/V manager are handed in.
"""

import itertools
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from orca_jax.config import ModelConfig, ServingConfig
from orca_jax.errors import EngineError, NotSupported, ServiceClosed
from orca_jax.kv_manager import KVManager
from orca_jax.request import FinishReason, Request, SamplingParams
from orca_jax.request_pool import Delivery, RequestPool
from orca_jax.scheduler import Engine, Scheduler, admissible
from orca_jax.timeline import Timeline
from orca_jax.tokenizer import TextStream

_LOOK_SECONDS = 1.0  # no wait goes longer without a look at whether the service still lives
_SEED_BITS = 48  # exact where a reader of JSON has only doubles


@dataclass(frozen=True, slots=True)
class Piece:
    """What came since the piece before: tokens, the text that is certain by now, and the reason of the end.

    Text lags behind tokens while it may be the beginning of a stop string or part of a character. Only
    the last piece has a finish reason.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What became of a prompt.

    `text` is the output alone, without special tokens and cut before a stop string; it is empty where the
    model has no tokenizer. `token_ids` are all that were generated, with the end-of-sequence token and
    those of a stop string. `seed` gives the same tokens again. `logprobs` is None: they are not built.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    n_input: int
    seed: int
    request_id: str
    logprobs: None = None


class _Mailbox:
    """The service's end of a generation: the request's sink, and what its user has not taken yet."""

    def __init__(self, stream: TextStream | None, gone: Callable[[], EngineError | None]) -> None:
        self.finish_reason: FinishReason | None = None
        self.failure: EngineError | None = None
        self.stream = stream
        self._gone = gone  # tells why nothing will be put any more
        self._changed = threading.Condition(threading.Lock())
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._last_taken = False
        self._is_waiting = False

    # For the scheduler's thread.

    def push(self, token_id: int) -> bool:
        """OutputSink: True when a stop string is complete."""
        return self.stream is not None and self.stream.push(token_id)

    def put(self, token_id: int | None, reason: FinishReason | None, failure: EngineError | None) -> None:
        """A delivery; nothing changes after the one with a reason."""
        text = ""
        if self.stream is not None:
            if reason is not None:
                self.stream.finish()
            text = self.stream.take()
        with self._changed:
            if self.finish_reason is not None:
                return
            if token_id is not None:
                self._token_ids.append(token_id)
            self._text.append(text)
            self.finish_reason = reason
            self.failure = failure
            if self._is_waiting:
                self._is_waiting = False
                self._changed.notify_all()

    # For the user's.

    def take(self, timeout: float | None) -> Piece | None:
        """The next piece, None after the last; see `Generation.next_piece`."""
        with self._changed:
            if self._last_taken:
                self._raise_failure()
                return None
            self._wait(lambda: bool(self._token_ids) or self.finish_reason is not None, timeout)
            piece = Piece(tuple(self._token_ids), "".join(self._text), self.finish_reason)
            self._token_ids.clear()
            self._text.clear()
            self._last_taken = self.finish_reason is not None
            return piece

    def wait_for_end(self, timeout: float | None) -> FinishReason:
        """The finish reason, once there is one; raises what the engine failed with."""
        with self._changed:
            self._wait(lambda: self.finish_reason is not None, timeout)
            self._raise_failure()
            assert self.finish_reason is not None
            return self.finish_reason

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise EngineError(str(self.failure)) from self.failure

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not ready():
            left = _LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"nothing came within {timeout} seconds")
            gone = self._gone()
            if gone is not None:
                self.finish_reason, self.failure = FinishReason.ERROR, gone
                return
            self._is_waiting = True  # until the next delivery
            self._changed.wait(min(left, _LOOK_SECONDS))


class Generation:
    """A request as its user holds it: an iterator of pieces that can be closed at any moment.

    For one consumer. What is not taken is kept, no more than the request's own output, and a slow consumer
    gets it as one larger piece. Leaving early, by `close`, by `with` or by dropping it, ends the request as
    cancelled and frees its slots within an iteration.
    """

    def __init__(
        self, request: Request, mailbox: _Mailbox, *, cancel: Callable[[], object], drop: Callable[[], object]
    ) -> None:
        self._request = request
        self._mailbox = mailbox
        self._cancel = cancel
        self._drop = drop

    @property
    def request_id(self) -> str:
        """The request's name, the caller's or one that was given."""
        return self._request.request_id

    @property
    def n_input(self) -> int:
        """Tokens of the prompt."""
        return len(self._request.prompt_ids)

    @property
    def seed(self) -> int:
        """The caller's seed, or the one that was drawn."""
        return self._request.seed

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it runs."""
        return self._mailbox.finish_reason

    def next_piece(self, timeout: float | None = None) -> Piece | None:
        """Wait for the next piece; None after the last.

        `timeout` is in seconds; None waits for as long as the service lives. Raises TimeoutError; and
        EngineError after the last piece, if that has the reason `error`.
        """
        return self._mailbox.take(timeout)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        piece = self.next_piece()
        if piece is None:
            raise StopIteration
        return piece

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the end; the whole output, whether pieces of it were taken or not.

        Raises TimeoutError, and EngineError if the engine failed.
        """
        reason = self._mailbox.wait_for_end(timeout)
        return GenerationResult(
            text="" if self._mailbox.stream is None else self._mailbox.stream.text,
            token_ids=list(self._request.output_ids),
            finish_reason=reason,
            n_input=self.n_input,
            seed=self.seed,
            request_id=self.request_id,
        )

    def cancel(self) -> None:
        """Ask the request to end, if it has not yet; what came before can still be taken."""
        if self.finish_reason is None:
            self._cancel()

    def close(self) -> None:
        """The same as `cancel`, under the name that iterators have for it."""
        self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The garbage collector may call this anywhere, under any lock, so it takes none.
        if self.finish_reason is None:
            self._drop()


class Orca:
    """The service of ORCA's Figure 4 without its endpoint; `start` runs it, `close` ends it.

    A request without a seed is given one: from the operating system, or from a generator that `seed` starts,
    so that a program that submits in the same order gets the same again. `clock` gives the timeline's
    seconds. `failure` is what the engine failed with: every request that was live ended with the reason
    `error` then, and no more are taken.
    """

    def __init__(
        self,
        engine: Engine,
        kv: KVManager,
        *,
        config: ServingConfig,
        model: ModelConfig,
        bucket_sizes: Sequence[int] = (),
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: EngineError | None = None
        self.timeline = Timeline(clock, bucket_sizes=bucket_sizes)
        self.pool = RequestPool(
            max_waiting=config.max_queue,
            on_deliveries=self._put_all,
            on_arrival=self.timeline.arrived,
            check=partial(admissible, config=config, model=model),
        )
        self.scheduler = Scheduler(self.pool, engine, kv, config=config, timeline=self.timeline)
        self._config = config
        self._model = model
        self._thread = threading.Thread(target=self._run, name="orca-scheduler", daemon=True)
        self._stopping = False
        self._lock = threading.Lock()  # for the three below
        self._started = False
        self._numbers = itertools.count()
        self._random = secrets.SystemRandom() if seed is None else random.Random(seed)
        self._dropped: deque[str] = deque()  # needs no lock

    def start(self) -> None:
        """Start the scheduler's thread; nothing the second time."""
        with self._lock:
            if not self._started:
                self._started = True
                self._thread.start()

    def close(self, timeout: float = 30.0) -> None:
        """Cancel what is live and stop the thread; nothing the second time.

        Raises EngineError if the thread has not stopped within `timeout` seconds, as when a device hangs;
        those who wait for a request are woken then as well.
        """
        self.pool.close()
        self._stopping = True  # only now, so that the thread cannot leave before the last one is in
        if not self._started or threading.current_thread() is self._thread:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.failure = EngineError(f"the scheduler did not stop within {timeout:g} seconds")
            raise self.failure

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, stream: TextStream | None = None
    ) -> None:
        """Raise what `submit` would raise because of the request itself; changes nothing."""
        request = _request("", prompt_ids, sampling, 0, self._model, stream)
        admissible(request, config=self._config, model=self._model)

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        stream: TextStream | None = None,
    ) -> Generation:
        """Take a request in. `stream`, of its own, makes text of its tokens and finds its stop strings.

        Raises a leaf of InvalidRequest, QueueFull, ServiceClosed, or EngineError if the engine has failed.
        """
        with self._lock:
            if not self._started:
                raise ServiceClosed("the service has not been started")
            name = f"request-{next(self._numbers)}" if request_id is None else request_id
            seed = self._random.getrandbits(_SEED_BITS) if sampling.seed is None else sampling.seed
        request = _request(name, prompt_ids, sampling, seed, self._model, stream)
        mailbox = request.sink = _Mailbox(stream, self._gone)
        try:
            self.pool.add(request)
        except ServiceClosed:
            if self.failure is not None:
                raise EngineError(f"no more requests are taken: {self.failure}") from self.failure
            raise
        return Generation(
            request,
            mailbox,
            cancel=partial(self.pool.end, name, FinishReason.CANCELLED),
            drop=partial(self._dropped.append, name),
        )

    def _gone(self) -> EngineError | None:
        """Why a request that has not ended never will; None while the service works."""
        if self._thread.is_alive() and self.failure is None:
            return None
        return self.failure or EngineError("the scheduler's thread is gone")

    # On the scheduler's thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # whatever it is, nobody may be left waiting
            self.failure = _as_engine_error(error)
            self.pool.close()
            try:
                self.scheduler.fail_all()
            except Exception as second:  # who still waits finds `failure` by himself
                self.failure.add_note(f"then, while its requests were ended: {second!r}")

    def _turn(self) -> bool:
        """One turn of Algorithm 1's loop, or a wait for work; False when the service is closed and empty."""
        while self._dropped:
            self.pool.end(self._dropped.popleft(), FinishReason.CANCELLED)
        if self._stopping:
            for request in list(self.pool.in_arrival_order()):
                self.pool.end(request.request_id, FinishReason.CANCELLED)
        return self.scheduler.step() or self.pool.wait_for_work(_LOOK_SECONDS) or not self._stopping

    def _put_all(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            mailbox = delivery.request.sink
            assert isinstance(mailbox, _Mailbox)
            failure = self.failure if delivery.finish_reason is FinishReason.ERROR else None
            mailbox.put(delivery.token_id, delivery.finish_reason, failure)


def _as_engine_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    failure = EngineError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _request(
    request_id: str,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    seed: int,
    model: ModelConfig,
    stream: TextStream | None,
) -> Request:
    """The pool's form of a request: here alone the output's `max_tokens` becomes that of input and output."""
    if sampling.stop and stream is None:
        raise NotSupported("stop strings need text, and this model has no tokenizer", param="stop")
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        max_tokens=len(prompt_ids) + sampling.max_tokens,
        sampling=sampling,
        seed=seed,
        eos_token_ids=frozenset(model.eos_token_ids),
    )
