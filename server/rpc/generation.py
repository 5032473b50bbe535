"""The service orca.v1.Generation; generation.proto documents its methods."""

import asyncio
from functools import partial
from typing import Any

import grpc

from orca_jax.errors import InvalidRequest, RequestTimedOut
from orca_jax.request.request import FinishReason
from orca_jax.request.sampling_params import SamplingParams
from server.gateway.gateway import Gateway
from server.gateway.served_model import ServedModel
from server.gateway.side_threads import run_for_request
from server.rpc import generation_pb2 as pb
from server.rpc import messages
from server.rpc.calls import Calls, Context, Deadline
from server.rpc.choices import Choice, choices_of, end_all, write_all
from server.rpc.embedding import Embedding

SERVICE = pb.DESCRIPTOR.services_by_name["Generation"].full_name

_UNREAD_SECONDS = 60.0  # for a slow client to read the rest, after the longest time a request may run


class Generation:
    """Passes calls to the gateway. `request_timeout` is the gateway's, in seconds; it bounds the writing too.

    A call may ask for at most `max_choices` choices, and for no more than may wait in the queue.

    Messages arrive as bytes, so that a malformed one is answered, logged and counted like any other.
    """

    def __init__(
        self,
        gateway: Gateway,
        calls: Calls,
        embedding: Embedding,
        *,
        request_timeout: float,
        max_choices: int,
    ) -> None:
        self._gateway = gateway
        self._embedding = embedding
        self._calls = calls
        self._longest = request_timeout + _UNREAD_SECONDS
        self._max_choices = max_choices
        self._live: dict[tuple[str, str], list[Choice]] = {}  # by party and request id

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service with `server`; call it before `server` starts."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers = {
            "Generate": stream(self.generate, None, pb.GenerateResponse.SerializeToString),
            "Cancel": unary(self.cancel, None, pb.CancelResponse.SerializeToString),
            "Embed": unary(self._embedding.embed, None, pb.EmbedResponse.SerializeToString),
            "Models": unary(self.models, None, pb.ModelsResponse.SerializeToString),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])

    async def generate(self, data: bytes, context: Context) -> None:
        """Continue a prompt."""
        async with self._calls.answered("Generate", context) as facts:
            deadline = Deadline(context)
            request = await run_for_request(len(data), partial(messages.parsed, pb.GenerateRequest, data))
            request_id = messages.request_id(request)
            facts["request_id"] = request_id
            model = self._gateway.model(request.model or None)
            scheduling = messages.scheduling_params(request)
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

    async def cancel(self, data: bytes, context: Context) -> pb.CancelResponse:
        """End a live request of the same API key, or without keys of the same connection."""
        async with self._calls.answered("Cancel", context) as facts:
            request = await run_for_request(len(data), partial(messages.parsed, pb.CancelRequest, data))
            facts["request_id"] = request.request_id
            party = self._calls.party(context)
            choices = self._live.get((party, request.request_id))
            if choices is not None:
                return pb.CancelResponse(found=end_all(choices, FinishReason.CANCELLED))
            # An HTTP request with the same key.
            return pb.CancelResponse(found=self._gateway.cancel(request.request_id, party=party))

    async def models(self, data: bytes, context: Context) -> pb.ModelsResponse:
        """List the served model."""
        async with self._calls.answered("Models", context):
            await run_for_request(len(data), partial(messages.parsed, pb.ModelsRequest, data))
            return pb.ModelsResponse(models=[messages.model_card(self._gateway.model())])

    def _check_number(self, n: int, model: ServedModel) -> None:
        """All choices are submitted together, so they must fit into one owner's share of an empty queue."""
        most = min(self._max_choices, model.service.pool.max_each)
        if n > most:
            raise InvalidRequest(f"n is {n}; one request may ask for {most} choices", param="n")

    def _read(self, request: pb.GenerateRequest, model: ServedModel) -> tuple[SamplingParams, list[int]]:
        """The sampling parameters and the prompt. The cost grows with the message."""
        sampling = messages.sampling_params(request.sampling, model.defaults.sampling)
        self._check_number(sampling.n, model)
        if messages.prompt_kind(request) == "token_ids":
            return sampling, messages.numbers("prompt", request.token_ids.ids)
        return sampling, model.encode(request.text)

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
