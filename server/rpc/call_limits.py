"""How long a gRPC call may keep the server waiting for a message, and how many calls without a key are open.

gRPC reads the one message of a unary request before it calls the handler, and waits for it without end. So
the handler is exchanged for one of streamed requests, which gRPC calls at once, and the message is awaited
here.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from inspect import isasyncgenfunction
from typing import Any

import grpc

from server.rpc.calls import Context, Handler

_EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
_MOST_OPEN_CALLS = 256  # calls with one answer that need no key: a probe takes a moment


class CallLimits(grpc.aio.ServerInterceptor):
    """A message must come within `message_seconds`.

    Only calls of `service` need a key. Of the streams of other services `max_streams` may be open; one more
    ends with RESOURCE_EXHAUSTED.
    """

    def __init__(self, service: str, *, message_seconds: float, max_streams: int) -> None:
        self._prefix = f"/{service}/"
        self._message_seconds = message_seconds
        self._most = {True: max_streams, False: _MOST_OPEN_CALLS}
        self._n_open = {True: 0, False: 0}  # streams, and calls with one answer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The method's handler behind the limits."""
        of: Any = await continuation(handler_call_details)  # gRPC's stubs do not say what a handler has
        if of is None:
            return None
        needs_key = handler_call_details.method.startswith(self._prefix)
        answer = self._answered(of)

        async def counted(_: object, context: Context) -> Any:
            is_stream = of.response_streaming
            if self._n_open[is_stream] >= self._most[is_stream]:
                kind, flag = ("streams", " (orca serve --max-watch-streams)") if is_stream else ("calls", "")
                text = f"{self._most[is_stream]} {kind} without a key are open, as many as may be{flag}"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            self._n_open[is_stream] += 1
            try:
                return await answer(context)
            finally:
                self._n_open[is_stream] -= 1

        async def uncounted(_: object, context: Context) -> Any:
            return await answer(context)

        streamed = of.response_streaming
        make = grpc.stream_stream_rpc_method_handler if streamed else grpc.stream_unary_rpc_method_handler
        return make(uncounted if needs_key else counted, of.request_deserializer, of.response_serializer)

    def _answered(self, of: Any) -> Callable[[Context], Awaitable[Any]]:
        """The handler's own work, from a call's first message on."""

        async def unary(context: Context) -> Any:
            return await of.unary_unary(await self._message(context), context)

        async def stream(context: Context) -> None:
            await of.unary_stream(await self._message(context), context)

        async def conversation(context: Context) -> None:
            async for response in of.stream_stream(self._messages(context), context):
                await context.write(response)

        if of.request_streaming:
            assert isasyncgenfunction(of.stream_stream)
            return conversation
        return stream if of.response_streaming else unary

    async def _message(self, context: Context) -> Any:
        """The one message of a request."""
        message = await self._next(context)
        if message is _EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
        return message

    async def _messages(self, context: Context) -> AsyncIterator[Any]:
        while (message := await self._next(context)) is not _EOF:
            yield message

    async def _next(self, context: Context) -> Any:
        try:
            async with asyncio.timeout(self._message_seconds):
                return await context.read()
        except TimeoutError:
            text = f"no message came within {self._message_seconds:g} seconds (orca serve --body-timeout)"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
