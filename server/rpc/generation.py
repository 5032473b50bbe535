"""The service orca.v1.Generation: generation.proto says what its methods promise."""

import asyncio
from typing import Any

import grpc

from orca_jax.errors import QueueFull, RequestTimedOut
from orca_jax.request import FinishReason
from server.beside import LONG_TEXT, beside
from server.gateway import Gateway, LiveRequest
from server.rpc import generation_pb2 as pb
from server.rpc import messages
from server.rpc.calls import Calls, Context
from server.rpc.deadline import Deadline
from server.served_model import ServedModel

SERVICE = pb.DESCRIPTOR.services_by_name["Generation"].full_name

_MOST_ENCODING = 64  # long texts at once: each call holds its whole message until then
_UNREAD_SECONDS = 60.0  # for a slow client to take what is left, after the longest time a request may run


class Generation:
    """Takes calls to the gateway, whose `request_timeout` in seconds bounds them here as well.

    Messages come in as bytes, so that one that makes no sense is answered, logged and counted as any other.
    """

    def __init__(self, gateway: Gateway, calls: Calls, *, request_timeout: float) -> None:
        self._gateway = gateway
        self._calls = calls
        self._longest = request_timeout + _UNREAD_SECONDS
        self._n_encoding = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        """Let `server` answer calls of the service; call it before `server` starts."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers = {
            "Generate": stream(self.generate, None, pb.GenerateResponse.SerializeToString),
            "Cancel": unary(self.cancel, None, pb.CancelResponse.SerializeToString),
            "Models": unary(self.models, None, pb.ModelsResponse.SerializeToString),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])

    async def generate(self, data: bytes, context: Context) -> None:
        """Continue a prompt."""
        async with self._calls.answered("Generate", context) as facts:
            deadline = Deadline(context)
            request = messages.parsed(pb.GenerateRequest, data)
            request_id = messages.request_id(request)
            facts["request_id"] = request_id
            model = self._gateway.model(request.model or None)
            sampling = messages.sampling_params(request.sampling)
            prompt_ids = await self._prompt_ids(request, model)
            with self._gateway.submit(
                prompt_ids, sampling, request_id=request_id, timeout=deadline.seconds
            ) as live:
                facts["prompt_tokens"] = live.n_input
                try:
                    await self._write_all(live, context, facts)
                except asyncio.CancelledError:
                    if deadline.passed:
                        live.end(FinishReason.TIMEOUT)
                    raise

    async def cancel(self, data: bytes, context: Context) -> pb.CancelResponse:
        """End a live request."""
        async with self._calls.answered("Cancel", context) as facts:
            request = messages.parsed(pb.CancelRequest, data)
            facts["request_id"] = request.request_id
            return pb.CancelResponse(found=self._gateway.cancel(request.request_id))

    async def models(self, data: bytes, context: Context) -> pb.ModelsResponse:
        """What is served."""
        async with self._calls.answered("Models", context):
            messages.parsed(pb.ModelsRequest, data)
            return pb.ModelsResponse(models=[messages.model_card(self._gateway.model())])

    async def _prompt_ids(self, request: pb.GenerateRequest, model: ServedModel) -> list[int]:
        if messages.prompt_kind(request) == "token_ids":
            return list(request.token_ids.ids)
        n_characters = len(request.text)
        if n_characters > LONG_TEXT and self._n_encoding >= _MOST_ENCODING:
            raise QueueFull(
                f"{_MOST_ENCODING} long texts wait to be encoded, as many as may; try again later"
            )
        self._n_encoding += 1
        try:
            return await beside(n_characters, lambda: model.encode(request.text))
        finally:
            self._n_encoding -= 1

    async def _write_all(self, live: LiveRequest, context: Context, facts: dict[str, Any]) -> None:
        """The request's id at once, then its pieces; while a write waits for the client, more gather."""
        n_output = 0
        limit = asyncio.timeout(self._longest)
        try:
            async with limit:
                await context.send_initial_metadata((("x-request-id", live.request_id),))
                async for piece in live:
                    await context.write(messages.response(live, piece, n_output))
                    n_output += len(piece.token_ids)
        except TimeoutError:
            if limit.expired():
                message = f"the client did not take all messages within {self._longest:g} seconds"
                raise RequestTimedOut(message) from None
            raise
        finally:
            facts["completion_tokens"] = n_output
            facts["finish_reason"] = live.finish_reason
