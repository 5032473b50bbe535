"""Orca, the service: a request pool, a scheduler on its own thread, and the delivery of output.

It knows neither endpoints nor JAX. The caller passes in the engine and the K/V manager.
"""

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Self, TypeVar, cast, overload

from orca_jax.config import RestartBound, ServingConfig
from orca_jax.errors import (
    EngineAsleep,
    EngineError,
    InvalidSamplingParameter,
    ServiceClosed,
)
from orca_jax.families.model_config import ModelConfig
from orca_jax.request.adapter import Adapter
from orca_jax.request.pooling import Pooling
from orca_jax.request.request import FinishReason, Request, SharedDrafter
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.scheduling_params import PLAIN, SchedulingParams
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.scheduling.adapter_slots import AdapterSlots, AdapterStore
from orca_jax.scheduling.admission import (
    CheckedPrompt,
    weight_in_bytes,
)
from orca_jax.scheduling.engine_protocol import Engine
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.prefix_lookup import prompt_hashes
from orca_jax.scheduling.recovery import Recovery
from orca_jax.scheduling.request_pool import Delivery, RequestPool
from orca_jax.scheduling.restart import fail_all
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline
from orca_jax.scheduling.waiting_queue import FairQueue, waiting_queue
from orca_jax.service.generation import Generation
from orca_jax.service.interludes import Interludes
from orca_jax.service.output import LOOK_SECONDS, Output, OutputSoFar, PublishedSink, RequestHandle, no_stream
from orca_jax.service.prepared_params import OutputRules
from orca_jax.service.recorder import RecordedPool, Recorder, TimelineRecorder
from orca_jax.service.service import Drop, End, Service
from orca_jax.speculation.drafter import configured_speculation

SCHEDULER_THREAD = "orca-scheduler"  # the thread's name
_SEED_BITS = 48  # JSON readers that have only doubles still read the seed exactly

H = TypeVar("H", bound=RequestHandle)


