"""A server with endpoint processes answers as one process does, and outlives each of them."""

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from orca_jax.errors import ConfigError
from orca_jax.request.request import FinishReason
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import Server, serving, until
from tests.host.engines import SOON, GatedEngine, at_rest, writing

OPTIONS = EndpointOptions(port=0, grpc_port=None, access_log="off")
PROCESSES = EndpointOptions(port=0, grpc_port=None, access_log="off", endpoint_processes=2)
TEXT = "Go"
MESSAGES = [{"role": "user", "content": TEXT}]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]

_OF_ONE_REQUEST = re.compile(
    r'"(id|created|created_at|completed_at|item_id|call_id|request_id)": ?("[^"]*"|[0-9.]+)'
)
_CONTENT = re.compile(r'"(?:text|content)":"([^"]*)"')
_COUNTED = re.compile(r'_total\{method="POST",path="/v1/messages",status="200"\} (\S+)')

ASKED: dict[str, tuple[str, str, Any]] = {
    "completion": ("POST", "/v1/completions", {"prompt": TEXT, "max_tokens": 5}),
    "several": ("POST", "/v1/completions", {"prompt": [TEXT, "He"], "n": 2, "max_tokens": 3, "seed": 1}),
    "echo": ("POST", "/v1/completions", {"prompt": TEXT, "echo": True, "logprobs": 2, "max_tokens": 2}),
    "stop": ("POST", "/v1/completions", {"prompt": TEXT, "stop": ["d"], "max_tokens": 9}),
    "beams": (
        "POST",
        "/v1/completions",
        {"prompt": TEXT, "use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 4, "seed": 1},
    ),
    "stream": ("POST", "/v1/completions", {"prompt": TEXT, "stream": True, "max_tokens": 5}),
    "chat": ("POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5}),
    "chat stream": (
        "POST",
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "tools": ("POST", "/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 5}),
    "messages": ("POST", "/v1/messages", {"model": "test", "messages": MESSAGES, "max_tokens": 5}),
    "response": ("POST", "/v1/responses", {"input": TEXT, "max_output_tokens": 5}),
    "embedding": ("POST", "/v1/embeddings", {"input": TEXT}),
    "tokens": ("POST", "/tokenize", {"prompt": TEXT}),
    "too long": ("POST", "/v1/completions", {"prompt": "x" * 100, "max_tokens": 5}),
    "no such field": ("POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": -1}),
    "no such model": ("POST", "/v1/messages", {"model": "no", "messages": MESSAGES, "max_tokens": 5}),
    "models": ("GET", "/v1/models", None),
    "health": ("GET", "/health", None),
    "page": ("GET", "/", None),
    "unknown": ("GET", "/v1/no?x=%20y", None),
    "method": ("GET", "/v1/completions", None),
    "with a slash": ("POST", "/v1/completions/", {"prompt": TEXT}),
}


@pytest.fixture(scope="module")
def one() -> Iterator[httpx2.Client]:
    with serving(writing("abcdef"), options=OPTIONS) as server, client(server) as asked:
        yield asked


@pytest.fixture(scope="module")
def several() -> Iterator[Server]:
    with serving(writing("abcdef"), options=PROCESSES) as server:
        yield server


def client(server: Server, **headers: str) -> httpx2.Client:
    return httpx2.Client(base_url=server.url, timeout=SOON, headers=headers)


def up(server: Server) -> bool:
    """Whether all endpoint processes follow the engine."""
    return asyncio.run_coroutine_threadsafe(server.endpoints.settle(), server.loop).result(SOON)


def facts(answer: httpx2.Response) -> tuple[int, dict[str, str], str]:
    """An answer without what differs between two requests, such as the pieces of a stream."""
    names = ("content-type", "x-orca-ignored", "allow", "cache-control", "www-authenticate", "retry-after")
    headers = {name: answer.headers[name] for name in names if name in answer.headers}
    text = _OF_ONE_REQUEST.sub(r'"\1":0', answer.text)
    if headers["content-type"].startswith("text/event-stream"):
        contents = "".join(_CONTENT.findall(text))
        text = contents + text[text.rindex('"finish_reason"') :]
    return answer.status_code, headers, text


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_of_one_process(one: httpx2.Client, several: Server, name: str) -> None:
    method, path, body = ASKED[name]
    with client(several) as asked:
        assert facts(asked.request(method, path, json=body)) == facts(one.request(method, path, json=body))


def test_both_processes_count_their_answers(several: Server) -> None:
    def counted() -> int:
        with client(several) as asked:
            found = _COUNTED.search(asked.get("/metrics").text)
        return 0 if found is None else int(float(found[1]))

    before = counted()
    for _ in range(6):
        with client(several) as asked:  # a connection of its own
            asked.request(*ASKED["messages"][:2], json=ASKED["messages"][2]).raise_for_status()
    until(lambda: counted() >= before + 6, "the reports")  # those of earlier tests may come with them


def test_keys_are_asked_for_and_owners_known() -> None:
    with serving(options=PROCESSES, keys=ApiKeys(["secret-key-1"])) as server:
        with client(server) as asked:
            assert asked.post("/v1/completions", json={"prompt": TEXT}).status_code == 401
            assert asked.get("/v1/models").status_code == 401
            assert asked.get("/health", headers={"x-orca-client": '["1.2.3.4",1,"https"]'}).status_code == 200
        with client(server, authorization="Bearer secret-key-1") as asked:
            assert asked.post("/v1/completions", json={"prompt": TEXT}).status_code == 200
            assert asked.get("/v1/models").status_code == 200


def stream(asked: httpx2.Client) -> Any:
    body = {"prompt": [1], "max_tokens": 40, "ignore_eos": True, "stream": True}
    return asked.stream("POST", "/v1/completions", json=body)


def test_a_killed_process_loses_only_its_streams(caplog: pytest.LogCaptureFixture) -> None:
    engine = GatedEngine(writing("ab"))
    with serving(engine=engine, options=PROCESSES) as server:
        first, second = server.endpoints.process_ids
        os.kill(second, signal.SIGSTOP)  # so that the first accepts the connection
        with client(server) as a, stream(a) as kept:
            until(lambda: server.service.pool.n_running == 1, "the first stream")
            os.kill(second, signal.SIGCONT)
            os.kill(first, signal.SIGSTOP)
            with client(server) as b, stream(b) as lost:
                engine.let(1)
                until(lambda: len(server.service.pool) == 2, "the second stream")
                os.kill(first, signal.SIGCONT)
                os.kill(second, signal.SIGKILL)
                with pytest.raises(httpx2.TransportError):
                    lost.read()
            engine.let(60)
            assert kept.read().count(b"data: ") > 2 and kept.text.rstrip().endswith("data: [DONE]")
        until(lambda: at_rest(server.service), "rest")
        until(lambda: len({first, *server.endpoints.process_ids} - {second}) == 2, "another process")
        until(lambda: up(server), "its model")
        engine.let(100)
        for _ in range(4):
            with client(server) as asked:
                asked.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 1}).raise_for_status()
    assert f"(pid {second}) ended with status -9, and 1 requests with it; another one" in caplog.text


def test_a_drain_ends_streams_in_all_processes() -> None:
    engine = GatedEngine(writing("ab"))
    with serving(engine=engine, options=PROCESSES) as server:
        with client(server) as asked, stream(asked) as answer:
            until(lambda: server.service.pool.n_running == 1, "the stream")
            draining = asyncio.run_coroutine_threadsafe(server.endpoints.drain(0.0), server.loop)
            until(lambda: all(request.ending for request in server.service.pool.live()), "its end")
            engine.let(60)
            assert "the server is shutting down" in answer.read().decode()
            assert draining.result(SOON) == 1
        assert not server.endpoints.process_ids


def test_traces_are_refused() -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint traces the requests of one process"):
        EndpointOptions(endpoint_processes=1, otlp_traces_endpoint="http://localhost:4318/v1/traces")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_a_client_that_leaves_ends_its_request_wherever_it_is(path: str) -> None:
    engine = GatedEngine(writing("ab"))
    with serving(engine=engine, options=PROCESSES) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps({"input": TEXT} if path == "/v1/responses" else {"messages": MESSAGES}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection((host, int(port)), timeout=SOON) as connection:
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            until(lambda: server.service.pool.n_running == 1, "the request")
        until(lambda: all(request.ending for request in server.service.pool.live()), "its end")
        engine.let(2)
        until(lambda: at_rest(server.service), "rest")
        reasons = [record.finish_reason for record in server.service.timeline.requests]
        assert reasons == [FinishReason.CANCELLED]
