"""Spans sent to a collector: their OTLP form, and a collector that is slow or gone."""

import gzip
import importlib.util
import logging
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from orca_jax.errors import ConfigError
from server.settings.endpoint_options import EndpointOptions
from server.tracing import tracing
from server.tracing.call import Call
from server.tracing.tracing import tracing_to
from tests.endpoint.harness import Server, serving, until
from tests.endpoint.http_client import connected
from tests.endpoint.log_lines import Lines
from tests.endpoint.tracing.traced import CALLER, PARENT, TRACE
from tests.host.engines import SOON

COMPLETION: dict[str, Any] = {"prompt": "ab", "max_tokens": 3, "ignore_eos": True}


class Collector:
    """Takes OTLP over HTTP and over gRPC. While `gate` is not set it does not answer."""

    def __init__(self, stack: ExitStack) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.gate = threading.Event()
        self.gate.set()
        http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        http.daemon_threads = True
        stack.callback(http.server_close)
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        stack.callback(thread.join, SOON)
        stack.callback(http.shutdown)
        rpc = grpc.server(futures.ThreadPoolExecutor(1))
        add_TraceServiceServicer_to_server(self._servicer(), rpc)
        self.rpc_url = f"http://127.0.0.1:{rpc.add_insecure_port('127.0.0.1:0')}"
        rpc.start()
        stack.callback(lambda: rpc.stop(0).wait(SOON))
        self.url = f"http://127.0.0.1:{http.server_port}/v1/traces"
        stack.callback(self.gate.set)

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def resource(self) -> dict[str, str]:
        attributes = self.requests[0].resource_spans[0].resource.attributes
        return {attribute.key: attribute.value.string_value for attribute in attributes}

    def take(self, data: bytes, headers: dict[str, str]) -> None:
        self.gate.wait(SOON)
        self.headers.append(headers)
        if self.status == 200:
            self.requests.append(ExportTraceServiceRequest.FromString(data))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                if self.headers["content-encoding"] == "gzip":
                    data = gzip.decompress(data)
                try:
                    collector.take(data, {name.lower(): value for name, value in self.headers.items()})
                    self.send_response(collector.status)
                    self.send_header("content-length", "0")
                    self.end_headers()
                except OSError:  # the client has gone
                    pass

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler

    def _servicer(self) -> TraceServiceServicer:
        collector = self

        class Servicer(TraceServiceServicer):
            def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
                collector.take(request.SerializeToString(), dict(context.invocation_metadata()))
                return ExportTraceServiceResponse()

        return Servicer()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with ExitStack() as stack:
        yield Collector(stack)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # ms, instead of 5 s
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def served(endpoint: str, protocol: str = "http/protobuf") -> Iterator[Server]:
    """A server whose traces go to `endpoint`."""
    tracing = tracing_to(endpoint, {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol})
    assert tracing is not None
    try:
        with serving(tracing=tracing) as server:
            yield server
    finally:
        tracing.close()


