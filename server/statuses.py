"""Maps each error to its HTTP status and gRPC status, in one table for both endpoints."""

from typing import NamedTuple

import grpc

from orca_jax.errors import (
    CheckpointError,
    ConfigError,
    EngineAsleep,
    EngineError,
    GrammarExhausted,
    InvalidRequest,
    NotSupported,
    OrcaError,
    OutputFailed,
    QueueFull,
    RequestCancelled,
    RequestsStillRunning,
    RequestTimedOut,
    ServiceClosed,
)
from server.errors import (
    BatchesOff,
    DiskFull,
    NotPermitted,
    NotReady,
    Overloaded,
    RequestIdTaken,
    StoreFailed,
    StoreFull,
    TooManyConnections,
    TooManyFromAddress,
    TooManyViewers,
    Unauthorized,
    UnknownBatch,
    UnknownFile,
    UnknownModel,
    UnknownRecording,
    UnknownResponse,
    UnknownThread,
)


class Meaning(NamedTuple):
    """HTTP status, `type` and `code` of OpenAI's error object, and the gRPC status."""

    http: int
    type: str
    code: str | None
    grpc: grpc.StatusCode


_MEANINGS: dict[type[OrcaError], Meaning] = {
    NotSupported: Meaning(400, "invalid_request_error", "not_supported", grpc.StatusCode.INVALID_ARGUMENT),
    InvalidRequest: Meaning(400, "invalid_request_error", None, grpc.StatusCode.INVALID_ARGUMENT),
    Unauthorized: Meaning(401, "invalid_request_error", "invalid_api_key", grpc.StatusCode.UNAUTHENTICATED),
    UnknownModel: Meaning(404, "invalid_request_error", "model_not_found", grpc.StatusCode.NOT_FOUND),
    UnknownResponse: Meaning(404, "invalid_request_error", "response_not_found", grpc.StatusCode.NOT_FOUND),
    UnknownThread: Meaning(404, "invalid_request_error", "thread_not_found", grpc.StatusCode.NOT_FOUND),
    NotPermitted: Meaning(403, "invalid_request_error", "not_permitted", grpc.StatusCode.PERMISSION_DENIED),
    UnknownRecording: Meaning(404, "invalid_request_error", "unknown_recording", grpc.StatusCode.NOT_FOUND),
    UnknownFile: Meaning(404, "invalid_request_error", "unknown_file", grpc.StatusCode.NOT_FOUND),
    UnknownBatch: Meaning(404, "invalid_request_error", "unknown_batch", grpc.StatusCode.NOT_FOUND),
    BatchesOff: Meaning(404, "invalid_request_error", "batches_off", grpc.StatusCode.UNIMPLEMENTED),
    StoreFull: Meaning(429, "rate_limit_error", "store_full", grpc.StatusCode.RESOURCE_EXHAUSTED),
    StoreFailed: Meaning(503, "server_error", "store_failed", grpc.StatusCode.UNAVAILABLE),
    DiskFull: Meaning(507, "server_error", "disk_full", grpc.StatusCode.RESOURCE_EXHAUSTED),
    TooManyViewers: Meaning(429, "rate_limit_error", "too_many_viewers", grpc.StatusCode.RESOURCE_EXHAUSTED),
    RequestIdTaken: Meaning(409, "invalid_request_error", "request_id", grpc.StatusCode.ALREADY_EXISTS),
    CheckpointError: Meaning(400, "invalid_request_error", "weights", grpc.StatusCode.INVALID_ARGUMENT),
    ConfigError: Meaning(400, "invalid_request_error", None, grpc.StatusCode.INVALID_ARGUMENT),
    RequestsStillRunning: Meaning(
        409, "invalid_request_error", "requests_running", grpc.StatusCode.FAILED_PRECONDITION
    ),
    EngineAsleep: Meaning(503, "service_unavailable_error", "asleep", grpc.StatusCode.UNAVAILABLE),
    Overloaded: Meaning(503, "service_unavailable_error", "overloaded", grpc.StatusCode.UNAVAILABLE),
    QueueFull: Meaning(429, "rate_limit_error", "queue_full", grpc.StatusCode.RESOURCE_EXHAUSTED),
    TooManyFromAddress: Meaning(
        429, "rate_limit_error", "too_many_connections", grpc.StatusCode.RESOURCE_EXHAUSTED
    ),
    TooManyConnections: Meaning(
        503, "service_unavailable_error", "too_many_connections", grpc.StatusCode.UNAVAILABLE
    ),
    RequestCancelled: Meaning(503, "service_unavailable_error", "cancelled", grpc.StatusCode.CANCELLED),
    NotReady: Meaning(503, "service_unavailable_error", "not_ready", grpc.StatusCode.UNAVAILABLE),
    ServiceClosed: Meaning(503, "service_unavailable_error", "not_ready", grpc.StatusCode.UNAVAILABLE),
    EngineError: Meaning(503, "engine_error", "engine_failed", grpc.StatusCode.UNAVAILABLE),
    GrammarExhausted: Meaning(
        400, "invalid_request_error", "grammar_exhausted", grpc.StatusCode.INVALID_ARGUMENT
    ),
    OutputFailed: Meaning(500, "server_error", "output_failed", grpc.StatusCode.INTERNAL),
    RequestTimedOut: Meaning(504, "timeout_error", "timeout", grpc.StatusCode.DEADLINE_EXCEEDED),
    OrcaError: Meaning(500, "server_error", None, grpc.StatusCode.INTERNAL),
}


def meaning(error: OrcaError) -> Meaning:
    """The table's entry for the error's class, or for its nearest base class that has one."""
    return next(_MEANINGS[cls] for cls in type(error).__mro__ if cls in _MEANINGS)
