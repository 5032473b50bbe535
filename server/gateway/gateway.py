"""The gateway: both endpoints submit requests to the service here, and receive output on the event loop.

The scheduler's thread calls into the event loop once per iteration, whatever the number of requests, and
names the requests with new output. Each of them then wakes up and reads its Output. What a slow client has
not read stays there, bounded by the request's whole output, so a slow client delays no one.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from enum import StrEnum
from functools import partial
from itertools import count
from typing import NamedTuple, Self

from orca_jax.errors import (
    EngineError,
    InvalidRequest,
    OutputFailed,
    RequestCancelled,
    RequestTimedOut,
    WorkerLost,
)
from orca_jax.request.kv_transfer import KVTransferParams
from orca_jax.request.request import FinishReason
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.admission import CheckedPrompt
from orca_jax.scheduling.request_pool import Delivery
from orca_jax.service.orca import Orca
from orca_jax.service.output import LOOK_SECONDS, Output, Piece, RequestHandle
from orca_jax.service.prepared_params import OutputRules
from server.errors import NotReady, RequestIdTaken, UnknownModel
from server.gateway.served_model import ServedModel
from server.gateway.side_threads import RuleCompiler

LOGGER = logging.getLogger("orca.workers")


def log_loss(lost: WorkerLost, n_running: int) -> None:
    """Log the loss of a worker. The `n_running` requests that were running run again after recovery."""
    consequence = "no request has to run again"
    if n_running:
        runs = "request runs" if n_running == 1 else "requests run"
        consequence = f"{n_running} {runs} again when the workers are up"
    LOGGER.warning("%s", _one_line(f"stage {lost.stage + 1} is lost: {lost.why}; {consequence}"))


def log_failure(failure: EngineError) -> None:
    """Log that the engine failed permanently."""
    LOGGER.error("%s", _one_line(f"the engine failed, and takes no more requests: {failure}"))


def _one_line(text: str) -> str:
    """Replace unprintable characters by spaces: a worker's error may have several lines."""
    return "".join(character if character.isprintable() else " " for character in text)


_GRACE_SECONDS = 5.0  # for the scheduler to end a request when asked; if a device hangs it never does
_MOST_NAMED = 10  # models in an error
_SUBMITTED_AT_ONCE = 8  # submissions before the event loop may run something else


class Phase(StrEnum):
    """A phase of the server's life. Requests are accepted and wait while RECOVERING or PAUSED, and are
    refused while ASLEEP.
    """

    LOADING = "loading"
    READY = "ready"
    RECOVERING = "recovering"
    PAUSED = "paused"
    ASLEEP = "asleep"
    DRAINING = "draining"
    FAILED = "failed"


class ServerStatus(NamedTuple):
    """A server's phase and the reason for it; the reason is None when the server is ready."""

    phase: Phase
    reason: str | None


