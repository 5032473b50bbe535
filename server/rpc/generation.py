"""The methods of the service orca.v1.Generation, which generation.proto documents."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc

from orca_jax.errors import InvalidPrompt, InvalidRequest, OrcaError, RequestTimedOut
from orca_jax.request.pooling import check_dimensions
from orca_jax.request.request import FinishReason
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.admission import CheckedPrompt
from orca_jax.service.embeddings import pooled_prompt
from orca_jax.service.prepared_params import OutputRules
from server.gateway.gateway import (
    Gateway,
    LiveRequest,
    Submission,
    all_ended,
    check_embeddings,
    check_inputs,
    submitted,
)
from server.gateway.random_ids import random_id
from server.gateway.served_model import ServedModel
from server.gateway.side_threads import run_for_request, run_for_response
from server.rpc import generation_pb2 as pb
from server.rpc import messages
from server.rpc.calls import Calls, Context, Deadline
from server.settings.endpoint_options import EndpointOptions

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


SERVICE = pb.DESCRIPTOR.services_by_name["Generation"].full_name

_UNREAD_SECONDS = 60.0  # for a slow client to read the rest, after the longest time a request may run


class Generation:
    """Passes calls to the gateway, within the limits of `options`.

    Messages arrive as bytes, so that a malformed one is answered, logged and counted like any other.
    """

    def __init__(self, gateway: Gateway, calls: Calls, options: EndpointOptions) -> None:
        self._gateway, self._calls, self._options = gateway, calls, options
        self._longest = options.request_timeout + _UNREAD_SECONDS
        self._live: dict[tuple[str, str], list[Choice]] = {}  # by party and request id

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service with `server`; call it before `server` starts."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers = {
            "Generate": stream(self.generate, None, pb.GenerateResponse.SerializeToString),
            "Cancel": unary(self.cancel, None, pb.CancelResponse.SerializeToString),
            "Embed": unary(self.embed, None, pb.EmbedResponse.SerializeToString),
            "Models": unary(self.models, None, pb.ModelsResponse.SerializeToString),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])

    async def generate(self, data: bytes, context: Context) -> None:
        async with self._calls.answered("Generate", context) as facts:
            deadline = Deadline(context)
            request = await run_for_request(len(data), partial(messages.parsed, pb.GenerateRequest, data))
            request_id = messages.request_id(request)
            facts["request_id"] = request_id
            model = self._gateway.model(request.model or None)
            scheduling = model.scheduled(messages.scheduling_params(request))
            scheduling.check_policy(model.serving.scheduling.scheduling_policy)
            sampling, prompt_ids = await run_for_request(len(data), partial(self._read, request, model))
            rules = await self._gateway.compiler.rules(model, sampling)
            tenant, party = self._calls.tenant(context), self._calls.party(context)
            check = partial(model.service.check, prompt_ids, rules, scheduling, tenant=tenant)
            prompt = await run_for_request(len(data), check)
            model.check_routed([prompt], sampling)
            async with choices_of(
                self._gateway,
                prompt,
                rules,
                request_id=request_id,
                owner=self._calls.owner(context),
                party=party,
                timeout=deadline.seconds,
            ) as choices:
                facts["prompt_tokens"] = len(prompt_ids)
                self._live[party, request_id] = choices
                try:
                    await self._write_all(choices, context, request_id)
                except asyncio.CancelledError:
                    if deadline.passed:
                        end_all(choices, FinishReason.TIMEOUT)
                    raise
                finally:
                    del self._live[party, request_id]
                    _note_outcome(choices, facts)

    async def embed(self, data: bytes, context: Context) -> pb.EmbedResponse:
        async with self._calls.answered("Embed", context) as facts:
            request = await run_for_request(len(data), partial(messages.parsed, pb.EmbedRequest, data))
            model = self._gateway.model(request.model or None)
            read = partial(self._read_inputs, request, model, self._calls.tenant(context))
            submissions = await run_for_request(len(data), read)
            ended = await all_ended(
                self._gateway,
                submissions,
                owner=self._calls.owner(context),
                running=[],
                timeout=Deadline(context).seconds,
            )
            facts["prompt_tokens"] = sum(live.n_input for live in ended)
            n_numbers = len(ended) * model.config.pooled_size
            return await run_for_response(n_numbers, partial(messages.embeddings, request, ended))

    async def cancel(self, data: bytes, context: Context) -> pb.CancelResponse:
        async with self._calls.answered("Cancel", context) as facts:
            request = await run_for_request(len(data), partial(messages.parsed, pb.CancelRequest, data))
            facts["request_id"] = request.request_id
            party = self._calls.party(context)
            choices = self._live.get((party, request.request_id))
            if choices is not None:
                return pb.CancelResponse(found=end_all(choices, FinishReason.CANCELLED))
            # Otherwise it may be an HTTP request with the same key.
            return pb.CancelResponse(found=self._gateway.cancel(request.request_id, party=party))

    async def models(self, data: bytes, context: Context) -> pb.ModelsResponse:
        async with self._calls.answered("Models", context):
            await run_for_request(len(data), partial(messages.parsed, pb.ModelsRequest, data))
            model = self._gateway.model()
            return pb.ModelsResponse(models=[messages.model_card(one) for one in (model, *model.adapted())])

    def _read(self, request: pb.GenerateRequest, model: ServedModel) -> tuple[SamplingParams, list[int]]:
        """The sampling parameters and the prompt. The cost grows with the message."""
        sampling = messages.sampling_params(request.sampling, model.defaults.sampling)
        # All choices are submitted together, so they must fit into one owner's share of an empty queue.
        most = min(self._options.max_choices, model.service.max_each)
        if sampling.n > most:
            raise InvalidRequest(f"n is {sampling.n}; one request may ask for {most} choices", param="n")
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidPrompt("the request has no prompt; set text or token_ids", param="prompt")
        if kind == "token_ids":
            return sampling, messages.numbers("prompt", request.token_ids.ids)
        return sampling, model.encode(request.text)

    def _read_inputs(self, request: pb.EmbedRequest, model: ServedModel, tenant: str) -> list[Submission]:
        """The engine's requests, one for each input. The cost grows with the message."""
        scheduling = model.scheduled(messages.scheduling_params(request))
        scheduling.check_policy(model.serving.scheduling.scheduling_policy)
        dimensions = request.dimensions if request.HasField("dimensions") else None
        size = model.config.pooled_size
        check_inputs(len(request.inputs), self._options.max_inputs, "inputs")
        check_dimensions(dimensions, size)
        check_embeddings(len(request.inputs), size if dimensions is None else dimensions, "inputs")
        pooling, name = request.pooling or None, f"embd-{random_id()}"
        submissions: list[Submission] = []
        for i, one in enumerate(request.inputs):
            kind = one.WhichOneof("input")
            if kind is None:
                message = f"inputs.{i} has neither text nor token_ids; set one of them"
                raise InvalidPrompt(message, param=f"inputs.{i}")
            if kind == "token_ids":
                token_ids = messages.numbers("inputs", one.token_ids.ids)
            else:
                token_ids = model.encode(one.text, param="inputs")
            prompt = pooled_prompt(model.service, token_ids, pooling, scheduling, tenant=tenant)
            submissions.append(Submission(*prompt, f"{name}-{i}"))
        return submissions

    async def _write_all(self, choices: list[Choice], context: Context, request_id: str) -> None:
        """Send the request's id at once, as initial metadata, then all output."""
        limit = asyncio.timeout(self._longest)
        try:
            async with limit:
                await context.send_initial_metadata((("x-request-id", request_id),))
                await write_all(choices, context.write)
        except TimeoutError:
            if limit.expired():
                message = f"the client did not take all messages within {self._longest:g} seconds"
                raise RequestTimedOut(message) from None
            raise


def _note_outcome(choices: list[Choice], facts: dict[str, Any]) -> None:
    """Add the outcome to the facts for the access log."""
    facts["cached_tokens"] = choices[0].live.n_cached
    facts["completion_tokens"] = sum(choice.n_written for choice in choices)
    reasons = [choice.live.finish_reason for choice in choices]
    if len(reasons) == 1:
        facts["finish_reason"] = reasons[0]
    else:
        facts["finish_reasons"] = reasons
