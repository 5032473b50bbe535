"""The spans of clients' requests: names, values as in the timeline, their place in the caller's trace."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import httpx2
import opentelemetry.semconv._incubating.attributes.gen_ai_attributes as conventions
import pytest
from opentelemetry.propagate import inject
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import StatusCode

from orca_jax.config import SchedulingConfig
from orca_jax.errors import EngineError
from server.rpc import generation_pb2 as pb
from server.settings.endpoint_options import EndpointOptions
from server.tracing import attributes as names
from tests.endpoint.harness import CONFIG, until
from tests.endpoint.http_client import connected
from tests.endpoint.rpc_client import answer, asking, refusal
from tests.endpoint.rpc_client import client as rpc_client
from tests.endpoint.tracing.traced import (
    CALLER,
    PARENT,
    TRACE,
    UNSAMPLED,
    attributes,
    records,
    seconds,
    traced,
)
from tests.host.engines import SOON, PacedEngine
from tests.host.fragile_engine import LOST, FragileEngine

SECRET = "opensesame"
COMPLETION: dict[str, Any] = {"prompt": "ab", "max_tokens": 3, "ignore_eos": True}
SLOW: dict[str, Any] = {"prompt": "ab", "max_tokens": 400, "ignore_eos": True}


def post(server: Any, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> httpx2.Response:
    with connected(server) as client:
        return client.post(path, json=body, headers=headers)


def test_names_are_those_of_the_installed_conventions():
    known = {value for name, value in vars(conventions).items() if name.startswith("GEN_AI_")}
    ours = {
        value
        for name, value in vars(names).items()
        if name.isupper() and isinstance(value, str) and value.startswith("gen_ai.")
    }
    vllm = {value for value in ours if value.startswith("gen_ai.latency.")} | {"gen_ai.request.id"}
    assert ours - vllm - {names.REQUEST} <= known
    parameters = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    assert {names.REQUEST + name for name in parameters} <= known


def test_a_completion_has_the_values_of_its_answer_and_of_the_timeline():
    with traced(seconds=0.002) as (server, spans):
        sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 11, "presence_penalty": 0.25}
        before = time.time_ns()
        response = post(server, {**COMPLETION, **sampling}, traceparent=CALLER, tracestate="vendor=1")
        after = time.time_ns()
        call = spans.call()
        (record,) = records(server)
        body = response.json()

        assert call.name == "text_completion test"
        assert call.context is not None and call.parent is not None
        assert (call.context.trace_id, call.parent.span_id, call.parent.is_remote) == (TRACE, PARENT, True)
        assert call.context.trace_state.get("vendor") == "1"
        assert call.start_time is not None and call.end_time is not None
        assert before <= call.start_time <= min(after, call.end_time)
        request = {
            "gen_ai.request.max_tokens": 3,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 0.9,
            "gen_ai.request.top_k": 7,
            "gen_ai.request.seed": 11,
            "gen_ai.request.presence_penalty": 0.25,
        }
        assert attributes(call) == {
            **request,
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "orca_jax",
            "gen_ai.request.model": "test",
            "gen_ai.request.stream": False,
            "gen_ai.response.model": "test",
            "gen_ai.response.id": body["id"],
            "gen_ai.response.finish_reasons": ("length",),
            "gen_ai.usage.input_tokens": 2,
            "gen_ai.usage.cache_read.input_tokens": 0,
            "gen_ai.usage.output_tokens": 3,
            "http.request.method": "POST",
            "http.route": "/v1/completions",
            "http.response.status_code": 200,
        }
        assert call.status.status_code is StatusCode.UNSET

        choice = spans.inside(call)["choice 0"]
        assert record.scheduled is not None and record.finished is not None
        times, first = record.token_times, record.token_times[0]
        assert attributes(choice) == {
            **request,
            "gen_ai.request.id": f"{body['id']}-0",
            "gen_ai.response.finish_reasons": ("length",),
            "gen_ai.usage.input_tokens": 2,
            "gen_ai.usage.cache_read.input_tokens": 0,
            "gen_ai.usage.output_tokens": 3,
            "gen_ai.latency.time_in_queue": record.scheduled - record.arrived,
            "gen_ai.latency.time_to_first_token": first - record.arrived,
            "gen_ai.latency.time_in_model_prefill": first - record.scheduled,
            "gen_ai.latency.time_in_model_decode": times[-1] - first,
            "gen_ai.latency.e2e": record.finished - record.arrived,
        }
        assert seconds(choice) == pytest.approx(record.finished - record.arrived, abs=1e-6)
        assert choice.start_time is not None and choice.end_time is not None
        assert call.start_time <= choice.start_time and choice.end_time <= call.end_time
        phases = spans.inside(choice)
        assert list(phases) == ["queue", "prefill", "decode"]
        lengths = (record.scheduled - record.arrived, first - record.scheduled, record.finished - first)
        for phase, length in zip(phases.values(), lengths, strict=True):
            assert seconds(phase) == pytest.approx(length, abs=1e-6)
        queue, prefill, decode = phases.values()
        assert (queue.start_time, decode.end_time) == (choice.start_time, choice.end_time)
        assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
        assert attributes(decode) == {"gen_ai.usage.output_tokens": 2}


def test_a_chat_stream_of_several_choices():
    with traced() as (server, spans):
        body = {"messages": [{"role": "user", "content": SECRET}], "n": 3, "max_tokens": 2, "stream": True}
        with connected(server) as client, client.stream("POST", "/v1/chat/completions", json=body) as stream:
            events = [line for line in stream.iter_lines() if line]
        assert events[-1] == "data: [DONE]"
        call = spans.call()
        assert call.name == "chat test" and call.parent is None
        facts = attributes(call)
        assert (facts["gen_ai.operation.name"], facts["gen_ai.request.stream"]) == ("chat", True)
        assert facts["gen_ai.request.choice.count"] == 3
        assert facts["gen_ai.response.finish_reasons"] == ("length",) * 3
        assert facts["gen_ai.usage.output_tokens"] == 6
        assert facts["gen_ai.usage.input_tokens"] == records(server)[0].n_input
        choices = spans.inside(call)
        assert set(choices) == {"choice 0", "choice 1", "choice 2"}
        ids = {attributes(choice)["gen_ai.request.id"] for choice in choices.values()}
        assert ids == {record.request_id for record in records(server)}
        for choice in choices.values():
            assert set(spans.inside(choice)) >= {"queue", "prefill"}


def test_no_prompt_and_no_output_is_in_any_span():
    with traced() as (server, spans):
        post(server, {**COMPLETION, "prompt": SECRET, "echo": True, "stop": ["swordfish"]})
        user = {"role": "user", "content": SECRET}
        post(server, {"messages": [user], "max_tokens": 4, "user": "someone"}, "/v1/chat/completions")
        spans.calls(2)
        everything = "".join(span.to_json() for span in spans.finished())
        for text in (SECRET, "swordfish", "someone"):
            assert text not in everything


def test_the_spans_of_a_client_of_the_sdk_and_of_the_server_are_one_trace():
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("client")
    with traced() as (server, spans), tracer.start_as_current_span("the client's") as mine:
        headers: dict[str, str] = {}
        inject(headers)
        assert post(server, COMPLETION, **headers).status_code == 200
        call = spans.call()
        assert call.context is not None and call.parent is not None
        assert call.parent.span_id == mine.get_span_context().span_id
        assert call.context.trace_id == mine.get_span_context().trace_id


def test_a_call_that_its_caller_does_not_sample_has_no_span():
    with traced() as (server, spans):
        assert post(server, COMPLETION, traceparent=UNSAMPLED).status_code == 200
        assert post(server, COMPLETION).status_code == 200
        spans.call()
        assert len(spans.finished()) == 5
        assert TRACE not in {span.context.trace_id for span in spans.finished() if span.context}


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", "rubbish")],
        [
            (
                "traceparent",
                CALLER.replace("0af76519", "00000000").replace("16cd43dd8448eb211c80319c", "0" * 24),
            )
        ],
        [("traceparent", "ff" + CALLER[2:])],
        [("traceparent", CALLER), ("traceparent", CALLER)],
        [("traceparent", "0" * 20_000)],
        [("traceparent", "\xff\x00".replace("\x00", "\xfe"))],
    ],
)
def test_a_malformed_caller_is_ignored(headers: list[tuple[str, str]]):
    with traced() as (server, spans), connected(server) as client:
        sent = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        response = client.post("/v1/completions", json=COMPLETION, headers=sent)
        assert response.status_code == 200, response.text
        assert spans.call().parent is None


def test_only_requests_for_output_are_traced_and_refused_ones_too():
    with traced() as (server, spans):
        with connected(server) as client:
            for path in ("/v1/models", "/health", "/metrics", "/nowhere"):
                client.get(path)
        assert post(server, {"prompt": "a", "max_tokens": -1}).status_code == 400
        call = spans.call()
        assert (call.name, call.status.status_code) == ("text_completion test", StatusCode.UNSET)
        assert attributes(call)["http.response.status_code"] == 400
        assert "gen_ai.usage.output_tokens" not in attributes(call)
        assert len(spans.finished()) == 1


def test_a_timeout_is_an_error():
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", request_timeout=0.5)
    with traced(seconds=0.02, options=options) as (server, spans):
        assert post(server, SLOW).status_code == 504
        call = spans.call()
        assert call.status.status_code is StatusCode.ERROR
        assert attributes(call)["error.type"] == "504"
        choice = spans.inside(call)["choice 0"]
        assert choice.status.status_code is StatusCode.ERROR
        assert attributes(choice)["error.type"] == "timeout"
        assert attributes(choice)["gen_ai.response.finish_reasons"] == ("timeout",)
        assert attributes(choice)["gen_ai.usage.output_tokens"] == records(server)[0].n_output > 0


def test_a_stream_that_fails_after_it_began_is_an_error():
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", request_timeout=0.5)
    with traced(seconds=0.02, options=options) as (server, spans):
        assert post(server, {**SLOW, "stream": True}).status_code == 200
        call = spans.call()
        assert (call.status.status_code, attributes(call)["error.type"]) == (StatusCode.ERROR, "timeout")


def test_a_client_that_leaves_is_no_error_and_its_choices_are_complete():
    with traced(seconds=0.02) as (server, spans):
        with (
            connected(server) as client,
            client.stream("POST", "/v1/completions", json={**SLOW, "stream": True}) as stream,
        ):
            next(stream.iter_lines())
        call = spans.call()
        assert call.status.status_code is StatusCode.UNSET
        assert attributes(call)["http.response.status_code"] == 499
        assert attributes(call)["gen_ai.response.finish_reasons"] == ("cancelled",)
        choice = spans.inside(call)["choice 0"]
        assert choice.status.status_code is StatusCode.UNSET
        (record,) = records(server)
        assert record.finished is not None
        assert seconds(choice) == pytest.approx(record.finished - record.arrived, abs=1e-6)


def test_a_failed_engine_is_an_error():
    engine = PacedEngine(seconds=0.01)
    with traced(engine=engine) as (server, spans):
        failing = threading.Timer(0.1, setattr, (engine, "error", EngineError("the device burned")))
        failing.start()
        assert post(server, SLOW).status_code == 503
        failing.join()
        call = spans.call()
        assert attributes(call)["error.type"] == "503"
        assert attributes(spans.inside(call)["choice 0"])["error.type"] == "error"


def test_preemptions_are_events_with_the_timelines_times():
    # Two requests grow until 4 blocks of 16 are not enough for both: the later one is preempted.
    config = replace(CONFIG, max_batch_size=2, n_slots=64, scheduling=SchedulingConfig())
    with traced(seconds=0.001, config=config) as (server, spans):
        body = {"prompt": ["a" * 16, "b" * 16], "max_tokens": 40, "ignore_eos": True}
        assert post(server, body).status_code == 200
        call = spans.call()
        interrupted = {r.request_id: r.interruptions for r in records(server) if r.interruptions}
        assert interrupted and server.service.scheduler.n_preemptions == sum(map(len, interrupted.values()))
        for choice in spans.inside(call).values():
            assert choice.start_time is not None
            arrived = next(
                r.arrived for r in records(server) if r.request_id == attributes(choice)["gen_ai.request.id"]
            )
            expected = [
                (name, at - arrived)
                for one in interrupted.get(attributes(choice)["gen_ai.request.id"], ())
                for name, at in ((one.cause, one.at), ("resumed", one.resumed))
                if at is not None
            ]
            assert [event.name for event in choice.events] == [name for name, _ in expected]
            for event, (_, at) in zip(choice.events, expected, strict=True):
                assert (event.timestamp - choice.start_time) / 1e9 == pytest.approx(at, abs=1e-6)


def test_a_lost_worker_is_an_event_and_the_request_runs_again():
    engine = FragileEngine()
    with traced(engine=engine) as (server, spans), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, server, COMPLETION)
        assert engine.waited_for.wait(SOON)
        engine.error = LOST
        engine.let(1)
        assert engine.is_down.wait(SOON)
        engine.recoveries.append(True)
        engine.let(1000)
        assert answer.result(SOON).status_code == 200
        choice = spans.inside(spans.call())["choice 0"]
        assert [event.name for event in choice.events] == ["worker lost", "resumed"]
        (record,) = records(server)
        (lost,) = record.interruptions
        assert record.scheduled is not None and lost.resumed is not None
        assert record.scheduled < lost.at < lost.resumed < record.token_times[0]
        assert choice.start_time is not None
        times = [(event.timestamp - choice.start_time) / 1e9 for event in choice.events]
        assert times == pytest.approx([lost.at - record.arrived, lost.resumed - record.arrived], abs=1e-6)


def test_a_grpc_call_is_joined_by_its_metadata():
    with traced() as (server, spans), rpc_client(server) as stub:
        request = asking("ab", max_tokens=3, ignore_eos=True)
        request.request_id = "mine"
        metadata = (("traceparent", CALLER), ("tracestate", "vendor=1"), ("some-bin", b"\xff"))
        assert len(list(stub.Generate(request, metadata=metadata))) > 0
        call = spans.call()
        assert call.context is not None and call.parent is not None
        assert (call.context.trace_id, call.parent.span_id) == (TRACE, PARENT)
        facts = attributes(call)
        assert call.name == "text_completion test"
        assert facts["rpc.system.name"] == "grpc"
        assert (facts["rpc.method"], facts["rpc.response.status_code"]) == ("Generate", "OK")
        assert facts["gen_ai.response.id"] == "mine"
        assert (facts["gen_ai.usage.input_tokens"], facts["gen_ai.usage.output_tokens"]) == (2, 3)
        assert set(spans.inside(call)) == {"choice 0"}


def test_grpc_errors_and_other_methods():
    with traced(seconds=0.02) as (server, spans), rpc_client(server) as stub:
        stub.Models(pb.ModelsRequest())
        assert refusal(stub, asking("ab", max_tokens=10_000)).code() is grpc.StatusCode.INVALID_ARGUMENT
        slow = asking("ab", max_tokens=400, ignore_eos=True)
        assert refusal(stub, slow, timeout=0.5).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        refused, late = spans.calls(2)
        assert attributes(refused)["rpc.response.status_code"] == "INVALID_ARGUMENT"
        assert refused.status.status_code is StatusCode.UNSET
        assert late.status.status_code is StatusCode.ERROR
        assert attributes(late)["error.type"] == "DEADLINE_EXCEEDED"
        assert attributes(spans.inside(late)["choice 0"])["gen_ai.response.finish_reasons"] == ("timeout",)


def test_a_reused_id_never_mixes_two_calls():
    with traced() as (server, spans), rpc_client(server) as stub:
        for _ in range(20):
            request = asking("ab", max_tokens=2, ignore_eos=True)
            request.request_id = "again"
            answer(stub, request)
        for call in spans.calls(20):
            assert set(spans.inside(call)) == {"choice 0"}
        until(lambda: not spans.tracing._live, "the end of all requests")


def test_nothing_watches_a_server_without_traces(server: Any):
    assert server.watchers == []
