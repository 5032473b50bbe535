"""A traced server whose spans stay in memory, and readers of these spans."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from orca_jax.scheduling.timeline import RequestRecord
from server.tracing.spans import SpanWriter
from server.tracing.tracing import Tracing
from tests.endpoint.harness import Server, serving, until

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"  # the example of W3C Trace Context
TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
UNSAMPLED = CALLER[:-1] + "0"


class Spans:
    """The spans of a server, complete when the endpoints consider them so."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(SpanWriter(provider))

    def finished(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def calls(self, n: int = 1) -> list[ReadableSpan]:
        """The spans of `n` clients' requests; each is the last of its trace to be finished."""

        def made() -> list[ReadableSpan]:
            return [span for span in self.finished() if span.kind.name == "SERVER"]

        until(lambda: len(made()) >= n, f"the spans of {n} requests")
        assert len(made()) == n
        return made()

    def call(self) -> ReadableSpan:
        return self.calls()[0]

    def inside(self, parent: ReadableSpan) -> dict[str, ReadableSpan]:
        """The children of a span by name, in order of their start."""
        assert parent.context is not None
        children = [
            span
            for span in self.finished()
            if span.parent is not None and span.parent.span_id == parent.context.span_id
        ]
        assert all(child.context is not None for child in children)
        assert {child.context.trace_id for child in children if child.context} <= {parent.context.trace_id}
        return {span.name: span for span in sorted(children, key=lambda span: span.start_time or 0)}


@contextmanager
def traced(*arguments: Any, **options: Any) -> Iterator[tuple[Server, Spans]]:
    """A server, as in `serving`, and its spans."""
    spans = Spans()
    with serving(*arguments, tracing=spans.tracing, **options) as server:
        yield server, spans
    spans.tracing.close()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def seconds(span: ReadableSpan) -> float:
    """A span's length."""
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def records(server: Server) -> list[RequestRecord]:
    """The timeline's records of the ended requests."""
    return list(server.service.timeline.requests)
