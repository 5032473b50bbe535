"""The choices of one response, which are submitted, counted and ended together."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from starlette.types import Receive

from orca_jax.request.kv_transfer import KVTransferParams
from orca_jax.request.request import FinishReason
from orca_jax.request.routed_experts import EncodedIds, as_base64
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.token_text import TokenText
from orca_jax.scheduling.admission import CheckedPrompt
from orca_jax.service.output import Piece
from orca_jax.service.prepared_params import OutputRules
from server.gateway.gateway import LiveRequest, Submission, submitted
from server.gateway.reply.events import ReplyEvent
from server.gateway.reply.reply_plan import ReplyPlan, ReplyReader
from server.gateway.side_threads import run_for_response
from server.http.fields.generation import CompletionTokensDetails, PromptTokensDetails, Usage
from server.http.fields.logprobs import (
    LogprobsWriter,
    PlacedToken,
    TokenNames,
    TokenPlaces,
    prompt_logprobs,
    prompt_places,
)
from server.http.state import ApiCall


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputExtras:
    """The outputs that a request asks for besides text.

    `shown` has the special tokens that are part of the output text, with their texts. `write_logprobs` writes
    log-probabilities, None if they were not requested. `prompts` has the prompts' texts if they are to be
    echoed before the output. With `only_prompts` nothing else is returned: the one generated token is left
    out. With `token_ids` the token ids of prompt and output are returned, and with `prompt_logprobs` the
    log-probabilities of the prompt.
    """

    names: TokenNames
    shown: Mapping[int, TokenText] = field(default_factory=dict[int, TokenText])
    write_logprobs: LogprobsWriter | None = None
    prompts: Sequence[str] | None = None
    only_prompts: bool = False
    token_ids: bool = False
    prompt_logprobs: bool = False


class ShownPiece(NamedTuple):
    """A piece as the client sees it, and the tokens whose log-probabilities come with it."""

    piece: Piece
    tokens: list[PlacedToken]


class ChoiceOutput:
    """The output of one choice. What the client sees does not depend on how the output is split into pieces.

    `prompt` is the text of the prompt to echo, or None. `scored` is the request that computes the prompt's
    log-probabilities: this choice's, or another choice's of the same prompt.
    """

    def __init__(self, extras: OutputExtras, scored: LiveRequest, prompt: str | None) -> None:
        self._extras = extras
        self._scored = scored
        self._prompt = prompt  # None once it has been shown
        tokenizer = extras.names.tokenizer
        continuing = tokenizer is None or tokenizer.have_text(scored.prompt_ids)
        self._places = TokenPlaces(
            tokenizer,
            len(prompt or ""),
            continuing=continuing,
            shown=extras.shown,
            every=extras.token_ids,
        )

    @property
    def n_prompt_tokens(self) -> int:
        """The number of prompt tokens that come with the next piece."""
        return 0 if self._prompt is None else len(self._scored.prompt_ids)

    def take(self, piece: Piece) -> ShownPiece:
        """The next piece for the client. Call it only after the `scored` request has its first piece."""
        tokens = list[PlacedToken]()
        if self._extras.only_prompts:
            reason = None if piece.finish_reason is None else FinishReason.LENGTH
            piece = Piece((), "", reason, weights_version=piece.weights_version)
        elif self._extras.write_logprobs is not None:
            tokens = self._places.take(piece)
        if self._prompt is not None:
            prompt, self._prompt = self._prompt, None
            piece = replace(piece, text=prompt + piece.text)
            if (logprobs := self._scored.prompt_logprobs) is not None:
                ids, tokenizer = self._scored.prompt_ids, self._extras.names.tokenizer
                tokens = prompt_places(ids, prompt.encode(), logprobs, tokenizer) + tokens
        return ShownPiece(piece, tokens)


class Tally:
    """Counts what a response has sent so far, for its usage and for the access log."""

    def __init__(self, n_input: int, n_choices: int) -> None:
        self.n_input = n_input
        self.n_output = 0
        self.requests: Sequence[LiveRequest] = ()
        self.first_choices: Sequence[LiveRequest] = ()  # the first choice of each prompt
        self.finish_reasons: list[FinishReason | None] = [None] * n_choices
        self.weights_versions: list[int | None] = [None] * n_choices
        self.readers: Sequence[ReplyReader] = ()  # one for each choice, if replies are more than text
        self._began = time.perf_counter()
        self._first_token: float | None = None

    def take(self, index: int, piece: Piece) -> None:
        """Count a piece of choice `index` that is being sent to the client."""
        self.n_output += len(piece.token_ids)
        if piece.finish_reason is not None:
            self.finish_reasons[index] = piece.finish_reason
            self.weights_versions[index] = piece.weights_version
        if self._first_token is None:
            self._first_token = time.perf_counter()

    @property
    def n_cached(self) -> int:
        """Prompt tokens that were cached.

        Like prompt tokens, and as in vLLM, they are counted once per prompt, by its first choice. Later
        choices find what the first has computed, which says nothing about the prompt.
        """
        return sum(request.n_cached for request in self.first_choices)

    def usage(self) -> Usage:
        """The token counts so far, in OpenAI's form."""
        n_input, n_output = self.n_input, self.n_output
        details = dict[str, int]()
        if self.readers:
            details["reasoning_tokens"] = sum(reader.n_reasoning_tokens for reader in self.readers)
        predicted = [one for request in self.requests if (one := request.predicted) is not None]
        if predicted:
            details["accepted_prediction_tokens"] = sum(n_accepted for n_accepted, _ in predicted)
            details["rejected_prediction_tokens"] = sum(n_rejected for _, n_rejected in predicted)
        return Usage(
            prompt_tokens=n_input,
            completion_tokens=n_output,
            total_tokens=n_input + n_output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.n_cached),
            completion_tokens_details=CompletionTokensDetails(**details) if details else None,
        )

    def finish_reason(self, index: int) -> Literal["stop", "length", "tool_calls"]:
        """The finish reason of choice `index`, which must be complete."""
        if self.finish_reasons[index] is not FinishReason.STOP:
            return "length"
        return "tool_calls" if self.readers and self.readers[index].n_calls else "stop"

    def facts(self) -> dict[str, Any]:
        """The counts so far, for the access log."""
        counts = {"n_input": self.n_input, "n_cached": self.n_cached, "n_output": self.n_output}
        facts: dict[str, Any] = counts
        facts["finish_reasons"] = [None if reason is None else str(reason) for reason in self.finish_reasons]
        if self._first_token is not None:
            facts["time_to_first_token_ms"] = round(1000 * (self._first_token - self._began), 1)
        return facts


