"""The gateway: where both endpoints hand requests to the service, and take their pieces on the event loop.

The scheduler's thread crosses to the event loop once an iteration, whatever the number of requests: it says
which have something new, and each is then woken to take it from its mailbox. What a slow client has not taken
lies there, no more than its request's own output, and holds nobody up.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import NamedTuple, Self

from orca_jax.errors import (
    EngineError,
    InvalidRequest,
    OutputFailed,
    RequestCancelled,
    RequestTimedOut,
    WorkerLost,
)
from orca_jax.request.request import FinishReason
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.request_pool import Delivery
from orca_jax.service.generation import LOOK_SECONDS, Generation, Piece
from orca_jax.service.prepared_params import OutputRules
from server.errors import NotReady, RequestIdTaken, UnknownModel
from server.gateway.rule_compiler import RuleCompiler
from server.gateway.served_model import ServedModel
from server.gateway.trouble_log import log_failure, log_loss, log_recovery

_GRACE_SECONDS = 5.0  # for the scheduler to end what it was asked to end; a device that hangs never does


class Phase(StrEnum):
    """Where a server is in its life. While it is RECOVERING requests are taken, and wait for the engine."""

    LOADING = "loading"
    READY = "ready"
    RECOVERING = "recovering"
    DRAINING = "draining"
    FAILED = "failed"


class Standing(NamedTuple):
    """The phase a server is in, and why; None when it is ready."""

    phase: Phase
    reason: str | None


class LiveRequest:
    """A request of an endpoint: an asynchronous iterator of its pieces, and a context manager that ends it.

    The last piece has the finish reason `stop` or `length`. A request that ends otherwise yields what came
    and then raises RequestCancelled, RequestTimedOut or EngineError. For one consumer, on the gateway's loop.
    """

    def __init__(self, gateway: "Gateway", generation: Generation, timeout: float | None) -> None:
        self._gateway = gateway
        self._generation = generation
        # By hand, because an asyncio.Event costs several times as much, and this is done for each token.
        self._woken = False
        self._waiter: asyncio.Future[None] | None = None
        self._over: RequestCancelled | RequestTimedOut | EngineError | None = None
        self._exhausted = False
        self._timeout = timeout
        self._timers: list[asyncio.TimerHandle] = []
        if timeout is not None:
            self._timers.append(gateway.loop.call_later(timeout, self._time_out))

    @property
    def request_id(self) -> str:
        """The request's name in the service."""
        return self._generation.request_id

    @property
    def n_input(self) -> int:
        """Tokens of the prompt."""
        return self._generation.n_input

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt."""
        return self._generation.prompt_ids

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """Those of the prompt's tokens behind the first, from the first piece on; None if not asked for."""
        return self._generation.prompt_logprobs

    @property
    def seed(self) -> int:
        """The caller's seed, or the one that was drawn."""
        return self._generation.seed

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it runs."""
        return self._generation.finish_reason

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        while not self._exhausted:
            if not self._woken:
                self._waiter = self._gateway.loop.create_future()
                await self._waiter
            self._woken = self._over is not None  # then there is nothing more to wait for
            piece = self._generation.poll()
            if piece is None:
                # Woken for nothing, unless the engine was given its time to answer and did not.
                self._exhausted = self._over is not None
            elif piece.finish_reason is None:
                return piece
            else:
                self._exhausted = True
                if piece.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    return piece
                self._over = self._why(piece.finish_reason)
                if piece.token_ids:
                    return replace(piece, finish_reason=None)
        if self._over is not None:
            raise self._over
        raise StopAsyncIteration

    def end(self, reason: FinishReason) -> None:
        """Ask for its end; if the engine does not answer within seconds, it ends here all the same."""
        self._generation.end(reason)
        self._timers.append(self._gateway.loop.call_later(_GRACE_SECONDS, self._give_up, reason))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.cancel()
        self._generation.close()
        self._gateway.forget(self)

    def wake(self) -> None:
        """There may be something new."""
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _time_out(self) -> None:
        self.end(FinishReason.TIMEOUT)

    def _give_up(self, reason: FinishReason) -> None:
        if self._generation.finish_reason is None:
            self._over = self._why(reason)
            self.wake()

    def _why(self, reason: FinishReason) -> RequestCancelled | RequestTimedOut | EngineError:
        if reason is FinishReason.TIMEOUT:
            after = "" if self._timeout is None else f" after {self._timeout:g} seconds"
            return RequestTimedOut(f"the request was ended{after}, before it was complete")
        if reason is FinishReason.ERROR:
            failure = self._generation.failure
            if isinstance(failure, OutputFailed):
                return OutputFailed(f"this output failed: {failure}")
            return EngineError(f"the engine failed: {failure}")
        if self._gateway.phase is Phase.DRAINING:
            return RequestCancelled("the server is shutting down, and the request was not complete in time")
        return RequestCancelled("the request was cancelled")


class Gateway:
    """Both endpoints' way to the service; lives on one event loop and is used on it alone.

    It opens when the model is there, and closes when the server drains. `request_timeout` in seconds bounds
    every request, None does not. `loop` is its event loop; `compiler` makes the rules of requests.
    """

    def __init__(self, *, request_timeout: float | None = None) -> None:
        self.compiler = RuleCompiler()
        self._request_timeout = request_timeout
        self._model: ServedModel | None = None
        self._draining = False
        self._live: dict[str, LiveRequest] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self.loop = asyncio.get_running_loop()

    @property
    def phase(self) -> Phase:
        """Where the server is in its life; FAILED stays, for the engine does not come back."""
        return self.standing.phase

    @property
    def standing(self) -> Standing:
        """The phase and the reason, of one moment."""
        service = None if self._model is None else self._model.service
        if service is not None and service.failure is not None:
            return Standing(Phase.FAILED, f"the engine failed: {service.failure}")
        if self._draining:
            return Standing(Phase.DRAINING, "the server is shutting down")
        if service is None:
            return Standing(Phase.LOADING, "the model is still loading")
        trouble = service.trouble
        if trouble is not None:
            reason = f"{trouble}; its requests run again when the workers are up"
            return Standing(Phase.RECOVERING, reason)
        return Standing(Phase.READY, None)

    @property
    def n_live(self) -> int:
        """Requests whose clients have not got all yet."""
        return len(self._live)

    @property
    def served(self) -> ServedModel | None:
        """The model, once it is there, whatever the phase."""
        return self._model

    def open(self, model: ServedModel) -> None:
        """The model is loaded and warm: let requests in."""
        self._model = model
        model.service.on_delivered = self._delivered
        model.service.recovery.on_trouble = partial(self._troubled, model)

    def model(self, name: str | None = None) -> ServedModel:
        """The model that is served. Raises NotReady, EngineError, or UnknownModel if `name` is another's."""
        phase = self.phase
        if self._model is None or phase is Phase.LOADING:
            raise NotReady("the model is still loading; try again later")
        if phase is Phase.FAILED:
            raise EngineError(f"the engine failed, and takes no more requests: {self._model.service.failure}")
        if phase is Phase.DRAINING:
            raise NotReady("the server is shutting down, and takes no more requests")
        if name is not None and name != self._model.name:
            raise UnknownModel(f"there is no model {name!r} here; {self._model.name!r} is served")
        return self._model

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | OutputRules,
        *,
        request_id: str,
        owner: str = "",
        timeout: float | None = None,
    ) -> LiveRequest:
        """Hand a request to the service. `timeout` in seconds, where it is shorter than the server's own.

        `owner` is the API key or the address that it takes a place in the queue for.

        Raises a leaf of InvalidRequest, RequestIdTaken, QueueFull, EngineError or NotReady.
        """
        model = self.model()
        if request_id in self._live:  # the pool may have let it go while its client still reads
            raise RequestIdTaken(f"request_id {request_id!r} is that of a live request; give each its own")
        try:
            generation = model.service.submit(prompt_ids, sampling, request_id=request_id, owner=owner)
        except InvalidRequest as error:
            if error.param == "request_id":  # its client has left, and the pool has yet to let it go
                raise RequestIdTaken(str(error)) from error
            raise
        timeouts = [limit for limit in (timeout, self._request_timeout) if limit is not None]
        live = LiveRequest(self, generation, min(timeouts, default=None))
        self._live[request_id] = live
        self._empty.clear()
        return live

    def forget(self, request: LiveRequest) -> None:
        """The endpoint is done with it."""
        if self._live.get(request.request_id) is request:
            del self._live[request.request_id]
        if not self._live:
            self._empty.set()

    def cancel(self, request_id: str) -> bool:
        """Ask a live request to end as cancelled; False when there is none of that id."""
        live = self._live.get(request_id)
        if live is None or live.finish_reason is not None:
            return False
        live.end(FinishReason.CANCELLED)
        return True

    async def watch(self) -> None:
        """Wake all that wait when the service died without a word, and log its end, whatever it was.

        Runs as long as the server.
        """
        logged = False
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            failure = None if self._model is None else self._model.service.failure
            if failure is not None:
                if not logged:
                    log_failure(failure)
                    logged = True
                self._wake_all()

    async def drain(self, timeout: float) -> int:
        """Take no more, and let what is live end within `timeout` seconds; how many had to be ended."""
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
                pass  # clients that do not read; their connections are closed next
            return len(left)
        return 0

    def _delivered(self, deliveries: Sequence[Delivery]) -> None:
        """On the scheduler's thread, once an iteration."""
        self._on_loop(partial(self._wake, deliveries))

    def _troubled(self, model: ServedModel, lost: WorkerLost | None) -> None:
        """On the scheduler's thread, which must not wait for whoever reads the log."""
        service = model.service
        if lost is not None:
            self._on_loop(partial(log_loss, lost, service.pool.n_running))
        elif service.recovery.last_recovery_seconds is not None:
            self._on_loop(partial(log_recovery, service.recovery.last_recovery_seconds))

    def _on_loop(self, what: Callable[[], None]) -> None:
        try:
            self.loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            pass

    def _wake(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            live = self._live.get(delivery.request.request_id)
            if live is not None:
                live.wake()

    def _wake_all(self) -> None:
        for live in self._live.values():
            live.wake()
