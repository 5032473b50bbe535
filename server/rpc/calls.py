"""Shared parts of all calls of orca.v1.Generation: API keys, errors as gRPC statuses, logs and metrics."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from inspect import isasyncgenfunction
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from orca_jax.errors import EngineError, InvalidRequest, OrcaError, OutputFailed, QueueFull
from server.errors import Unauthorized
from server.gateway.gateway import Gateway, retry_after_seconds
from server.gateway.lanes import act_for
from server.metrics.access_log import log_access
from server.metrics.metrics import Metrics
from server.process.addresses import owner_at
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import AccessLog
from server.statuses import meaning
from server.tracing import attributes
from server.tracing.call import AttributeValue, Call
from server.tracing.tracing import Tracing

# A deadline counts as passed with less than this left: a fixed time, and a share of the whole time.
_SECONDS = 0.05
_SHARE = 0.02


class Deadline:
    """The deadline of a call. `seconds` is the time left at construction, None without a deadline."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self.seconds: float | None = context.time_remaining()

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed or is about to.

        The client measures its deadline itself and hangs up when it passes. The server's copy is later by the
        transmission time and by up to a hundredth, because gRPC rounds the timeout up when it sends it.
        """
        left: float | None = self._context.time_remaining()  # its annotation leaves None out
        return left is not None and self.seconds is not None and left <= _SECONDS + _SHARE * self.seconds


_LOGGER = logging.getLogger(__name__)
_MOST_CHARACTERS = 500  # of a status message: it is sent as a header, and clients accept 8 KiB of headers

# Statuses that are the server's fault, according to OpenTelemetry's conventions.
_FAULTS = frozenset(
    (
        *(grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED),
        *(grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS),
    )
)

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"  # quoted: generic only in the type stubs


class Calls:
    """Identifies, answers and records the calls of one server. Each call runs inside `answered`."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        api_keys: ApiKeys,
        access_log: AccessLog,
        metrics: Metrics,
        tracing: Tracing | None = None,
    ) -> None:
        self._gateway = gateway
        self._api_keys = api_keys
        self._access_log: AccessLog = access_log
        self._metrics = metrics
        self._tracing = tracing

    def owner(self, context: Context) -> str:
        """The API key or client address whose share of the queue the call uses."""
        return self.tenant(context) or owner_at(_address(context.peer()))

    def tenant(self, context: Context) -> str:
        """The API key of the call, "" on a server without keys. Tenants share no cached keys and values."""
        return self._api_keys.check(_authorization(context.invocation_metadata())) or ""

    def party(self, context: Context) -> str:
        """The party that may cancel the request: its API key, or without keys its connection."""
        return self.tenant(context) or f"connection {context.peer()}"

    @asynccontextmanager
    async def answered(self, method: str, context: Context) -> AsyncIterator[dict[str, Any]]:
        """Run one call of `method`: an error raised inside ends the call with that error's status.

        Yields the facts for the access log, which must not include prompts or output text.
        """
        facts: dict[str, Any] = {}
        began = time.perf_counter()
        deadline = Deadline(context)
        code = grpc.StatusCode.OK
        tracing = self._tracing
        call = None if tracing is None else tracing.begin(_texts(context.invocation_metadata()))
        try:
            act_for(self.owner(context))
            yield facts
        except asyncio.CancelledError:
            code = grpc.StatusCode.DEADLINE_EXCEEDED if deadline.passed else grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.BaseError as error:  # a write failed: the client has gone
            code = grpc.StatusCode.CANCELLED
            raise asyncio.CancelledError from error
        except OrcaError as error:
            code = meaning(error).grpc
            # OutputFailed concerns one request only, so it is not an error of the server.
            if isinstance(error, EngineError) and not isinstance(error, OutputFailed):
                _LOGGER.error("%s of %s: %s", method, facts.get("request_id"), error)
            await _abort(context, code, _shortened(str(error)), self._trailing_metadata(error))
        except Exception:
            code = grpc.StatusCode.INTERNAL
            _LOGGER.exception("%s of %s failed in an unexpected way", method, facts.get("request_id"))
            await _abort(context, code, "the server failed in an unexpected way; its log has more")
        finally:
            self._log_and_count(method, context, code, began, facts)
            if tracing is not None and call is not None:
                _end_call(tracing, call, method, code, facts)

    def _trailing_metadata(self, error: OrcaError) -> tuple[tuple[str, str], ...]:
        if isinstance(error, InvalidRequest):
            return (("orca-param", error.param),)
        if isinstance(error, QueueFull):
            return (("retry-after", str(retry_after_seconds(self._gateway))),)
        return ()

    def _log_and_count(
        self, method: str, context: Context, code: grpc.StatusCode, began: float, facts: dict[str, Any]
    ) -> None:
        self._metrics.grpc_request(method, code.name)
        record = {
            "request_id": None,
            "protocol": "grpc",
            "client": _address(context.peer()),
            "method": method,
            "status": code.name,
            "ms": round(1000 * (time.perf_counter() - began), 1),
        }
        log_access(self._access_log, {**record, **facts})