class CompleteChoice(NamedTuple):
    """A complete choice, and the tokens whose log-probabilities were requested.

    Only a beam search gives it a `score`. `events` make up a chat reply, None if the reply is only `text`.
    """

    text: str
    tokens: list[PlacedToken]
    token_ids: Sequence[int]
    score: float | None
    events: Sequence[ReplyEvent] | None


class ClientWatch:
    """Ends the requests that a list has by then, when the client leaves: from construction until `close`.

    `receive` waits for the client's next message on a task, if the server has no `Caller`.
    """

    def __init__(self, call: ApiCall, receive: Receive, requests: Sequence[LiveRequest]) -> None:
        self._caller, self._facts, self._requests = call.caller, call.facts, requests
        self._task = None
        if self._caller is None:
            self._task = asyncio.create_task(self._wait(receive))
        else:
            self._caller.on_departure(self._end)

    async def close(self) -> None:
        if self._caller is not None:
            self._caller.on_departure(None)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _wait(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._end()

    def _end(self) -> None:
        self._facts["disconnected"] = True
        for request in self._requests:
            request.end(FinishReason.CANCELLED)


class Choices:
    """`n` choices for each prompt, in OpenAI's order: choice i of prompt p is number p * n + i.

    Choice i of a prompt has the seed `seed + i`, or a random one. The choices of a beam search are one
    request, and complete together. `extras` says what to return in addition to output text, None for
    nothing. `plan` says how chat replies are parsed, None if they are only text.
    """

    def __init__(
        self,
        call: ApiCall,
        prompts: Sequence[CheckedPrompt],
        rules: OutputRules,
        *,
        extras: OutputExtras | None,
        response_id: str,
        plan: ReplyPlan | None = None,
    ) -> None:
        self.response_id = response_id
        self.extras = extras
        rules_each = rules.choices(prompt_once=True)
        self._n_requests = len(rules_each)  # for each prompt
        self._n_each = rules.sampling.n
        self._returns_experts = rules.sampling.return_routed_experts
        self._requests: Sequence[LiveRequest] = ()
        self._outputs: list[ChoiceOutput] = []
        # For each prompt, set when its first choice has its first piece.
        self._scored = [asyncio.Event() for _ in prompts]
        n_input = sum(prompt.n_input for prompt in prompts)
        self.tally = Tally(n_input, self._n_each * len(prompts))
        if plan is not None:
            self.tally.readers = [
                ReplyReader(plan, rules, continuing=rules.follow_text(prompt.token_ids))
                for prompt in prompts
                for _ in range(self._n_each)
            ]
        self._prompts = prompts
        self._call = call
        choices = [(prompt, choice_rules) for prompt in prompts for choice_rules in rules_each]
        self._submissions = [
            Submission(prompt, choice_rules, f"{response_id}-{i}")
            for i, (prompt, choice_rules) in enumerate(choices)
        ]

    def __len__(self) -> int:
        return len(self.tally.finish_reasons)

    @asynccontextmanager
    async def running(self, receive: Receive) -> AsyncIterator[list[LiveRequest]]:
        """The live requests, which end when the context exits or the client disconnects.

        The service accepts either all of them or none, in which case this raises QueueFull, NotReady or
        EngineError.
        """
        async with submitted(self._call.gateway, self._submissions, owner=self._call.owner) as requests:
            self._outputs = self._new_outputs(requests)
            self._requests = requests
            self.tally.requests = requests
            self.tally.first_choices = requests[:: self._n_requests]
            watch = ClientWatch(self._call, receive, requests)
            try:
                yield requests
            finally:
                self._call.facts.update(self.tally.facts())
                await watch.close()

    async def take(self, index: int, piece: Piece) -> ShownPiece:
        """The next piece of choice `index` for the client.

        Only a prompt's first choice, which is submitted first, computes the prompt's log-probabilities; the
        other choices wait for them. If the first choice fails earlier, the whole response fails.
        """
        if self.extras is None:
            return ShownPiece(piece, [])
        scored, is_first = self._scored[index // self._n_each], index % self._n_each == 0
        output = self._outputs[index]
        if output.n_prompt_tokens and not is_first:
            await scored.wait()
        shown = await run_for_response(4 * output.n_prompt_tokens, partial(output.take, piece))
        if is_first:
            scored.set()
        return shown

    async def events(self, index: int, piece: Piece) -> list[ReplyEvent]:
        """The events of a chat reply's next piece; none if replies are only text."""
        readers = self.tally.readers
        if not readers:
            return []
        return await run_for_response(len(piece.text), partial(readers[index].take, piece))

    def _new_outputs(self, requests: Sequence[LiveRequest]) -> list[ChoiceOutput]:
        """An output for each choice; none if responses have only the text."""
        extras = self.extras
        if extras is None:
            return []
        outputs = list[ChoiceOutput]()
        for i in range(len(self)):
            prompt_index = i // self._n_each
            prompt = None if extras.prompts is None else extras.prompts[prompt_index]
            outputs.append(ChoiceOutput(extras, requests[prompt_index * self._n_requests], prompt))
        return outputs

    def logprobs(self, tokens: Sequence[PlacedToken]) -> Any:
        """Log-probabilities of a choice's tokens in the route's form; None if they were not requested."""
        extras = self.extras
        if extras is None or extras.write_logprobs is None:
            return None
        return extras.write_logprobs(tokens, extras.names)

    @property
    def returns_token_ids(self) -> bool:
        return self.extras is not None and self.extras.token_ids

    def prompt_ids(self, index: int) -> Sequence[int]:
        """The tokens of the prompt of choice `index`."""
        return self._prompts[index // self._n_each].token_ids

    @property
    def returns_prompt_logprobs(self) -> bool:
        return self.extras is not None and self.extras.prompt_logprobs

    def prompt_logprobs(self, index: int) -> list[dict[str, Any] | None]:
        """The log-probabilities of the prompt of choice `index`, which must be complete."""
        assert self.extras is not None
        return prompt_logprobs(self._of_prompt(index), self.extras.names)

    def prompt_logprobs_size(self, index: int) -> int:
        """The number of characters that these take, roughly."""
        if not self.returns_prompt_logprobs:
            return 0
        return sum(64 * (1 + len(token.top)) for token in self._of_prompt(index))

    def _of_prompt(self, index: int) -> Sequence[TokenLogprobs]:
        return self._requests[index // self._n_each * self._n_requests].prompt_logprobs or ()

    @property
    def kv_lease(self) -> KVTransferParams | None:
        """The params with which another server fetches the first prompt, once its choice is complete."""
        return self._requests[0].kv_lease

    @property
    def offers_early(self) -> bool:
        """Whether the params are to be sent before the one choice is complete."""
        transfer = self._prompts[0].kv_transfer
        return len(self._submissions) == 1 and transfer is not None and transfer.offer_early

    def routed_experts(self, index: int) -> EncodedIds | None:
        """The experts of choice `index`, which must be complete; None if they were not requested."""
        ids = self._requests[index].routed_experts if self._returns_experts else None
        return None if ids is None else as_base64(ids)

    def routed_size(self, index: int) -> int:
        """The number of characters that the experts of choice `index` take, roughly."""
        ids = self._requests[index].routed_experts if self._returns_experts else None
        return 0 if ids is None else 2 * ids.nbytes

    async def complete(self, receive: Receive) -> list[CompleteChoice]:
        """Wait for all choices to complete.

        Raises QueueFull, NotReady, EngineError, or whatever ended a choice before it was complete.
        """
        async with self.running(receive) as requests:
            return await self.complete_all(requests)

    async def complete_all(self, requests: Sequence[LiveRequest]) -> list[CompleteChoice]:
        """Wait for the choices of `running` requests to complete. Raises whatever ended one before it was."""
        if self._n_requests == self._n_each:
            return [await self._complete(i, request) for i, request in enumerate(requests)]
        return [
            choice
            for i, request in enumerate(requests)
            for choice in await self._complete_search(i * self._n_each, request)
        ]

    async def _complete_search(self, first: int, request: LiveRequest) -> list[CompleteChoice]:
        """Wait for a beam search, and return its choices, the first of which is number `first`."""
        async for _ in request:
            pass
        choices = list[CompleteChoice]()
        for index, piece in enumerate(request.pieces(), first):
            shown, tokens = await self.take(index, piece)
            self.tally.take(index, shown)
            events = await self.events(index, piece)
            reply = events if self.tally.readers else None
            choices.append(CompleteChoice(shown.text, tokens, shown.token_ids, piece.score, reply))
        return choices

    async def _complete(self, index: int, request: LiveRequest) -> CompleteChoice:
        """Wait for one choice. The others run meanwhile, and their output is kept."""
        text, tokens, token_ids, score = list[str](), list[PlacedToken](), list[int](), None
        events = list[ReplyEvent]()
        async for piece in request:
            score = piece.score
            shown, shown_tokens = await self.take(index, piece)
            tokens += shown_tokens
            token_ids += shown.token_ids
            self.tally.take(index, shown)
            text.append(shown.text)
            events += await self.events(index, piece)
        reply = events if self.tally.readers else None
        return CompleteChoice("".join(text), tokens, token_ids, score, reply)
