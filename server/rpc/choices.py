"""The choices of one call: submitted together, and written to one stream as their output arrives."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from orca_jax.errors import OrcaError
from orca_jax.request.request import FinishReason
from orca_jax.scheduling.admission import CheckedPrompt
from orca_jax.service.prepared_params import OutputRules
from server.gateway.gateway import Gateway, LiveRequest, Submission, submitted
from server.gateway.side_threads import run_for_response
from server.rpc import generation_pb2 as pb
from server.rpc import messages

_LOGPROBS = 100  # the size of one token's log-probabilities, in characters

Write = Callable[[pb.GenerateResponse], Awaitable[None]]


class Choice:
    """One choice of a call: its live request, and how many of its tokens have been written."""

    def __init__(self, live: LiveRequest, request_id: str, index: int) -> None:
        self.live = live
        self.n_written = 0
        self._request_id = request_id
        self._index = index

    async def write_to(self, write: Write) -> None:
        """Write the output piece by piece. While a write waits for the client, more output accumulates.

        Raises the error that ended the request before it was complete.
        """
        async for piece in self.live:
            if piece.score is not None:
                await self._write_search(write)
                return
            make = partial(
                messages.response,
                self.live,
                piece,
                self.n_written,
                request_id=self._request_id,
                index=self._index,
            )
            n_scored = len(piece.logprobs) + (0 if self.n_written else len(self.live.prompt_logprobs or ()))
            await write(await run_for_response(_LOGPROBS * n_scored, make))
            self.n_written += len(piece.token_ids)

    async def _write_search(self, write: Write) -> None:
        """Write the choices of a completed beam search, one message each."""
        for index, piece in enumerate(self.live.pieces()):
            await write(messages.response(self.live, piece, 0, request_id=self._request_id, index=index))
            self.n_written += len(piece.token_ids)


@asynccontextmanager
async def choices_of(
    gateway: Gateway,
    prompt: CheckedPrompt,
    rules: OutputRules,
    *,
    request_id: str,
    owner: str,
    party: str,
    timeout: float | None,
) -> AsyncIterator[list[Choice]]:
    """Submit the `n` choices that the rules ask for, all or none. They end when the context exits.

    In the service, choice 0 has the id `request_id` and choice i the id `request_id i`. Clients' ids contain
    no spaces, so no other call can have such an id. Raises what `Gateway.submit` raises.
    """
    submissions = [
        Submission(prompt, choice_rules, f"{request_id} {i}" if i else request_id)
        for i, choice_rules in enumerate(rules.choices(prompt_once=True))
    ]
    async with submitted(gateway, submissions, owner=owner, party=party, timeout=timeout) as requests:
        yield [Choice(live, request_id, i) for i, live in enumerate(requests)]


def end_all(choices: Sequence[Choice], reason: FinishReason) -> bool:
    """End the choices that are still running. False if none was running."""
    running = [choice.live for choice in choices if choice.live.finish_reason is None]
    for live in running:
        live.end(reason)
    return bool(running)


async def write_all(choices: Sequence[Choice], write: Write) -> None:
    """Write the output of all choices, one message at a time.

    If one choice fails, the others are cancelled, their output so far is written, and the first error is
    raised.
    """
    if len(choices) == 1:
        await choices[0].write_to(write)
        return
    lock = asyncio.Lock()  # gRPC allows one write at a time per call
    failures: list[OrcaError] = []

    async def write_locked(message: pb.GenerateResponse) -> None:
        async with lock:
            await write(message)

    async def write_choice(choice: Choice) -> None:
        try:
            await choice.write_to(write_locked)
        except OrcaError as error:
            failures.append(error)
            if len(failures) == 1:
                end_all(choices, FinishReason.CANCELLED)

    try:
        async with asyncio.TaskGroup() as tasks:
            for choice in choices:
                tasks.create_task(write_choice(choice))
    except BaseExceptionGroup as group:  # a write failed
        raise group.exceptions[0] from group
    if failures:
        raise failures[0]