class LiveRequest(RequestHandle):
    """An endpoint's request: an async iterator of output pieces, and a context manager that ends the request.

    The last piece has the finish reason `stop` or `length`. A request that ends otherwise yields the output
    so far, then raises RequestCancelled, RequestTimedOut or EngineError. For one consumer, on the gateway's
    loop.
    """

    def __init__(
        self,
        output: Output,
        end: Callable[[FinishReason], object],
        drop: Callable[[], object],
        *,
        gateway: "Gateway",
        known_as: "_KnownAs",
        timeout: float | None,
    ) -> None:
        super().__init__(output, end, drop)
        self.known_as = known_as
        self._gateway = gateway
        # Not an asyncio.Event: that costs several times as much, and this runs for each token.
        self._woken = True  # an output may begin with a token that another server has sampled
        self._waiter: asyncio.Future[None] | None = None
        self._error: RequestCancelled | RequestTimedOut | EngineError | None = None
        self._exhausted = False
        self._timeout = timeout
        self._timers: list[asyncio.TimerHandle] = []
        if timeout is not None:
            self._timers.append(gateway.loop.call_later(timeout, self.end, FinishReason.TIMEOUT))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        while not self._exhausted:
            if not self._woken:
                self._waiter = self._gateway.loop.create_future()
                await self._waiter
            self._woken = self._error is not None  # after an error there is nothing more to wait for
            piece = self.poll()
            if piece is None:
                # A spurious wake-up, unless the engine did not end the request within its grace period.
                self._exhausted = self._error is not None
            elif piece.finish_reason is None:
                return piece
            else:
                self._exhausted = True
                if piece.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    return piece
                self._error = self._error_for(piece.finish_reason)
                if piece.token_ids:
                    return replace(piece, finish_reason=None)
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback refers to this object
        raise StopAsyncIteration

    async def offered(self) -> KVTransferParams | None:
        """Wait until another server may fetch the prompt, or the request ends. Call it before reading."""
        while self.kv_lease is None and self.finish_reason is None and self._error is None:
            self._waiter = self._gateway.loop.create_future()
            await self._waiter
        self._woken = True
        return self.kv_lease

    def end(self, reason: FinishReason) -> None:
        """Ask the engine to end the request; if it does not within a few seconds, end it here anyway."""
        super().end(reason)
        self._timers.append(self._gateway.loop.call_later(_GRACE_SECONDS, self._give_up, reason))

    def __exit__(self, *_: object) -> None:
        super().end(FinishReason.CANCELLED)
        for timer in self._timers:
            timer.cancel()
        self._gateway.forget(self)

    def wake(self) -> None:
        """Wake the consumer: there may be new output."""
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _give_up(self, reason: FinishReason) -> None:
        if self.finish_reason is None:
            self._error = self._error_for(reason)
            self.wake()

    def _error_for(self, reason: FinishReason) -> RequestCancelled | RequestTimedOut | EngineError:
        if reason is FinishReason.TIMEOUT:
            after = "" if self._timeout is None else f" after {self._timeout:g} seconds"
            return RequestTimedOut(f"the request was ended{after}, before it was complete")
        if reason is FinishReason.ERROR:
            if isinstance(self.failure, OutputFailed):
                return type(self.failure)(f"this output failed: {self.failure}")
            return EngineError(f"the engine failed: {self.failure}")
        if self._gateway.phase is Phase.DRAINING:
            return RequestCancelled("the server is shutting down, and the request was not complete in time")
        return RequestCancelled("the request was cancelled")


class _KnownAs(NamedTuple):
    """A request's id, with the party that chose it: two parties may use the same id."""

    party: str
    request_id: str


