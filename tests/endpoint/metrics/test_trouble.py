"""A lost worker and its recovery, as clients, probes, dashboards and the log show them."""

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from orca_jax.config import ORCA, RestartBound, SchedulingConfig
from orca_jax.errors import EngineError, WorkerLost
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.service.orca import Orca
from server.gateway.gateway import LOGGER, Phase, log_failure, log_loss
from server.rpc import generation_pb2 as pb
from server.rpc.generation_pb2_grpc import GenerationStub
from tests.endpoint.harness import CONFIG, MODEL, Server, serving_model, until
from tests.endpoint.http_client import connected, error_of
from tests.endpoint.log_lines import Lines
from tests.host.engines import LETTERS, SOON
from tests.host.fragile_engine import LOST, FragileEngine

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ABCDEF: dict[str, Any] = {"prompt": "a", "max_tokens": 6, "ignore_eos": True}
STREAM: dict[str, Any] = {**ABCDEF, "stream": True}
REASON = "stage 2: its process died; its requests run again when the workers are up"
FINAL = (
    "workers were lost 1 times within 600 seconds, and 0 restarts are allowed; "
    "the last: stage 2: its process died"
)


class Clock:
    """A clock that moves only when a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def serving(
    engine: FragileEngine,
    *,
    restarts: int = 5,
    clock: Clock | None = None,
    ready: bool = True,
    scheduling: SchedulingConfig = ORCA,
) -> Iterator[Server]:
    """A server whose engine continues "a" as "abcdef"; the test releases each iteration."""
    config = replace(CONFIG, scheduling=scheduling)
    kv = KVManager(
        n_blocks=CONFIG.n_blocks,
        block_size=CONFIG.block_size,
        n_rows=2 * CONFIG.max_batch_size,
        max_blocks_per_row=MODEL.n_positions // CONFIG.block_size,
    )
    service = Orca(
        engine,
        kv,
        config=config,
        model=MODEL,
        tokenizer=LETTERS,
        clock=clock or Clock(),
        restarts=RestartBound(restarts=restarts),
    )
    with service, serving_model(service, MODEL, config, tokenizer=LETTERS, ready=ready) as server:
        try:
            yield server
        finally:
            engine.let(1000)


def lose(engine: FragileEngine, server: Server) -> None:
    """Lose a worker during the current iteration, and wait until the service has noticed."""
    assert engine.waited_for.wait(SOON)
    engine.error = LOST
    engine.let(1)
    assert engine.is_down.wait(SOON)
    assert server.gateway.phase is Phase.RECOVERING


def bring_up(engine: FragileEngine, server: Server) -> None:
    engine.recoveries.append(True)
    until(lambda: server.gateway.phase is Phase.READY, "the workers")


def text_of(events: list[str]) -> str:
    """The concatenated text of a stream's events."""
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def events_of(stream: httpx2.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in stream.iter_lines() if line)


def refusal(channel: grpc.Channel) -> tuple[grpc.StatusCode, str]:
    """The error with which a call of Generate ends."""
    request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=6))
    with pytest.raises(grpc.RpcError) as caught:
        list(GenerationStub(channel).Generate(request, timeout=SOON))
    status: Any = caught.value
    return status.code(), status.details()


@contextmanager
def log() -> Iterator[list[str]]:
    handler = Lines()
    handler.setLevel(logging.WARNING)  # as shown by Python's default logging
    LOGGER.addHandler(handler)
    try:
        yield handler.lines
    finally:
        LOGGER.removeHandler(handler)


def test_ready_names_the_lost_stage_until_it_recovers() -> None:
    engine = FragileEngine()
    with serving(engine) as server, connected(server) as client, ThreadPoolExecutor(1) as threads:
        assert client.get("/ready").json() == {"status": "ready"}
        answer = threads.submit(client.post, "/v1/completions", json=ABCDEF)
        lose(engine, server)
        response = client.get("/ready")
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert response.json() == {"status": "recovering", "reason": REASON}
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 200
        bring_up(engine, server)
        response = client.get("/ready")
        assert (response.status_code, response.json()) == (200, {"status": "ready"})
        engine.let(20)
        assert answer.result(SOON).json()["choices"][0]["text"] == "abcdef"


def test_a_worker_lost_while_idle_is_reported_too() -> None:
    engine = FragileEngine()
    engine.known_lost = WorkerLost(0, "its line broke: the peer left")
    with serving(engine) as server, connected(server) as client:
        assert engine.is_down.wait(SOON)
        assert client.get("/ready").json()["reason"].startswith("stage 1: its line broke: the peer left; ")
        bring_up(engine, server)
        assert client.get("/ready").status_code == 200


