"""The middleware around every HTTP request: request ids, API keys, errors and metrics."""

import json
import re
from collections.abc import Iterator

import httpx2
import pytest

from orca_jax.config import ServingConfig
from orca_jax.errors import InvalidRequest, QueueFull
from orca_jax.request.request import FinishReason
from orca_jax.request.sampling_params import SamplingParams
from server.http import models
from server.http.bodies.errors import error_response, openai_body, trouble_of
from server.settings.api_keys import ApiKeys
from tests.endpoint.harness import Server, serving, until
from tests.endpoint.http_client import JSON, connected, error_of, post_head, raw, status_line
from tests.host.engines import SOON, GatedEngine

POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


# Request ids


@pytest.mark.parametrize("given", ["a", "x" * 128, "!~-_:/?{}\"'"])
def test_a_request_id_is_returned(client: httpx2.Client, given: str) -> None:
    assert client.get("/version", headers={"X-Request-Id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "two words", "tab\there", "caf\xe9"])
def test_an_unusable_request_id_is_replaced(client: httpx2.Client, given: str) -> None:
    headers = [(b"X-Request-Id", given.encode("latin-1"))]
    ids = {client.get("/version", headers=headers).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)


@pytest.mark.parametrize(
    "path, body, status", [("/nowhere", "{}", 404), ("/version", "{}", 405), ("/tokenize", "{", 400)]
)
def test_errors_have_the_request_id_too(client: httpx2.Client, path: str, body: str, status: int) -> None:
    response = client.post(path, content=body, headers={**JSON, "X-Request-Id": "mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (status, "mine")
    error_of(response)


# API keys


@pytest.fixture(scope="module")
def keyed() -> Iterator[Server]:
    with serving(keys=ApiKeys(["key-number-1", "key-number-2"])) as server:
        yield server


@pytest.mark.parametrize("authorization", [None, "Bearer wrong-key-0", "key-number-1", "Basic key-number-1"])
@pytest.mark.parametrize("path", [*POSTS, "/v1/models", "/v1/models/test", "/nowhere", "//v1/models", "/v1"])
def test_a_key_is_needed(keyed: Server, path: str, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    with connected(keyed) as client:
        response = client.get(path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = error_of(response)
    assert error["code"] == "invalid_api_key"
    assert "key-number" not in response.text


@pytest.mark.parametrize("key", ["key-number-1", "key-number-2"])
def test_each_key_is_accepted(keyed: Server, key: str) -> None:
    with connected(keyed) as client:
        headers = {"Authorization": f"Bearer {key}"}
        assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.post("/tokenize", json={"prompt": "a"}, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/docs", "/openapi.json"])
def test_paths_that_need_no_key(keyed: Server, path: str) -> None:
    with connected(keyed) as client:
        assert client.get(path).status_code == 200


def test_the_key_is_checked_before_the_body_is_read(keyed: Server) -> None:
    with raw(keyed, post_head("/v1/completions", "Content-Length: 1000")) as connection:
        assert status_line(connection) == b"HTTP/1.1 401 Unauthorized"


# Errors


def test_details_of_an_unexpected_error_are_only_logged(
    client: httpx2.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("the secret of the house")

    monkeypatch.setattr(models, "_model", broken)
    response = client.get("/v1/models", headers={"X-Request-Id": "find-me"})
    assert (response.status_code, error_of(response)["type"]) == (500, "server_error")
    assert response.headers["x-request-id"] == "find-me"
    assert "find-me" in response.text
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    until(lambda: "the secret of the house" in caplog.text, "the traceback")
    assert "Traceback" in caplog.text
    assert "request id: find-me" in caplog.text


def test_unknown_paths_and_methods(client: httpx2.Client) -> None:
    response = client.post("/v2/nowhere?a=b")
    assert (response.status_code, error_of(response)["code"]) == (404, "unknown_url")
    assert "POST /v2/nowhere;" in response.text
    response = client.delete("/tokenize")
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("seconds, header", [(None, None), (1, "1"), (60, "60")])
def test_retry_after_is_a_header(seconds: int | None, header: str | None) -> None:
    response = error_response(QueueFull("full"), retry_after=seconds)
    assert (response.status_code, response.headers.get("retry-after")) == (429, header)


def test_any_message_can_be_sent() -> None:
    error = InvalidRequest("half a pair: \ud800", param="\udfff")
    assert openai_body(trouble_of(error))["error"]["message"] == r"half a pair: \ud800"
    body = json.loads(bytes(error_response(error).body))
    assert body == {
        "error": {
            "message": r"half a pair: \ud800",
            "type": "invalid_request_error",
            "param": r"\udfff",
            "code": None,
        }
    }


def test_a_full_queue() -> None:
    engine = GatedEngine()
    config = ServingConfig(max_batch_size=1, n_slots=64, max_batch_tokens=64, block_size=16, max_queue=2)
    with serving(engine=engine, config=config) as server, connected(server) as client:
        params = SamplingParams(max_tokens=2)
        running = server.service.submit([1], params)
        assert engine.waited_for.wait(SOON)
        waiting = [server.service.submit([1], params) for _ in range(2)]
        response = client.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"  # no request has finished yet, so the rate is unknown
        assert error_of(response)["type"] == "rate_limit_error"
        assert error_of(response)["code"] == "queue_full"
        engine.let(1000)
        for generation in (running, *waiting):
            assert generation.result(SOON).finish_reason is FinishReason.LENGTH


def test_requests_are_counted_by_route() -> None:
    with serving() as server, connected(server) as client:
        client.get("/v1/models/test")
        client.get("/v1/models/other")
        client.get("/made/up/path")
        client.post("/tokenize", json={"prompt": "a"})
        client.request("PROPFIND", "/health")
        figures = client.get("/metrics").text
    counted = {
        line.rpartition(" ")[0]
        for line in figures.splitlines()
        if line.startswith("orca_http_requests_total")
    }
    assert counted == {
        'orca_http_requests_total{method="GET",path="/v1/models/{model_id:path}",status="200"}',
        'orca_http_requests_total{method="GET",path="/v1/models/{model_id:path}",status="404"}',
        'orca_http_requests_total{method="GET",path="other",status="404"}',
        'orca_http_requests_total{method="POST",path="/tokenize",status="200"}',
        'orca_http_requests_total{method="other",path="/health",status="405"}',
    }


def test_a_stream_is_not_buffered(server: Server) -> None:
    """The middleware buffers nothing, and its cost per message is constant."""
    body = json.dumps({"prompt": "a", "max_tokens": 5, "ignore_eos": True, "stream": True}).encode()
    head = post_head("/v1/completions", f"Content-Length: {len(body)}", "Connection: close")
    with raw(server, head, body) as connection, connection.makefile("rb") as lines:
        received = lines.read()
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert received.count(b"\r\nx-request-id: ") == 1
    assert received.rstrip().endswith(b"data: [DONE]\n\n\r\n0")
