"""All that one response generates: submitted together, counted together, ended together."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

from starlette.types import Receive

from orca_jax.request.request import FinishReason
from orca_jax.service.generation import Piece
from orca_jax.service.prepared_params import OutputRules
from server.gateway.gateway import Gateway, LiveRequest
from server.gateway.side_threads import run_for_response
from server.gateway.submissions import Submission, submitted
from server.http.fields.both import Usage
from server.http.fields.token_places import PlacedToken
from server.http.generation.choice_output import ChoiceOutput, Shown, Telling


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


class Whole(NamedTuple):
    """A choice that is complete, and the tokens that are to be told of."""

    text: str
    tokens: list[PlacedToken]


class Choices:
    """`n` choices for each prompt, in OpenAI's order: choice i of prompt p is number p * n + i.

    Each choice of a prompt has a seed of its own: `seed + i`, or one that is drawn. The prompts have been
    checked. `telling` is what to tell beside the output's text, None for nothing. `owner` is whose share of
    the queue they take. `facts` are the access log's.
    """

    def __init__(
        self,
        gateway: Gateway,
        prompts: Sequence[Sequence[int]],
        rules: OutputRules,
        *,
        telling: Telling | None,
        response_id: str,
        owner: str,
        facts: dict[str, Any],
    ) -> None:
        self.response_id = response_id
        self._owner = owner
        self.telling = telling
        each = rules.choices(prompt_once=True)
        self._n_each = len(each)
        self._outputs: list[ChoiceOutput] = []
        self._scored = [asyncio.Event() for _ in prompts]  # the first choice of a prompt has its first piece
        self.tally = Tally(sum(map(len, prompts)), len(each) * len(prompts))
        self._gateway = gateway
        self._facts = facts
        choices = [(prompt, one) for prompt in prompts for one in each]
        self._submissions = [
            Submission(prompt, one, f"{response_id}-{i}") for i, (prompt, one) in enumerate(choices)
        ]

    def __len__(self) -> int:
        return len(self._submissions)

    @asynccontextmanager
    async def running(self, receive: Receive) -> AsyncIterator[list[LiveRequest]]:
        """The live requests, which end when this is left, or when the client leaves.

        All of them are taken by the service or none: raises QueueFull, NotReady or EngineError otherwise.
        """
        async with submitted(self._gateway, self._submissions, owner=self._owner) as requests:
            self._outputs = self._new_outputs(requests)
            watch = asyncio.create_task(self._end_if_client_leaves(receive, requests))
            try:
                yield requests
            finally:
                self._facts.update(self.tally.facts())
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)

    async def take(self, index: int, piece: Piece) -> Shown:
        """What is shown of the next piece of choice `index`.

        The log-probabilities of a prompt are those of its first choice, which is submitted first; the other
        choices wait for it. Where it fails before it has any the response fails with it.
        """
        if self.telling is None:
            return Shown(piece, [])
        scored, is_first = self._scored[index // self._n_each], index % self._n_each == 0
        output = self._outputs[index]
        if output.n_to_tell and not is_first:
            await scored.wait()
        shown = await run_for_response(4 * output.n_to_tell, partial(output.take, piece))
        if is_first:
            scored.set()
        return shown

    def _new_outputs(self, requests: Sequence[LiveRequest]) -> list[ChoiceOutput]:
        """What is shown of each of the live requests; none where that is its text as it comes."""
        telling = self.telling
        if telling is None:
            return []
        outputs = list[ChoiceOutput]()
        for i in range(len(requests)):
            number = i // self._n_each
            prompt = None if telling.prompts is None else telling.prompts[number]
            outputs.append(ChoiceOutput(telling, requests[number * self._n_each], prompt))
        return outputs

    def logprobs(self, tokens: Sequence[PlacedToken]) -> Any:
        """Those of a choice's tokens, in the form of its route; None where they were not asked for."""
        return None if self.telling is None else self.telling.written(tokens)

    async def wholes(self, receive: Receive) -> list[Whole]:
        """Every choice, complete.

        Raises what ended one of them before it was complete, besides QueueFull, NotReady and EngineError.
        """
        async with self.running(receive) as requests:
            return [await self._whole(i, request) for i, request in enumerate(requests)]

    async def _whole(self, index: int, request: LiveRequest) -> Whole:
        """The others go on meanwhile: what they have is kept until it is asked for."""
        text, tokens = list[str](), list[PlacedToken]()
        async for piece in request:
            shown, told = await self.take(index, piece)
            tokens += told
            self.tally.take(index, shown)
            text.append(shown.text)
        return Whole("".join(text), tokens)

    async def _end_if_client_leaves(self, receive: Receive, requests: Sequence[LiveRequest]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._facts["disconnected"] = True
        for request in requests:
            request.end(FinishReason.CANCELLED)
