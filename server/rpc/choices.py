"""The choices of one call: requests of the service that come in together, and whose pieces leave in turn."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from orca_jax.errors import OrcaError
from orca_jax.request.request import FinishReason
from orca_jax.service.prepared_params import OutputRules
from server.gateway.gateway import Gateway, LiveRequest
from server.gateway.side_threads import run_for_response
from server.gateway.submissions import Submission, submitted
from server.rpc import generation_pb2 as pb
from server.rpc import messages

_TOLD = 100  # as many characters as one token's log-probabilities take

Write = Callable[[pb.GenerateResponse], Awaitable[None]]


class Choice:
    """One output of a call: its live request, and how many of its tokens have been written."""

    def __init__(self, live: LiveRequest, request_id: str, index: int) -> None:
        self.live = live
        self.n_written = 0
        self._request_id = request_id
        self._index = index

    async def write_to(self, write: Write) -> None:
        """Write its pieces as they come; while a write waits for the client, more gather.

        Raises what ended it before it was complete.
        """
        async for piece in self.live:
            make = partial(
                messages.response,
                self.live,
                piece,
                self.n_written,
                request_id=self._request_id,
                index=self._index,
            )
            n_told = len(piece.logprobs) + (0 if self.n_written else len(self.live.prompt_logprobs or ()))
            await write(await run_for_response(_TOLD * n_told, make))
            self.n_written += len(piece.token_ids)


@asynccontextmanager
async def choices_of(
    gateway: Gateway,
    prompt_ids: Sequence[int],
    rules: OutputRules,
    *,
    request_id: str,
    owner: str,
    timeout: float | None,
) -> AsyncIterator[list[Choice]]:
    """The `n` choices that the rules ask for, all or none accepted; they end when this is left.

    Choice 0 is the service's request `request_id`, choice i is `request_id i`: no client's own id has a
    space, so another call cannot have taken it. Raises as `Gateway.submit` does.
    """
    submissions = [
        Submission(prompt_ids, one, f"{request_id} {i}" if i else request_id)
        for i, one in enumerate(rules.choices(prompt_once=True))
    ]
    async with submitted(gateway, submissions, owner=owner, timeout=timeout) as requests:
        yield [Choice(live, request_id, i) for i, live in enumerate(requests)]


def end_all(choices: Sequence[Choice], reason: FinishReason) -> bool:
    """Ask those that still run to end; False where none does."""
    running = [choice.live for choice in choices if choice.live.finish_reason is None]
    for live in running:
        live.end(reason)
    return bool(running)


async def write_all(choices: Sequence[Choice], write: Write) -> None:
    """Write all that comes of all choices, one message at a time.

    Where one ends before it is complete the others are ended too, what they had is written, and what ended
    the first is raised.
    """
    if len(choices) == 1:
        await choices[0].write_to(write)
        return
    lock = asyncio.Lock()  # a call has one write under way at most
    failures: list[OrcaError] = []

    async def in_turn(message: pb.GenerateResponse) -> None:
        async with lock:
            await write(message)

    async def whole(choice: Choice) -> None:
        try:
            await choice.write_to(in_turn)
        except OrcaError as error:
            failures.append(error)
            if len(failures) == 1:
                end_all(choices, FinishReason.CANCELLED)

    try:
        async with asyncio.TaskGroup() as tasks:
            for choice in choices:
                tasks.create_task(whole(choice))
    except BaseExceptionGroup as group:  # a write failed
        raise group.exceptions[0] from group
    if failures:
        raise failures[0]
