"""Orca, the service: a request pool, the scheduler on a thread of its own, and delivery.

It knows neither endpoints nor JAX: an engine and a K/V manager are handed in.
"""

import itertools
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

from orca_jax.config import RestartBound, ServingConfig
from orca_jax.errors import EngineError, InvalidSamplingParameter, OutputFailed, ServiceClosed
from orca_jax.families.model_config import ModelConfig
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.request.weight import weight_in_bytes
from orca_jax.scheduling.admission import admissible, longest_request
from orca_jax.scheduling.engine_protocol import Engine
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.recovery import Recovery
from orca_jax.scheduling.request_pool import Delivery, RequestPool
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline
from orca_jax.service.generation import LOOK_SECONDS, Generation, Mailbox
from orca_jax.service.prepared_params import OutputRules, RuleMaker

SCHEDULER_THREAD = "orca-scheduler"  # its name

_SEED_BITS = 48  # exact where a reader of JSON has only doubles


class Orca:
    """The service of ORCA's Figure 4 without its endpoint; `start` runs it, `close` ends it.

    A request without a seed is given one: from the operating system, or from a generator that `seed` starts,
    so that a program that submits in the same order gets the same again. `clock` gives the timeline's
    seconds. An engine that lost a worker is brought up again, as often as `restarts` allows, and its requests
    run again. `failure` is what the engine failed with for good: every request that was live ended with the
    reason `error` then, and no more are taken. `on_delivered`, if it is set, hears of all deliveries of an
    iteration in one call, on the scheduler's thread, when they lie in their mailboxes. Without a `tokenizer`
    texts come out empty.
    """

    def __init__(
        self,
        engine: Engine,
        kv: KVManager,
        *,
        config: ServingConfig,
        model: ModelConfig,
        tokenizer: Tokenizer | None = None,
        bucket_sizes: Sequence[int] = (),
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        restarts: RestartBound | None = None,
    ) -> None:
        self._failure: EngineError | None = None
        self.on_delivered: Callable[[Sequence[Delivery]], None] | None = None
        self.timeline = Timeline(clock, bucket_sizes=bucket_sizes)
        self.pool = RequestPool(
            max_waiting=config.max_queue,
            max_bytes=config.max_queue_bytes,
            max_each=config.max_queue_each,
            on_deliveries=self._put_all,
            on_arrival=self.timeline.arrived,
            check=partial(admissible, config=config, model=model),
        )
        self.scheduler = Scheduler(self.pool, engine, kv, config=config, timeline=self.timeline)
        self.recovery = Recovery(self.scheduler, bound=restarts or RestartBound(), clock=clock)
        self._config = config
        self._model = model
        self._rules = RuleMaker(model, tokenizer)
        self._thread = threading.Thread(target=self._run, name=SCHEDULER_THREAD, daemon=True)
        self._stopping = False
        self._ended = False  # the thread, in good order: set there alone
        self._lock = threading.Lock()  # for the three below
        self._started = False
        self._numbers = itertools.count()
        self._random = secrets.SystemRandom() if seed is None else random.Random(seed)
        self._dropped: deque[Request] = deque()  # needs no lock

    @property
    def failure(self) -> EngineError | None:
        """What the engine failed with for good; None while it works, and after an orderly end.

        A thread that ended in any other way is a failure too: nobody else would ever tell.
        """
        if self._failure is None and self._started and not self._thread.is_alive() and not self._ended:
            return EngineError("the scheduler's thread is gone")
        return self._failure

    @property
    def trouble(self) -> str | None:
        """Which stage was lost and how, while the engine is brought up again; None while it works."""
        return self.recovery.trouble

    def start(self) -> None:
        """Start the scheduler's thread; nothing the second time."""
        with self._lock:
            if not self._started:
                self._thread.start()
                self._started = True

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
            self._failure = EngineError(f"the scheduler did not stop within {timeout:g} seconds")
            raise self._failure

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rules(self, sampling: SamplingParams) -> OutputRules:
        """The sampling parameters, checked against the model and compiled: a grammar may take up to seconds.

        Raises a leaf of InvalidRequest.
        """
        return self._rules.rules(sampling)

    def check(self, prompt_ids: Sequence[int], rules: OutputRules) -> None:
        """Raise what `submit` would raise because of the request itself; changes nothing."""
        admissible(_request("", prompt_ids, rules, 0), config=self._config, model=self._model)

    def most_output(self, n_input: int) -> int:
        """The largest `max_tokens` for a prompt of `n_input` tokens; below 1 if that is too long."""
        limit, _ = longest_request(config=self._config, model=self._model)
        return limit - n_input

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | OutputRules,
        *,
        request_id: str | None = None,
        owner: str = "",
    ) -> Generation:
        """Take a request for one output in; `OutputRules.choices` are those of several.

        `owner` is whoever sent it, as far as the queue is shared out among owners.

        Raises a leaf of InvalidRequest, QueueFull, ServiceClosed, or EngineError if the engine has failed.
        """
        rules = self.rules(sampling) if isinstance(sampling, SamplingParams) else sampling
        if rules.sampling.n != 1:
            message = f"n is {rules.sampling.n}; one request has one output, so submit one for each"
            raise InvalidSamplingParameter(message, param="n")
        with self._lock:
            if not self._started:
                raise ServiceClosed("the service has not been started")
            name = f"request-{next(self._numbers)}" if request_id is None else request_id
            seed = rules.sampling.seed
            seed = self._random.getrandbits(_SEED_BITS) if seed is None else seed
        request = _request(name, prompt_ids, rules, seed)
        request.owner = owner
        request.weight = weight_in_bytes(request.prompt_ids, rules.sampling)
        request.constraint = rules.constraint()
        mailbox = request.sink = Mailbox(rules.text_stream(), self._gone)
        try:
            self.pool.add(request)
        except ServiceClosed:
            if self.failure is not None:
                raise EngineError(f"no more requests are taken: {self.failure}") from self.failure
            raise
        return Generation(
            request,
            mailbox,
            end=partial(self.pool.end, request),
            drop=partial(self._dropped.append, request),
        )

    def _gone(self) -> EngineError | None:
        """Why a request that has not ended never will; None while the service works."""
        if self._thread.is_alive() and self._failure is None:
            return None
        return self.failure or EngineError("the service was closed")

    # On the scheduler's thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self._ended = True
        except BaseException as error:  # a panic of Rust's is no Exception; nobody may be left waiting
            failure = self._failure = _as_engine_error(error)
            self.pool.close()
            try:
                self.scheduler.fail_all()
            except BaseException as second:  # those who still wait find `failure` by themselves
                failure.add_note(f"then, while its requests were ended: {second!r}")

    def _turn(self) -> bool:
        """One turn of Algorithm 1's loop, or a wait for work; False when the service is closed and empty."""
        while self._dropped:
            self.pool.end(self._dropped.popleft(), FinishReason.CANCELLED)
        if self._stopping:
            for request in list(self.pool.in_arrival_order()):
                self.pool.end(request, FinishReason.CANCELLED)
        return (
            self.recovery.step(self._is_called) or self.pool.wait_for_work(LOOK_SECONDS) or not self._stopping
        )

    def _is_called(self) -> bool:
        """Is there something to do, other than for the pool, while the engine is down?"""
        return self._stopping or bool(self._dropped)

    def _put_all(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            mailbox = delivery.request.sink
            assert isinstance(mailbox, Mailbox)
            failure = None
            if delivery.finish_reason is FinishReason.ERROR:
                own = delivery.request.failure
                failure = self.failure if own is None else OutputFailed(own)
            mailbox.put(delivery.token_id, delivery.finish_reason, failure, delivery.logprobs)
        if self.on_delivered is not None:
            self.on_delivered(deliveries)


def _as_engine_error(error: BaseException) -> EngineError:
    if isinstance(error, EngineError):
        return error
    failure = EngineError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _request(request_id: str, prompt_ids: Sequence[int], rules: OutputRules, seed: int) -> Request:
    """The pool's form of a request: here alone the output's `max_tokens` becomes that of input and output."""
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        max_tokens=len(prompt_ids) + rules.sampling.max_tokens,
        sampling=rules.sampling,
        seed=seed,
        end_token_ids=rules.end_token_ids,
    )