def test_a_stream_pauses_and_a_new_request_waits() -> None:
    engine = FragileEngine()
    with (
        serving(engine) as server,
        connected(server) as client,
        connected(server) as other,
        ThreadPoolExecutor(1) as threads,
        client.stream("POST", "/v1/completions", json=STREAM) as stream,
    ):
        events = events_of(stream)
        for letter in "ab":
            engine.let(1)
            assert text_of([next(events)]) == letter
        lose(engine, server)
        answer = threads.submit(other.post, "/v1/completions", json={**ABCDEF, "prompt": "k"})
        until(lambda: server.gateway.n_live == 2, "the request")
        assert (server.service.pool.n_running, server.service.pool.n_waiting) == (1, 1)
        bring_up(engine, server)
        engine.let(40)
        *after, done = events
        assert (text_of(after), done) == ("cdef", "[DONE]")
        response = answer.result(SOON)
        assert response.status_code == 200
        assert response.json()["choices"][0]["text"] == "klmnop"


def test_a_client_that_leaves_during_recovery_holds_nothing() -> None:
    engine = FragileEngine()
    with serving(engine) as server, connected(server) as client:
        with client.stream("POST", "/v1/completions", json=STREAM) as stream:
            engine.let(1)
            events = events_of(stream)  # kept: the stream is closed with it
            next(events)
            lose(engine, server)
        until(server.at_rest, "rest")
        assert server.gateway.phase is Phase.RECOVERING
        bring_up(engine, server)


def test_precedence_of_phases() -> None:
    engine = FragileEngine()
    engine.known_lost = LOST
    with serving(engine, ready=False) as server, connected(server) as client:
        assert engine.is_down.wait(SOON)
        assert client.get("/ready").json()["status"] == "loading"
        server.call(lambda: server.gateway.open(server.model))
        assert client.get("/ready").json()["status"] == "recovering"
        server.service._failure = EngineError("gone")
        assert client.get("/ready").json() == {"status": "failed", "reason": "the engine failed: gone"}
        server.service._failure = None
        server.gateway._draining = True
        response = client.get("/ready")
        assert response.json() == {"status": "draining", "reason": "the server is shutting down"}


def test_after_too_many_losses_every_request_gets_the_cause() -> None:
    engine = FragileEngine()
    with (
        log() as lines,
        serving(engine, restarts=0) as server,
        connected(server) as client,
        connected(server) as other,
        grpc.insecure_channel(server.grpc_address) as channel,
        ThreadPoolExecutor(2) as threads,
    ):
        with client.stream("POST", "/v1/completions", json=STREAM) as stream:
            events = events_of(stream)
            engine.let(1)
            assert text_of([next(events)]) == "a"
            plain = threads.submit(other.post, "/v1/completions", json=ABCDEF)
            remote = threads.submit(refusal, channel)
            until(lambda: server.gateway.n_live == 3, "three requests")
            engine.error = LOST
            engine.let(1)
            (last,) = events
        error = json.loads(last)["error"]
        assert (error["type"], error["code"]) == ("engine_error", "engine_failed")
        assert error["message"] == f"the engine failed: {FINAL}"
        response = plain.result(SOON)
        assert (response.status_code, error_of(response)) == (503, error)
        assert remote.result(SOON) == (grpc.StatusCode.UNAVAILABLE, f"the engine failed: {FINAL}")

        closed = f"the engine failed, and takes no more requests: {FINAL}"
        assert refusal(channel) == (grpc.StatusCode.UNAVAILABLE, closed)
        response = client.post("/v1/completions", json=ABCDEF)
        assert (response.status_code, "retry-after" in response.headers) == (503, False)
        expected = {"message": closed, "type": "engine_error", "param": None, "code": "engine_failed"}
        assert error_of(response) == expected
        response = client.get("/ready")
        assert (response.status_code, "retry-after" in response.headers) == (503, False)
        assert response.json() == {"status": "failed", "reason": f"the engine failed: {FINAL}"}
        figures = client.get("/metrics").text
        assert 'orca_worker_losses_total{model_name="test"} 1.0' in figures
        assert 'orca_worker_recoveries_total{model_name="test"} 0.0' in figures
        assert 'orca_server_phase{phase="failed"} 1.0' in figures
        until(lambda: bool(lines), "the line")
    assert lines == [closed], "and none that says that requests run again"