class Gateway:
    """Connects both endpoints to the service. Use it only on the event loop where it was made.

    It accepts requests from `open` until the server drains. `request_timeout` in seconds limits every
    request; None means no limit. `loop` is its event loop; `compiler` makes the output rules of requests.
    """

    def __init__(self, *, request_timeout: float | None = None) -> None:
        self.compiler = RuleCompiler()
        self._request_timeout = request_timeout
        self._model: ServedModel | None = None
        self._draining = False
        self._live: dict[str, LiveRequest] = {}  # by id in the service
        self._known: dict[_KnownAs, LiveRequest] = {}
        self._numbers = count(1)
        self._empty = asyncio.Event()
        self._empty.set()
        self.loop = asyncio.get_running_loop()

    @property
    def phase(self) -> Phase:
        """The server's current phase. FAILED is final: the engine does not recover."""
        return self.status.phase

    @property
    def status(self) -> ServerStatus:
        """The current phase, with the reason for it."""
        service = None if self._model is None else self._model.service
        if service is not None and service.failure is not None:
            return ServerStatus(Phase.FAILED, f"the engine failed: {service.failure}")
        if self._draining:
            return ServerStatus(Phase.DRAINING, "the server is shutting down")
        if service is None:
            return ServerStatus(Phase.LOADING, "the model is still loading")
        trouble = service.trouble
        if trouble is not None:
            reason = f"{trouble}; its requests run again when the workers are up"
            return ServerStatus(Phase.RECOVERING, reason)
        if service.is_asleep:
            return ServerStatus(
                Phase.ASLEEP, "the engine is asleep, and its memory released, until its operator wakes it"
            )
        if service.is_paused:
            return ServerStatus(Phase.PAUSED, "the engine's operator has paused it; requests wait")
        return ServerStatus(Phase.READY, None)

    @property
    def n_live(self) -> int:
        """Requests whose clients have not received all output yet."""
        return len(self._live)

    @property
    def served(self) -> ServedModel | None:
        """The model once it is loaded, whatever the phase."""
        return self._model

    def open(self, model: ServedModel) -> None:
        """Accept requests: the model is loaded and warm."""
        self._model = model
        model.service.on_delivered = self._on_delivered
        if isinstance(model.service, Orca):
            model.service.recovery.on_trouble = partial(self._on_trouble, model.service)

    def model(self, name: str | None = None) -> ServedModel:
        """The served model, or the one that its adapter called `name` makes of it.

        Raises NotReady, EngineError, or UnknownModel if `name` is neither.
        """
        phase = self.phase
        if self._model is None or phase is Phase.LOADING:
            raise NotReady("the model is still loading; try again later")
        if phase is Phase.FAILED:
            raise EngineError(f"the engine failed, and takes no more requests: {self._model.service.failure}")
        if phase is Phase.DRAINING:
            raise NotReady("the server is shutting down, and takes no more requests")
        if name is None or name == self._model.name:
            return self._model
        adapters = self._model.service.adapters
        if name in adapters:
            return self._model.with_adapter(name)
        served = [self._model.name, *adapters]
        more = f", and {len(served) - _MOST_NAMED} more" if len(served) > _MOST_NAMED else ""
        named = ", ".join(map(repr, served[:_MOST_NAMED]))
        is_ = "is" if len(served) == 1 else "are"
        raise UnknownModel(f"there is no model {name!r} here; {named}{more} {is_} served")

    def submit(
        self,
        prompt: Sequence[int] | CheckedPrompt,
        sampling: SamplingParams | OutputRules,
        *,
        request_id: str,
        owner: str = "",
        party: str | None = None,
        timeout: float | None = None,
    ) -> LiveRequest:
        """Submit a request to the service.

        `owner` is the API key or client address whose share of the queue the request uses. Only `party`, by
        default the owner, can cancel the request by its id; among a party's live requests ids are unique.
        `timeout` in seconds applies if it is shorter than the server's limit.

        Raises a subclass of InvalidRequest, RequestIdTaken, QueueFull, EngineError or NotReady.
        """
        model = self.model()
        known_as = _KnownAs(owner if party is None else party, request_id)
        if known_as in self._known:
            raise RequestIdTaken(f"request_id {request_id!r} is in use by a live request; choose another")
        limits = [limit for limit in (timeout, self._request_timeout) if limit is not None]
        handle = partial(LiveRequest, gateway=self, known_as=known_as, timeout=min(limits, default=None))
        submit = partial(model.service.submit, prompt, sampling, owner=owner, handle=handle)
        try:
            live = submit(request_id=request_id)
        except InvalidRequest as error:
            if error.param != "request_id":
                raise
            # The id belongs to another party's request, or to one whose client has left while the pool still
            # holds it. Neither concerns this client, so the service gets an id that no client can choose.
            live = submit(request_id=f"{request_id} #{next(self._numbers)}")
        self._live[live.request_id] = self._known[known_as] = live
        self._empty.clear()
        return live

    def acceptance(self, request: LiveRequest) -> Awaitable[None] | None:
        """Return what to await until the engine has accepted a request; None if it has."""
        return self.model().service.acceptance(request.request_id)

    def forget(self, request: LiveRequest) -> None:
        """Remove a request from the live ones, when its endpoint has finished with it."""
        if self._live.get(request.request_id) is request:
            del self._live[request.request_id]
            del self._known[request.known_as]
        if not self._live:
            self._empty.set()

    def cancel(self, request_id: str, *, party: str = "") -> bool:
        """Cancel a party's live request. False if the party has none with that id."""
        live = self._known.get(_KnownAs(party, request_id))
        if live is None or live.finish_reason is not None:
            return False
        live.end(FinishReason.CANCELLED)
        return True

    async def watch(self) -> None:
        """Run forever: when the service has failed, log it once and wake all waiting requests.

        The service may fail without delivering anything, so nothing else would wake them.
        """
        logged = False
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            failure = None if self._model is None else self._model.service.failure
            if failure is not None:
                if not logged:
                    log_failure(failure)
                    logged = True
                for live in self._live.values():
                    live.wake()

    async def drain(self, timeout: float) -> int:
        """Reject new requests, and give live ones `timeout` seconds to finish, then cancel them.

        Returns how many were cancelled.
        """
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        except TimeoutError:
            left = list(self._live.values())
            for live in left:
                live.end(FinishReason.CANCELLED)
            try:
                async with asyncio.timeout(2 * _GRACE_SECONDS):
                    await self._empty.wait()
            except TimeoutError:
                pass  # clients that do not read are left: the caller closes their connections next
            return len(left)
        return 0

    def _on_delivered(self, deliveries: Sequence[Delivery]) -> None:
        """Called on the scheduler's thread, once per iteration."""
        self._on_loop(partial(self._wake, deliveries))

    def _on_trouble(self, service: Orca, lost: WorkerLost | None) -> None:
        """Called on the scheduler's thread, which must not block on writing the log."""
        if lost is not None:
            # A preempted request has run too, and waits to run again.
            again = sum(req.row >= 0 or req.n_preempted > 0 for req in service.pool.live())
            self._on_loop(partial(log_loss, lost, again))
        elif service.recovery.last_recovery_seconds is not None:
            seconds = service.recovery.last_recovery_seconds
            self._on_loop(partial(LOGGER.warning, "the workers are up again after %.2f seconds", seconds))

    def _on_loop(self, callback: Callable[[], None]) -> None:
        try:
            self.loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the event loop is closed: no client is left
            pass

    def _wake(self, deliveries: Sequence[Delivery]) -> None:
        for request, _, _ in deliveries:
            live = self._live.get(request.request_id)
            if live is not None:
                live.wake()


