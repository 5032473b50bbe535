"""Sends spans to a collector in OTLP, over HTTP or gRPC. Failures are logged once and delay no request."""

import logging
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

import orca_jax
from orca_jax.errors import ConfigError
from server.tracing.spans import SpanWriter

_LOGGER = logging.getLogger("orca.traces")
_EXPORTERS = {"http/protobuf": HttpExporter, "grpc": GrpcExporter}
# OpenTelemetry's loggers that repeat, for every batch, that the collector does not answer.
_LOUD = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.sdk._shared_internal",
)


def otlp_writer(endpoint: str, protocol: str) -> SpanWriter:
    """Make a writer whose spans go to `endpoint` in batches, as the OTEL_* variables configure it.

    At most OTEL_BSP_MAX_QUEUE_SIZE spans wait for a slow collector; more are dropped. Raises ConfigError.
    """
    if protocol not in _EXPORTERS:
        allowed = " or ".join(_EXPORTERS)
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r} for traces; it must be {allowed}")
    try:
        exporter = Reported(_EXPORTERS[protocol](endpoint=endpoint), endpoint)
        provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
    except (ValueError, OSError) as error:
        raise ConfigError(f"traces cannot be set up from the OTEL_* variables: {error}") from error
    return SpanWriter(provider)


class Reported(SpanExporter):
    """An exporter that raises nothing, and logs a failure once until it works again."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._is_failing = False
        self._muffled = _Muffled()
        for name in _LOUD:
            logging.getLogger(name).addFilter(self._muffled)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._muffled.first = None
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            self._muffled.first = str(error)
            result = SpanExportResult.FAILURE
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._is_failing:
            _LOGGER.warning(
                "traces cannot be sent to %s: %s. Spans are lost until it answers; requests are not affected",
                self._endpoint,
                self._muffled.first,
            )
        elif self._is_failing and not failed:
            _LOGGER.warning("traces reach %s again", self._endpoint)
        self._is_failing = failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
        for name in _LOUD:
            logging.getLogger(name).removeFilter(self._muffled)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _Muffled(logging.Filter):
    """Suppresses all lines, and keeps the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        self.first = self.first or record.getMessage()
        return False


def _resource() -> Resource:
    """Read OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES; the default name is orca_jax."""
    resource = Resource.create({SERVICE_VERSION: orca_jax.__version__})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "orca_jax"}))
    return resource
