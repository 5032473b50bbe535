"""Makes the spans of a call: one for the call, one for each choice, and in it queue, prefill and decode."""

import logging
import threading
from collections.abc import Iterator

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import orca_jax
from orca_jax.request.request import FinishReason
from orca_jax.scheduling.timeline import RequestRecord
from server.tracing.attributes import (
    CACHED_TOKENS,
    ERROR_TYPE,
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    call_attributes,
    choice_attributes,
)
from server.tracing.call import Call, Choice

_LOGGER = logging.getLogger("orca.traces")
_FAILURES = (FinishReason.ERROR, FinishReason.TIMEOUT)


class SpanWriter:
    """A Writer for an OpenTelemetry provider, whose sampler decides which calls are recorded."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("orca_jax", orca_jax.__version__)
        self._callers = TraceContextTextMapPropagator()

    def write(self, call: Call, model: str) -> None:
        """Make all spans of a call that has ended, with the times that were recorded."""
        attributes = call_attributes(call, model)
        span = self._tracer.start_span(
            f"{call.operation} {model}",
            self._callers.extract(call.caller, Context()),  # a malformed header names no caller
            SpanKind.SERVER,
            attributes,
            start_time=call.began,
        )
        if not span.is_recording():
            return
        inside = set_span_in_context(span, Context())
        error = call.error
        for index, choice in enumerate(call.choices):
            record = choice.record
            if record is not None:
                self._write_choice(index, choice, record, inside)
                if error is None and record.finish_reason in _FAILURES:  # a stream that began with 200
                    error = str(record.finish_reason)
        _fail(span, error)
        span.end(call.ended)

    def close(self, seconds: float) -> None:
        """Send the last spans; those that take longer than `seconds` are lost."""
        # The provider's deadline is 30 s, and cannot be changed.
        closing = threading.Thread(target=self._provider.shutdown, name="orca-traces-end", daemon=True)
        closing.start()
        closing.join(seconds)
        if closing.is_alive():
            _LOGGER.warning("the collector did not take the last traces within %.1f seconds", seconds)

    def _write_choice(self, index: int, choice: Choice, record: RequestRecord, call: Context) -> None:
        assert record.finished is not None
        span = self._tracer.start_span(
            f"choice {index}",
            call,
            attributes=choice_attributes(choice, record),
            start_time=choice.ns(record.arrived),
        )
        for interruption in record.interruptions:
            span.add_event(interruption.cause, timestamp=choice.ns(interruption.at))
            if interruption.resumed is not None:
                span.add_event("resumed", timestamp=choice.ns(interruption.resumed))
        inside = set_span_in_context(span, Context())
        for name, start, end, counts in _phases(record):
            phase = self._tracer.start_span(name, inside, attributes=counts, start_time=choice.ns(start))
            phase.end(choice.ns(end))
        _fail(span, str(record.finish_reason) if record.finish_reason in _FAILURES else None)
        span.end(choice.ns(record.finished))


def _phases(record: RequestRecord) -> Iterator[tuple[str, float, float, dict[str, int]]]:
    """Yield the name, start, end and attributes of each phase that the request reached."""
    assert record.finished is not None
    scheduled, times = record.scheduled, record.token_times
    yield "queue", record.arrived, record.finished if scheduled is None else scheduled, {}
    if scheduled is None:
        return
    counts = {INPUT_TOKENS: record.n_input, CACHED_TOKENS: record.n_cached}
    yield "prefill", scheduled, times[0] if times else record.finished, counts
    if times and record.finished > times[0]:
        yield "decode", times[0], record.finished, {OUTPUT_TOKENS: record.n_output - 1}


def _fail(span: Span, error: str | None) -> None:
    if error is not None:
        span.set_status(Status(StatusCode.ERROR))
        span.set_attribute(ERROR_TYPE, error)