class Submission(NamedTuple):
    """One choice: its prompt, its output rules and its request id in the service."""

    prompt: CheckedPrompt
    rules: OutputRules
    request_id: str


@asynccontextmanager
async def submitted(
    gateway: Gateway,
    submissions: Sequence[Submission],
    *,
    owner: str,
    party: str | None = None,
    timeout: float | None = None,
) -> AsyncIterator[list[LiveRequest]]:
    """Submit all requests of one response, without blocking the event loop. Either all are accepted or none.

    The requests end when the context exits. Raises what `Gateway.submit` raises.
    """
    if len(submissions) > _SUBMITTED_AT_ONCE:
        gateway.model().service.check_room(len(submissions), owner)
    with ExitStack() as stack:
        requests = list[LiveRequest]()
        for i, (prompt, rules, request_id) in enumerate(submissions):
            if i and i % _SUBMITTED_AT_ONCE == 0:
                await asyncio.sleep(0)
            live = gateway.submit(
                prompt, rules, request_id=request_id, owner=owner, party=party, timeout=timeout
            )
            requests.append(stack.enter_context(live))
        for live in requests:
            if (accepted := gateway.acceptance(live)) is not None:
                await accepted
        yield requests


_LONGEST_SECONDS = 60


def retry_after_seconds(gateway: Gateway) -> int:
    """The whole seconds, 1 to 60, in which the waiting requests will finish at the recent rate.

    1 if too few requests have finished to know the rate.
    """
    if gateway.served is None:
        return 1
    seconds = gateway.served.service.expected_wait
    return 1 if seconds is None else min(max(math.ceil(seconds), 1), _LONGEST_SECONDS)


_MOST_IN_ENGINE = (
    128  # requests of one response; the others wait here, and take no place in the engine's queue
)
_MOST_NUMBERS = 1 << 22  # of a response: about 90 MB of JSON


async def all_ended(
    gateway: Gateway,
    submissions: Sequence[Submission],
    *,
    owner: str,
    running: list[LiveRequest],
    timeout: float | None = None,
) -> list[LiveRequest]:
    """Run the requests until all have ended. Meanwhile `running` holds those that are in the engine.

    If one fails, the others are cancelled. Raises QueueFull, NotReady, EngineError, or whatever ended a
    request before it was complete.
    """
    ended: list[LiveRequest] = []
    most = max(1, min(_MOST_IN_ENGINE, gateway.model().service.max_each))
    for first in range(0, len(submissions), most):
        some = submissions[first : first + most]
        async with submitted(gateway, some, owner=owner, timeout=timeout) as requests:
            running[:] = requests
            for request in requests:
                async for _ in request:
                    pass
            ended += requests
    return ended


def check_inputs(n: int, most: int, param: str) -> None:
    """Raise InvalidRequest unless there are 1 to `most` inputs."""
    if not 1 <= n <= most:
        advice = f"a request may have 1 to {most} (orca serve --max-inputs)"
        raise InvalidRequest(f"{param} has {n} inputs; {advice}", param=param)


def check_embeddings(n_inputs: int, size: int, param: str) -> None:
    """Raise InvalidRequest if the embeddings, of `size` numbers each, are too much for one response."""
    if n_inputs * size > _MOST_NUMBERS:
        message = f"{param} has {n_inputs} inputs, for {size} numbers each; send {_MOST_NUMBERS // size} "
        raise InvalidRequest(message + "at a time, or ask for fewer dimensions", param=param)