class Orca(Service):
    """The service of ORCA's Figure 4 without its endpoint. `start` runs it, `close` ends it.

    A request without a seed gets a random one: from a generator seeded with `seed`, or by the system;
    with `seed`, a program that submits in the same order gets the same output again. `clock` returns
    the timeline's seconds. After the loss of a worker the engine restarts, as often as `restarts` allows, and
    its requests resume. `failure` is a permanent failure of the engine: every live request then ends with the
    reason `error`, and new ones are rejected. `on_published` and `on_delivered`, if set, are called in this
    order on the scheduler's thread after the deliveries of an iteration are in the requests' sinks. Without a
    `tokenizer`, output text is empty. `adapters` has the engine's LoRA adapters, and `drafter` is its draft
    model. A `recorder` records until `close` what is needed to repeat the batches.
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
        recorder: Recorder | None = None,
        adapters: AdapterStore | None = None,
        drafter: SharedDrafter | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        speculation = configured_speculation(
            config.scheduling, vocab_size=model.vocab_size, draft_model=drafter
        )
        super().__init__(
            config=config, model=model, tokenizer=tokenizer, speculation=speculation, pooling=pooling
        )
        self._failure: EngineError | None = None
        self.on_published: Callable[[], None] | None = None
        self._recorder = recorder
        pool = RequestPool
        if recorder is not None:
            pool = partial(RecordedPool, recorder, disturbance=self._disturbance)
        self.timeline = Timeline(clock, bucket_sizes=bucket_sizes)
        self._queue = waiting_queue(config.scheduling)
        self.pool = pool(
            max_waiting=config.max_queue,
            max_bytes=config.max_queue_bytes,
            max_each=config.max_queue_each,
            on_deliveries=self._publish_all,
            on_arrival=self.timeline.arrived if kv.arriving is None else self._arrived,
            queue=self._queue,
            clock=clock,
        )
        self.max_each = self.pool.max_each
        self.scheduler = Scheduler(self.pool, engine, kv, config=config, timeline=self.timeline)
        if recorder is not None:
            self.timeline.observers = (TimelineRecorder(recorder, self.scheduler),)
        self.recovery = Recovery(self.scheduler, bound=restarts or RestartBound(), clock=clock)
        self._step = self.recovery.turn(self._has_other_work)
        self.interludes = Interludes(
            self.scheduler, self.recovery, wake=self.pool.wake, stopped=self._stopped
        )
        self.adapter_store = adapters
        if adapters is not None:
            slots = AdapterSlots(config.max_loras, adapters, wake=self.pool.wake)
            slots.fill()
            self.scheduler.adapters = slots
        self._kv = kv
        if kv.disk is not None:
            kv.disk.files.wake = self.pool.wake
        if kv.arriving is not None:
            kv.arriving.wake = self.pool.wake
        self.thread = threading.Thread(target=self._run, name=SCHEDULER_THREAD, daemon=True)
        self._stopping = False
        self._continued = False  # whether a request has continued another one's output
        self._ended = False  # the thread ended normally; set on that thread alone
        self._lock = threading.Lock()  # for the next three
        self._started = False
        self._numbers = itertools.count()  # for generated request ids
        self._random = random.Random(seed)  # without a seed the system gives one
        self._dropped: deque[Request] = deque()  # requests whose handles were dropped; needs no lock

    @property
    def failure(self) -> EngineError | None:
        """The engine's permanent failure; None while it works, and after an orderly end.

        A scheduler's thread that ended in any other way is a failure too: nothing else would report it.
        """
        if self._failure is None and self._started and not self.thread.is_alive() and not self._ended:
            return EngineError("the scheduler's thread ended unexpectedly")
        return self._failure

    @property
    def trouble(self) -> str | None:
        """The lost stage and how it was lost, while the engine restarts; None while it works."""
        return self.recovery.trouble

    @property
    def is_paused(self) -> bool:
        return self.interludes.paused

    @property
    def is_asleep(self) -> bool:
        return self.interludes.asleep > 0

    @property
    def expected_wait(self) -> float | None:
        interval = self.timeline.recent_finish_interval()
        return None if interval is None else interval * self.pool.n_waiting

    def check_room(self, n: int, owner: str) -> None:
        self.pool.check_room(n, owner)

    def weigh_owners(self, weights: Mapping[str, float]) -> None:
        """Set owners' shares, before the first request. Only for the scheduling policy "fair"."""
        assert isinstance(self._queue, FairQueue), f"{self._order} has no shares"
        if self._recorder is not None:
            weights = self._recorder.weighed(weights)
        self._queue.weights.update(weights)

    def start(self) -> None:
        """Start the scheduler's thread. A second call does nothing."""
        with self._lock:
            if not self._started:
                self.thread.start()
                self._started = True

    def close(self, timeout: float = 30.0) -> None:
        """Cancel all live requests and stop the thread. A second call does nothing.

        Raises EngineError if the thread has not stopped within `timeout` seconds, as when a device hangs;
        every thread that waits for a request wakes then too.
        """
        self.pool.close()
        self._stopping = True  # after closing the pool, so that the thread stops only after the last arrival
        try:
            if self._started and threading.current_thread() is not self.thread:
                self.thread.join(timeout)
                if self.thread.is_alive():
                    self._failure = EngineError(f"the scheduler did not stop within {timeout:g} seconds")
                    raise self._failure
        finally:
            if self.scheduler.adapters is not None:
                self.scheduler.adapters.close()
            if self._recorder is not None:
                self._recorder.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hashes(self, token_ids: Sequence[int], cache_salt: Sequence[str]) -> tuple[bytes, ...] | None:
        hashes = prompt_hashes(token_ids, cache_salt, self._kv)
        return None if hashes is None else tuple(hashes)

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return {} if self.adapter_store is None else self.adapter_store.adapters

    @overload
    def submit(
        self,
        prompt: Sequence[int] | CheckedPrompt,
        sampling: SamplingParams | OutputRules,
        *,
        request_id: str | None = None,
        owner: str = "",
        scheduling: SchedulingParams = PLAIN,
        begun: OutputSoFar | None = None,
        on_end: Callable[[], object] | None = None,
    ) -> Generation: ...

    @overload
    def submit(
        self,
        prompt: Sequence[int] | CheckedPrompt,
        sampling: SamplingParams | OutputRules,
        *,
        request_id: str | None = None,
        owner: str = "",
        scheduling: SchedulingParams = PLAIN,
        begun: OutputSoFar | None = None,
        on_end: Callable[[], object] | None = None,
        handle: Callable[[Output, End, Drop], H],
    ) -> H: ...

    def submit(
        self,
        prompt: Sequence[int] | CheckedPrompt,
        sampling: SamplingParams | OutputRules,
        *,
        request_id: str | None = None,
        owner: str = "",
        scheduling: SchedulingParams = PLAIN,
        begun: OutputSoFar | None = None,
        on_end: Callable[[], object] | None = None,
        handle: Callable[[Output, End, Drop], H] | type[Generation] = Generation,
    ) -> H | Generation:
        """Submit a request for one output; `OutputRules.choices` are the rules of several.

        `owner` is the client whose share of the queue the request uses. `scheduling` is for a prompt that
        `check` has not seen. `handle` makes the object that the user holds.

        `begun` is the output of an earlier request of the same prompt, parameters and seed: its tokens are
        the first of this output, and are not sampled again. `on_end` is Output's.

        Raises a leaf of InvalidRequest, QueueFull, ServiceClosed, EngineAsleep, or EngineError if the engine
        has failed.
        """
        request, rules = self.new_request(
            prompt, sampling, request_id=request_id, owner=owner, scheduling=scheduling
        )
        has_text = not request.kind.scored_ids and request.pooling is None
        new_stream = partial(rules.text_stream, request.prompt_ids) if has_text else no_stream
        output = Output(request, new_stream, self._stopped, on_end)
        self.enter(request, output, begun)
        return handle(output, partial(self.pool.end, request), partial(self._dropped.append, request))

    def new_request(
        self,
        prompt: Sequence[int] | CheckedPrompt,
        sampling: SamplingParams | OutputRules,
        *,
        request_id: str | None = None,
        owner: str = "",
        scheduling: SchedulingParams = PLAIN,
    ) -> tuple[Request, OutputRules]:
        """Make a request, which `enter` submits, and its rules; as for `submit`."""
        if self.interludes.asleep:
            raise EngineAsleep("the engine is asleep and has given its memory back; it must be woken first")
        rules = self.rules(sampling) if isinstance(sampling, SamplingParams) else sampling
        if rules.sampling.n != 1 and not rules.sampling.use_beam_search:
            message = f"n is {rules.sampling.n}; one request has one output, so submit one for each"
            raise InvalidSamplingParameter(message, param="n")
        checked = prompt if isinstance(prompt, CheckedPrompt) else self.check(prompt, rules, scheduling)
        assert checked.n_output == rules.sampling.max_tokens, "checked for other parameters"
        with self._lock:
            if not self._started:
                raise ServiceClosed("the service has not been started")
            name = f"request-{next(self._numbers)}" if request_id is None else request_id
            seed = rules.sampling.seed
            seed = self._random.getrandbits(_SEED_BITS) if seed is None else seed
        request = Request(
            request_id=name,
            prompt_ids=checked.token_ids,
            max_tokens=len(checked.token_ids) + checked.n_output,  # from here on input and output together
            sampling=rules.sampling,
            seed=seed,
            end_token_ids=rules.end_token_ids,
            encoder_ids=checked.encoder_ids,
            pooling=checked.pooling,
            kind=rules.kind(checked.scored_ids),
            constraint=rules.constraint(),
            owner=owner,
            weight=weight_in_bytes(
                (*checked.token_ids, *checked.encoder_ids, *checked.scored_ids),
                rules.sampling,
                len(checked.block_hashes or ()),
            ),
            priority=checked.priority,
            cache_salt=checked.cache_salt,
            block_hashes=None if checked.block_hashes is None else list(checked.block_hashes),
            adapter=checked.adapter,
            kv_transfer=checked.kv_transfer,
            weights_versions=((0, self.scheduler.weights_version),),  # until it is admitted
        )
        return request, rules

    def enter(self, request: Request, sink: PublishedSink, begun: OutputSoFar | None = None) -> None:
        """Let a new request wait for its turn. `sink` gets its output, and `begun` is as for `submit`."""
        request.sink = sink
        begun = begun or self._begun_elsewhere(request)
        if begun is not None:
            self._continued = True
            request.continue_from(begun.token_ids, begun.logprobs, begun.weights_versions)
            sink.publish(None, None)
        try:
            self.pool.add(request)
        except ServiceClosed:
            if self.failure is not None:
                message = f"the engine failed and accepts no more requests: {self.failure}"
                raise EngineError(message) from self.failure
            raise

    def _begun_elsewhere(self, request: Request) -> OutputSoFar | None:
        """The first token of a request whose prompt another server has computed, if it says that token."""
        first = None if self._kv.arriving is None else self._kv.arriving.first_token(request)
        return None if first is None else OutputSoFar((first,), (), request.weights_versions)

    def _arrived(self, request: Request) -> None:
        self.timeline.arrived(request)
        if self._kv.arriving is not None and request.kv_transfer is not None:
            self._kv.arriving.ask(request)

    def _stopped(self) -> EngineError | None:
        """Why live requests will get no more output; None while the service runs."""
        if self.thread.is_alive() and self._failure is None:
            return None
        return self.failure or EngineError("the service was closed")

    # On the scheduler's thread.

    def _run(self) -> None:
        """Take turns of Algorithm 1's loop, or wait for work, until the service is closed and empty."""
        try:
            working = True
            while working:
                while self._dropped:
                    self.pool.end(self._dropped.popleft(), FinishReason.CANCELLED)
                if self._stopping:
                    for request in list(self.pool.in_arrival_order()):
                        self.pool.end(request, FinishReason.CANCELLED)
                activity = self.pool.activity()  # read before everything that may change it
                if self.interludes.active:
                    self.interludes.look()
                working = (
                    self._step() or self.pool.wait_for_work(LOOK_SECONDS, activity) or not self._stopping
                )
            self._ended = True
            self.interludes.close()
        except BaseException as error:  # a panic in Rust code too, or users would wait forever
            failure = self._failure = _as_engine_error(error)
            self.pool.close()
            if self._recorder is not None:
                self._recorder.cannot_repeat("the engine failed")
            try:
                fail_all(self.scheduler)
            except BaseException as second:  # waiting users check `failure` themselves
                failure.add_note(f"then, while ending its requests: {second!r}")

    def _disturbance(self) -> str:
        """Name an event since the start that a replay of the arrivals cannot repeat; "" for none."""
        if self.scheduler.weights_version:
            return "the weights were replaced"
        if self.interludes.active:
            return "the engine was paused, put to sleep or given new weights"
        if self._continued:
            return "a request continued an earlier output"
        return "a worker was lost" if self.recovery.losses else ""

    def _has_other_work(self) -> bool:
        """Whether to interrupt a restart, because there is work outside the pool."""
        return self._stopping or bool(self._dropped)

    def _publish_all(self, deliveries: Sequence[Delivery]) -> None:
        for request, _, reason in deliveries:
            sink = cast("PublishedSink | None", request.sink)
            if sink is None:  # its end has been published
                continue
            failure = None
            if reason is FinishReason.ERROR:
                cause = request.failure
                failure = self.failure if cause is None else request.failure_kind(cause)
            sink.publish(reason, failure)
            if reason is not None:
                # The two refer to each other, and only a garbage collection would free them.
                request.sink = None
        if self.on_published is not None:
            self.on_published()
        if self.on_delivered is not None:
            self.on_delivered(deliveries)


def _as_engine_error(error: BaseException) -> EngineError:
    if isinstance(error, EngineError):
        return error
    failure = EngineError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
