"""An endpoint process's service: it checks requests itself, and sends them to the engine's process."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from orca_jax.errors import EngineError, OrcaError, QueueFull
from orca_jax.iteration.rows.ended import Ended
from orca_jax.request.adapter import Adapter
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.admission import CheckedPrompt
from orca_jax.scheduling.request_pool import Delivery
from orca_jax.service.output import Output, RequestHandle
from orca_jax.service.prepared_params import OutputRules
from orca_jax.service.service import Drop, End, Service
from server.endpoint_processes import messages
from server.endpoint_processes.messages import Accepted, Delivered, Failure, Loaded, Refused, Status, Submit

H = TypeVar("H", bound=RequestHandle)


class RemoteService(Service):
    """The service of another process. For one event loop, that which reads the line.

    `send` sends a message, or raises QueueFull if too many bytes wait to be sent. A request here has its
    output and what answers tell of it; all else of its state is in the engine's process.
    """

    def __init__(self, loaded: Loaded, send: Callable[[object], None]) -> None:
        super().__init__(
            config=loaded.serving, model=loaded.config, tokenizer=loaded.tokenizer, pooling=loaded.pooling
        )
        self.max_each = loaded.serving.max_queue_each
        self._send = send
        self._status = Status()
        self._adapters: dict[str, Adapter] = {}
        self._line_failure: EngineError | None = None
        self._numbers = 0
        self._live: dict[int, Output] = {}
        # The requests that are not accepted yet, which may have ended already: the answer of the engine's
        # process may come after the output.
        self._asked: dict[int, tuple[Request, asyncio.Future[None]]] = {}
        self._asked_ids: dict[str, asyncio.Future[None]] = {}
        self._dropped = deque[int]()  # numbers of requests whose handles were dropped, on any thread

    @property
    def failure(self) -> EngineError | None:
        if self._status.failure is not None:
            return EngineError(self._status.failure)
        return self._line_failure

    @property
    def trouble(self) -> str | None:
        return self._status.trouble

    @property
    def is_paused(self) -> bool:
        return self._status.is_paused

    @property
    def is_asleep(self) -> bool:
        return self._status.is_asleep

    @property
    def expected_wait(self) -> float | None:
        return self._status.expected_wait

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self._adapters

    def check_room(self, n: int, owner: str) -> None:
        """Only the engine's process knows the queue, and refuses what it has no room for."""

    def submit(
        self,
        prompt: Sequence[int] | CheckedPrompt,
        sampling: SamplingParams | OutputRules,
        *,
        request_id: str,
        owner: str,
        handle: Callable[[Output, End, Drop], H],
    ) -> H:
        """Send a request. Await its `acceptance`: only that tells whether the engine's process takes it."""
        rules = self.rules(sampling) if isinstance(sampling, SamplingParams) else sampling
        checked = prompt if isinstance(prompt, CheckedPrompt) else self.check(prompt, rules)
        self._numbers = number = self._numbers + 1
        seed = rules.sampling.seed
        request = Request(
            request_id=request_id,
            prompt_ids=checked.token_ids,
            max_tokens=len(checked.token_ids) + checked.n_output,
            sampling=rules.sampling,
            seed=0 if seed is None else seed,  # until it is accepted
            encoder_ids=checked.encoder_ids,
            pooling=checked.pooling,
            owner=owner,
        )
        output = Output(request, lambda: rules.text_stream(checked.token_ids), lambda: self.failure)
        self._send(Submit(number, request_id, owner, checked, rules.sampling, rules.form))
        self._live[number] = output
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked[number] = request, future
        self._asked_ids[request_id] = future
        return handle(output, lambda reason: self._end(number, reason), lambda: self._dropped.append(number))

    def acceptance(self, request_id: str) -> Awaitable[None] | None:
        return self._asked_ids.get(request_id)

    # What the line brings.

    def accepted(self, message: Accepted) -> None:
        self._answered(message.number, None).seed = message.seed

    def refused(self, message: Refused) -> None:
        self._live.pop(message.number).publish(FinishReason.CANCELLED, None)
        self._answered(message.number, message.error.error())

    def delivered(self, message: Delivered) -> None:
        """Show the users of an iteration's requests their output."""
        deliveries = list[Delivery]()
        for number, token_ids, reason, facts in message.entries:
            output = self._live.get(number)
            if output is None:  # it was given up here
                continue
            request, failure = output.request, None
            if facts is not None:
                failure = _tell(request, facts)
            request.output_ids += token_ids
            for token_id in token_ids:
                output.push(token_id)
            output.publish(reason, failure)
            if reason is not None:
                del self._live[number]
            deliveries.append((request, len(token_ids), reason))
        if self.on_delivered is not None:
            self.on_delivered(deliveries)
        self.end_dropped()

    def follow(self, status: Status) -> None:
        """Take a new status, and tell the engine's process."""
        self._status = status
        self._adapters = {one.name: Adapter(*one) for one in status.adapters}
        self._send(messages.Seen(status.number))

    def lose(self, failure: EngineError) -> None:
        """The engine's process is gone: end all requests."""
        self._line_failure = failure
        deliveries = list[Delivery]()
        for output in self._live.values():
            output.publish(FinishReason.ERROR, failure)
            deliveries.append((output.request, 0, FinishReason.ERROR))
        self._live.clear()
        for number in list(self._asked):
            self._answered(number, failure)
        if self.on_delivered is not None:
            self.on_delivered(deliveries)

    def end_dropped(self) -> None:
        """Cancel the requests whose handles were dropped. Called with each delivery, and once a second."""
        while self._dropped:
            self._end(self._dropped.popleft(), FinishReason.CANCELLED)

    def _end(self, number: int, reason: FinishReason) -> None:
        if number in self._live:
            try:
                self._send(messages.End(number, reason))
            except QueueFull:  # the engine's process does not read; once it does, it will find it dropped
                self._dropped.append(number)

    def _answered(self, number: int, error: OrcaError | None) -> Request:
        """Tell who awaits the acceptance of a request, which is returned."""
        request, future = self._asked.pop(number)
        self._asked_ids.pop(request.request_id, None)
        if not future.done():  # otherwise whoever waited has left
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
                future.exception()  # so that asyncio does not report it where nobody waits
        return request


def _tell(request: Request, facts: Mapping[str, Any]) -> EngineError | None:
    """Set what the engine's process tells of a request; returns its failure."""
    failure: EngineError | None = None
    for name, value in facts.items():
        if name == "logprobs":
            request.logprobs += value
        elif name == "outcome":
            request.kind = Ended(*value)
        elif name == "failure":
            error = Failure.error(value)
            failure = error if isinstance(error, EngineError) else EngineError(str(error))
        else:
            setattr(request, name, value)
    return failure
