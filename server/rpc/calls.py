"""Shared parts of all calls of orca.v1.Generation: API keys, errors as gRPC statuses, logs and metrics."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote

import grpc

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
        """Who may cancel the call's request: the API key, or the connection on a server without keys."""
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
