"""All that one response generates: submitted together, counted together, ended together."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Literal

from starlette.types import Receive

from orca_jax.generation import Piece
from orca_jax.request import FinishReason, SamplingParams
from server.gateway import Gateway, LiveRequest
from server.http.protocol import Usage


class Tally:
    """What a response has given so far: for its usage, and for the access log."""

    def __init__(self, n_input: int, n_choices: int) -> None:
        self.n_input = n_input
        self.n_output = 0
        self.finish_reasons: list[FinishReason | None] = [None] * n_choices
        self._began = time.perf_counter()
        self._first_token: float | None = None

    def take(self, index: int, piece: Piece) -> None:
        """A piece of choice `index` is on its way to the client."""
        self.n_output += len(piece.token_ids)
        if piece.finish_reason is not None:
            self.finish_reasons[index] = piece.finish_reason
        if self._first_token is None:
            self._first_token = time.perf_counter()

    def usage(self) -> Usage:
        """The counts so far, as OpenAI has them."""
        n_input, n_output = self.n_input, self.n_output
        return Usage(prompt_tokens=n_input, completion_tokens=n_output, total_tokens=n_input + n_output)

    def complete(self, index: int) -> Literal["stop", "length"]:
        """Why choice `index`, which is complete, ended."""
        return "stop" if self.finish_reasons[index] is FinishReason.STOP else "length"

    def facts(self) -> dict[str, Any]:
        """The same for the access log."""
        facts: dict[str, Any] = {"n_input": self.n_input, "n_output": self.n_output}
        facts["finish_reasons"] = [None if reason is None else str(reason) for reason in self.finish_reasons]
        if self._first_token is not None:
            facts["time_to_first_token_ms"] = round(1000 * (self._first_token - self._began), 1)
        return facts


class Choices:
    """`n` choices for each prompt, in OpenAI's order: choice i of prompt p is number p * n + i.

    Each choice of a prompt has a seed of its own: `seed + i`, or one that is drawn. The prompts have been
    checked. `facts` are the access log's. Raises InvalidSamplingParameter where the seeds leave their range.
    """

    def __init__(
        self,
        gateway: Gateway,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        n: int,
        *,
        response_id: str,
        facts: dict[str, Any],
    ) -> None:
        self.response_id = response_id
        self.tally = Tally(sum(map(len, prompts)), n * len(prompts))
        self._gateway = gateway
        self._facts = facts
        seed = sampling.seed
        each = [
            sampling if seed is None or i == 0 else dataclasses.replace(sampling, seed=seed + i)
            for i in range(n)
        ]
        self._submissions = [(prompt, one) for prompt in prompts for one in each]

    def __len__(self) -> int:
        return len(self._submissions)

    @asynccontextmanager
    async def running(self, receive: Receive) -> AsyncIterator[list[LiveRequest]]:
        """The live requests, which end when this is left, or when the client leaves.

        All of them are taken by the service or none: raises QueueFull, NotReady or EngineError otherwise.
        """
        with ExitStack() as ending:
            requests = [
                ending.enter_context(
                    self._gateway.submit(prompt, sampling, request_id=f"{self.response_id}-{i}")
                )
                for i, (prompt, sampling) in enumerate(self._submissions)
            ]
            watch = asyncio.create_task(self._end_if_client_leaves(receive, requests))
            try:
                yield requests
            finally:
                self._facts.update(self.tally.facts())
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)

    async def texts(self, receive: Receive) -> list[str]:
        """Every choice's whole text.

        Raises what ended one of them before it was complete, besides QueueFull, NotReady and EngineError.
        """
        async with self.running(receive) as requests:
            return [await self._whole(i, request) for i, request in enumerate(requests)]

    async def _whole(self, index: int, request: LiveRequest) -> str:
        """The others go on meanwhile: what they have is kept until it is asked for."""
        text = list[str]()
        async for piece in request:
            self.tally.take(index, piece)
            text.append(piece.text)
        return "".join(text)

    async def _end_if_client_leaves(self, receive: Receive, requests: Sequence[LiveRequest]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._facts["disconnected"] = True
        for request in requests:
            request.end(FinishReason.CANCELLED)
