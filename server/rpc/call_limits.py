"""Limits how long a gRPC call may wait for the client's message, and how many calls without a key are open.

gRPC reads the message of a unary request before it calls the handler, and waits for it without a timeout. So
the interceptor replaces each handler with one for streamed requests, which gRPC calls at once, and waits for
the message here.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from inspect import isasyncgenfunction
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from server.rpc.calls import Context, Handler

_EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
_MOST_OPEN_CALLS = 256  # open calls with a unary response that need no key; a health probe is short


class CallLimits(grpc.aio.ServerInterceptor):
    """Each message must arrive within `message_seconds`.

    Only calls of `service` need an API key. The other services may have `max_streams` open streams together;
    one more ends with RESOURCE_EXHAUSTED.
    """

    def __init__(self, service: str, *, message_seconds: float, max_streams: int) -> None:
        self._prefix = f"/{service}/"
        self._message_seconds = message_seconds
        self._most = {True: max_streams, False: _MOST_OPEN_CALLS}
        self._n_open = {True: 0, False: 0}  # by whether the response is a stream

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The method's handler, wrapped in the limits."""
        inner: Any = await continuation(handler_call_details)  # gRPC's stubs lack a handler's attributes
        if inner is None:
            return None
        needs_key = handler_call_details.method.startswith(self._prefix)
        answer = self._reading_messages(inner)

        async def counted(_: object, context: Context) -> Any:
            is_stream = inner.response_streaming
            if self._n_open[is_stream] >= self._most[is_stream]:
                kind, flag = ("streams", " (orca serve --max-watch-streams)") if is_stream else ("calls", "")
                text = f"{self._most[is_stream]} {kind} without a key are open, the limit{flag}"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            self._n_open[is_stream] += 1
            try:
                return await answer(context)
            finally:
                self._n_open[is_stream] -= 1

        async def uncounted(_: object, context: Context) -> Any:
            return await answer(context)

        streamed = inner.response_streaming
        make = grpc.stream_stream_rpc_method_handler if streamed else grpc.stream_unary_rpc_method_handler
        handler = uncounted if needs_key else counted
        return make(handler, inner.request_deserializer, inner.response_serializer)

    def _reading_messages(self, inner: Any) -> Callable[[Context], Awaitable[Any]]:
        """The handler `inner` as a function of the context alone, which reads messages with a timeout."""

        async def unary(context: Context) -> Any:
            return await inner.unary_unary(await self._message(context), context)

        async def stream(context: Context) -> None:
            await inner.unary_stream(await self._message(context), context)

        async def bidirectional(context: Context) -> None:
            async for response in inner.stream_stream(self._messages(context), context):
                await context.write(response)

        if inner.request_streaming:
            assert isasyncgenfunction(inner.stream_stream)
            return bidirectional
        return stream if inner.response_streaming else unary

    async def _message(self, context: Context) -> Any:
        """Read the message of a unary request."""
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
        except DecodeError as error:
            # gRPC itself would log a traceback, and calls without a key could fill the log with them.
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the message is malformed: {error}")
        except TimeoutError:
            text = f"no message came within {self._message_seconds:g} seconds (orca serve --body-timeout)"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