@contextmanager
def log() -> Iterator[list[str]]:
    """Warnings about traces, ours and OpenTelemetry's."""
    handler = Lines()
    handler.setLevel(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("orca.traces", "opentelemetry")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def ask(server: Server, **headers: str) -> float:
    """Ask for a completion; return its duration in seconds."""
    began = time.monotonic()
    with connected(server) as client:
        response = client.post("/v1/completions", json=COMPLETION, headers=headers)
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 3
    return time.monotonic() - began


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_spans_arrive_in_otlp(collector: Collector, protocol: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "the-service")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    with served(collector.rpc_url if protocol == "grpc" else collector.url, protocol) as server:
        ask(server, traceparent=CALLER)
        until(lambda: len(collector.spans) == 5, "all spans")
        by_name = {span.name: span for span in collector.spans}
        assert sorted(by_name) == ["choice 0", "decode", "prefill", "queue", "text_completion test"]
        call = by_name["text_completion test"]
        assert call.kind == Span.SPAN_KIND_SERVER
        assert {span.trace_id for span in collector.spans} == {TRACE.to_bytes(16)}
        assert call.parent_span_id == PARENT.to_bytes(8)
        assert by_name["choice 0"].parent_span_id == call.span_id
        assert by_name["queue"].parent_span_id == by_name["choice 0"].span_id
        values = {attribute.key: attribute.value for attribute in call.attributes}
        assert values["gen_ai.usage.output_tokens"].int_value == 3
        (record,) = server.service.timeline.requests
        assert record.finished is not None
        choice = by_name["choice 0"]
        length = (choice.end_time_unix_nano - choice.start_time_unix_nano) / 1e9
        assert length == pytest.approx(record.finished - record.arrived, abs=1e-6)
        resource = collector.resource()
        assert (resource["service.name"], resource["deployment.environment.name"]) == ("the-service", "test")
        assert collector.headers[0]["x-key"] == "secret"


def test_a_service_without_a_name_is_called_orca_jax(collector: Collector):
    with served(collector.url) as server:
        ask(server)
        until(lambda: bool(collector.requests), "spans")
    assert collector.resource()["service.name"] == "orca_jax"


def test_closing_sends_the_remaining_spans(collector: Collector, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    with served(collector.url) as server:
        for _ in range(3):
            ask(server)
        assert collector.spans == []
    assert len(collector.spans) == 15


def test_a_sampler_of_the_environment_is_used(collector: Collector, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with served(collector.url) as server:
        ask(server)
        ask(server, traceparent=CALLER)
        until(lambda: len(collector.spans) == 5, "the spans of the second")
    assert {span.trace_id for span in collector.spans} == {TRACE.to_bytes(16)}


def test_a_dead_collector_is_logged_once_and_delays_nothing(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with log() as lines, served(collector.url) as server:
        collector.status = 404
        for _ in range(3):
            n = len(collector.headers)
            assert ask(server) < SOON / 10
            until(lambda n=n: len(collector.headers) > n, "an attempt to send")
        (line,) = lines
        assert line.startswith(
            f"traces cannot be sent to {collector.url}: Failed to export spans batch code: 404"
        )
        collector.status = 200
        ask(server)
        until(lambda: bool(collector.spans), "spans")
        until(lambda: len(lines) == 2, "the second line")
        assert lines[1] == f"traces reach {collector.url} again"


def test_an_address_without_a_collector_is_logged_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with log() as lines, served("http://127.0.0.1:9/v1/traces") as server:
        for _ in range(3):
            assert ask(server) < SOON / 10
            server.call(lambda: None)
        until(lambda: bool(lines), "a line")
    assert len(lines) == 1 and "127.0.0.1:9" in lines[0], lines


def test_a_collector_that_does_not_answer_delays_no_request_and_little_memory_is_held(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    monkeypatch.setattr(tracing, "_CLOSE_SECONDS", 0.5)
    with log() as lines, ExitStack() as stack:
        server = stack.enter_context(served(collector.url))
        collector.gate.clear()
        assert max(ask(server) for _ in range(20)) < SOON / 10
        began = time.monotonic()
        stack.close()
        assert time.monotonic() - began < SOON / 10
        (line,) = lines  # none of the library's own about a full queue
        assert line.startswith("the collector did not take the last traces within 0.")
        collector.gate.set()
        until(lambda: bool(collector.spans), "the batch that was on its way")
    assert len(collector.spans) <= 8 + 16


def test_calls_that_come_faster_than_their_spans_are_made_are_counted_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracing, "_MOST_CALLS", 3)
    written: list[Call] = []

    class Kept:
        def write(self, call: Call, model: str) -> None:
            written.append(call)

        def close(self, seconds: float) -> None:
            pass

    with log() as lines, serving() as server:
        kept = tracing.Tracing(Kept())
        for _ in range(10):  # its thread has not begun
            kept.end(kept.begin([]), operation="chat", error=None, attributes={})
        kept.start(server.model)
        kept.close()
    assert len(written) == 3
    assert lines == ["requests end faster than their spans are made: some are not traced"]


def test_without_the_extra_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "server.tracing.tracing.find_spec",
        lambda name: None if name.startswith("opentelemetry.exporter") else find(name),
    )
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint needs .*: pip install .*'opentelemetry-sdk"):
        tracing_to("http://127.0.0.1:4318/v1/traces", {})
    assert tracing_to(None, {}) is None


@pytest.mark.parametrize("variables", [{"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}])
def test_a_protocol_that_is_not_supported_is_refused(variables: dict[str, str]):
    with pytest.raises(ConfigError, match="'http/json' for traces; it must be http/protobuf or grpc"):
        tracing_to("http://127.0.0.1:4318/v1/traces", variables)


def test_a_useless_variable_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "0")
    with pytest.raises(
        ConfigError, match=r"the OTEL_[*] variables: max_queue_size must be a positive integer"
    ):
        tracing_to("http://127.0.0.1:4318/v1/traces", {})


@pytest.mark.parametrize("url", ["localhost:4318", "", "ftp://collector/v1/traces"])
def test_an_endpoint_that_is_no_url_is_refused(url: str):
    with pytest.raises(ConfigError, match="otlp_traces_endpoint is"):
        EndpointOptions(otlp_traces_endpoint=url)