def test_metrics_follow_losses_and_recoveries() -> None:
    engine, clock = FragileEngine(), Clock()
    engine.known_lost = LOST
    with serving(engine, clock=clock) as server, connected(server) as client:

        def figures() -> dict[str, float]:
            lines = client.get("/metrics").text.splitlines()
            pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("orca_worker_")]
            return {name.removesuffix('{model_name="test"}'): float(value) for name, value in pairs}

        assert engine.is_down.wait(SOON)
        clock.now = 1.5
        assert figures() == {
            "orca_worker_losses_total": 1,
            "orca_worker_recoveries_total": 0,
            "orca_worker_blamed_requests_total": 0,
            "orca_worker_down_seconds_total": 1.5,
        }
        assert 'orca_server_phase{phase="recovering"} 1.0' in client.get("/metrics").text
        clock.now = 2.0
        bring_up(engine, server)
        clock.now = 9.0
        assert figures() == {
            "orca_worker_losses_total": 1,
            "orca_worker_recoveries_total": 1,
            "orca_worker_blamed_requests_total": 0,
            "orca_worker_down_seconds_total": 2,
            "orca_worker_last_recovery_seconds": 2,
        }
        assert 'orca_server_phase{phase="ready"} 1.0' in client.get("/metrics").text


def test_grpc_health_follows_losses_and_recoveries() -> None:
    engine = FragileEngine()
    with serving(engine) as server, grpc.insecure_channel(server.grpc_address) as channel:
        stub: Any = HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="orca.v1.Generation")
        watch = stub.Watch(request, timeout=SOON)
        generated = GenerationStub(channel).Generate(
            pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=6)), timeout=SOON
        )
        assert next(watch).status == stub.Check(request, timeout=SOON).status == SERVING
        engine.let(1)
        assert next(generated).text == "a"
        lose(engine, server)
        assert next(watch).status == stub.Check(request, timeout=SOON).status == NOT_SERVING
        bring_up(engine, server)
        assert next(watch).status == stub.Check(request, timeout=SOON).status == SERVING
        engine.let(20)
        assert "".join(piece.text for piece in generated) == "bcdef"
        watch.cancel()


@pytest.mark.parametrize("scheduling", [ORCA, SchedulingConfig(reservation="on-demand")])
def test_the_log_has_one_line_for_the_loss_and_one_for_the_recovery(scheduling: SchedulingConfig) -> None:
    engine, clock = FragileEngine(), Clock()
    started = serving(engine, clock=clock, scheduling=scheduling)
    with log() as lines, started as server, ThreadPoolExecutor(2) as threads:
        with connected(server) as one, connected(server) as two:
            answers = [threads.submit(client.post, "/v1/completions", json=ABCDEF) for client in (one, two)]
            until(lambda: server.gateway.n_live == 2, "two requests")
            engine.let(1)
            until(lambda: server.service.pool.n_running == 2, "both to run")
            lose(engine, server)
            clock.now = 1.84
            bring_up(engine, server)
            engine.let(40)
            assert [answer.result(SOON).status_code for answer in answers] == [200, 200]
        until(lambda: len(lines) == 2, "two lines")
    assert lines == [
        "stage 2 is lost: its process died; 2 requests run again when the workers are up",
        "the workers are up again after 1.84 seconds",
    ]


def test_every_log_entry_is_a_single_line() -> None:
    with log() as lines:
        log_loss(WorkerLost(0, "no room\nfor\x1b[2J 7 é"), 1)
        log_loss(LOST, 0)
        log_failure(EngineError("first\r\nsecond"))
    assert lines == [
        "stage 1 is lost: no room for [2J 7 é; 1 request runs again when the workers are up",
        "stage 2 is lost: its process died; no request has to run again",
        "the engine failed, and takes no more requests: first  second",
    ]


class Panic(BaseException):
    """Like a panic raised by pyo3: not an Exception."""


def test_a_panic_on_the_scheduler_thread_is_noticed() -> None:
    engine = FragileEngine()
    with serving(engine) as server, connected(server) as client, ThreadPoolExecutor(4) as threads:
        body = {"prompt": "a", "max_tokens": 4}
        waiting = [threads.submit(client.post, "/v1/completions", json=body) for _ in range(4)]
        assert engine.waited_for.wait(SOON)
        engine.error = Panic("overflow")  # pyright: ignore[reportAttributeAccessIssue]
        engine.let(1)
        until(lambda: client.get("/ready").status_code == 503, "the failure")
        reason = "the engine failed: Panic: overflow"
        assert client.get("/ready").json() == {"status": "failed", "reason": reason}
        for answer in (one.result(SOON) for one in waiting):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
            assert "Panic: overflow" in answer.json()["error"]["message"]