class KeyCheck(grpc.aio.ServerInterceptor):
    """Rejects calls of one service without a valid API key, before their message is read."""

    def __init__(self, service: str, api_keys: ApiKeys, calls: Calls) -> None:
        self._prefix = f"/{service}/"
        self._api_keys = api_keys
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The method's own handler, or one that rejects the call. Other services need no key."""
        handler = await continuation(handler_call_details)
        path = handler_call_details.method
        if handler is None or not path.startswith(self._prefix):
            return handler
        try:
            self._api_keys.check(_authorization(handler_call_details.invocation_metadata))
        except Unauthorized as error:
            return self._refusal(path.removeprefix(self._prefix), error)
        return handler

    def _refusal(self, method: str, error: Unauthorized) -> Handler:
        async def refuse(_: object, context: Context) -> None:
            async with self._calls.answered(method, context):
                raise error

        # For every kind of call: gRPC does not read a message before it calls a handler of this kind.
        return grpc.stream_stream_rpc_method_handler(refuse)


def _texts(metadata: Any) -> Iterable[tuple[str, str]]:
    return ((name, value) for name, value in metadata or () if isinstance(value, str))


def _end_call(
    tracing: Tracing, call: Call, method: str, code: grpc.StatusCode, facts: dict[str, Any]
) -> None:
    generates = method == "Generate"
    traced: dict[str, AttributeValue] = {
        attributes.RPC_SYSTEM: "grpc",
        attributes.RPC_METHOD: method,
        attributes.RPC_STATUS: code.name,
        attributes.REQUEST_STREAM: generates,
    }
    if "completion_tokens" in facts:
        traced[attributes.INPUT_TOKENS] = facts["prompt_tokens"]
        traced[attributes.CACHED_TOKENS] = facts["cached_tokens"]
        traced[attributes.OUTPUT_TOKENS] = facts["completion_tokens"]
    if "request_id" in facts:
        traced[attributes.RESPONSE_ID] = facts["request_id"]
    error = code.name if code in _FAULTS else None
    tracing.end(call, operation="text_completion" if generates else None, error=error, attributes=traced)


async def _abort(
    context: Context, code: grpc.StatusCode, text: str, metadata: tuple[tuple[str, str], ...] = ()
) -> NoReturn:
    """End the call with a status; as cancelled if the client has gone or its deadline just passed."""
    try:
        await context.abort(code, text, metadata)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as error:
        raise asyncio.CancelledError from error
    raise AssertionError("abort returned")


def _authorization(metadata: Any) -> str | None:
    for name, value in metadata or ():
        if name == "authorization" and isinstance(value, str):
            return value
    return None


def _shortened(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]} ... {text[-half:]}"


def _address(peer: str) -> str:
    """The address in `ipv4:127.0.0.1:4711` or `ipv6:%5B::1%5D:4711`."""
    return unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]")


_EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
_MOST_OPEN_CALLS = 256  # open calls with a unary response that need no key; a health probe is short


class CallLimits(grpc.aio.ServerInterceptor):
    """Each message must arrive within `message_seconds`.

    gRPC reads the message of a unary request before it calls the handler, and waits for it without a timeout.
    So each handler is replaced by one for streamed requests, which gRPC calls at once, and the wait is here.

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
