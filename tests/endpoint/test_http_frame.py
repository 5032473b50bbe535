"""What every HTTP request passes: ids, log, limits, keys, errors; over loopback."""

import json
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from orca_jax.config import ServingConfig
from orca_jax.errors import InvalidRequest, QueueFull
from orca_jax.request import FinishReason, SamplingParams
from server import access_log
from server.api_keys import ApiKeys
from server.config import EndpointOptions
from server.http import body_limit, models
from server.http.errors import error_body, error_response
from tests.endpoint.harness import Server, serving, until
from tests.host.engines import SOON, GatedEngine

POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
LIMIT = 4096
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", max_body_bytes=LIMIT)
    with serving(options=options) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx2.Client]:
    with connected(server) as client:
        yield client


@contextmanager
def connected(server: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=SOON, headers={"Connection": "close"}) as client:
        yield client


@contextmanager
def raw(server: Server, *parts: bytes) -> Iterator[socket.socket]:
    """A connection over which `parts` have been sent."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port or 0), timeout=SOON) as connection:
        connection.sendall(b"".join(parts))
        yield connection


def status_line(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as lines:
        return lines.readline().rstrip()


def post_head(path: str, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: here", "Content-Type: application/json", *headers, "", ""]
    return "\r\n".join(lines).encode()


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """The error, after a look at its shape."""
    assert response.headers["content-type"] == "application/json"
    (name, error), *others = response.json().items()
    assert (name, others) == ("error", [])
    assert list(error) == ["message", "type", "param", "code"]
    return error


# Request ids


@pytest.mark.parametrize("given", ["a", "x" * 128, "!~-_:/?{}\"'"])
def test_a_request_id_comes_back(client: httpx2.Client, given: str) -> None:
    assert client.get("/version", headers={"X-Request-Id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "two words", "tab\there", "caf\xe9"])
def test_a_request_id_that_is_not_usable_is_replaced(client: httpx2.Client, given: str) -> None:
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


# The access log


class Lines(logging.Handler):
    """The access log's lines, instead of stderr."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    handler = Lines()
    access_log.configure_access_log("off")
    access_log.LOGGER.setLevel(logging.INFO)
    access_log.LOGGER.addHandler(handler)
    try:
        yield handler.lines
    finally:
        access_log.configure_access_log("off")


@pytest.fixture
def lines() -> Iterator[list[str]]:
    with logged() as lines:
        yield lines


@contextmanager
def logging_server(style: access_log.AccessLog, **options: Any) -> Iterator[Server]:
    endpoint = EndpointOptions(port=0, grpc_port=None, access_log=style)
    with serving(options=endpoint, **options) as server:
        yield server


def test_a_line_of_json(lines: list[str]) -> None:
    keys = ApiKeys(["secret-key"])
    body = {"prompt": "private words", "max_tokens": 3, "user": "someone"}
    with logging_server("json", keys=keys) as server, connected(server) as client:
        headers = {"Authorization": "Bearer secret-key", "X-Request-Id": "one"}
        response = client.post("/v1/completions?q=hidden", json=body, headers=headers)
        assert response.status_code == 200
        until(lambda: len(lines) == 1, "the line")
    record = json.loads(lines[0])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", record.pop("time"))
    assert 0 < record.pop("ms") < 1000 * SOON
    assert record.pop("bytes") == len(response.content)
    expected = {
        "request_id": "one",
        "protocol": "http",
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "n_input": len("private words"),
        "n_output": 3,
    }
    assert {name: record.get(name) for name in expected} == expected
    assert not re.search("private|secret|hidden", lines[0])


def test_a_line_of_text(lines: list[str]) -> None:
    with logging_server("text") as server, connected(server) as client:
        client.get("/version", headers={"X-Request-Id": 'say"hi"'})
        until(lambda: len(lines) == 1, "the line")
    pattern = (
        r'time=\S+ request_id="say\\"hi\\"" protocol=http client=127.0.0.1 method=GET path=/version '
        r"status=200 ms=[0-9.]+ bytes=19"
    )
    assert re.fullmatch(pattern, lines[0])


@pytest.mark.parametrize("style", ["text", "json"])
def test_no_line_can_be_forged(style: access_log.AccessLog, lines: list[str]) -> None:
    with logging_server(style) as server, connected(server) as client:
        client.get("/x%0d%0atime=0%20status=200%1b[2K%7f%e2%80%a8%c2%85end")
        client.get("/" + "y" * 2000)
        until(lambda: len(lines) == 2, "the lines")
    for line in lines:
        assert re.fullmatch("[ -~]+", line), "all but printable ASCII is escaped"
        assert len(line) < 800
    path = r"/x\r\ntime=0 status=200\u001b[2K\u007f\u2028\u0085end"
    assert (f'path="{path}"' if style == "text" else f'"path": "{path}"') in lines[0]


def test_probes_are_logged_only_when_they_fail(lines: list[str]) -> None:
    with logging_server("json", ready=False) as server, connected(server) as client:
        for path in ("/health", "/metrics", "/ready"):
            client.get(path)
        until(lambda: len(lines) == 1, "the line of /ready")
        server.call(lambda: server.gateway.open(server.model))
        client.get("/ready")
        client.get("/version")
        until(lambda: len(lines) == 2, "the line of /version")
    said = [json.loads(line) for line in lines]
    assert [(each["path"], each["status"]) for each in said] == [("/ready", 503), ("/version", 200)]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_left_is_logged_as_499(stream: bool, lines: list[str]) -> None:
    body = json.dumps({"prompt": "long", "max_tokens": 400, "ignore_eos": True, "stream": stream}).encode()
    with logging_server("json", seconds=0.01) as server:
        with raw(server, post_head("/v1/completions", f"Content-Length: {len(body)}"), body):
            until(lambda: server.gateway.n_live == 1, "the request")
        until(lambda: len(lines) == 1, "the line")
    record = json.loads(lines[0])
    assert record["status"] == 499
    assert record["n_output"] < 400


def test_off_is_off(lines: list[str]) -> None:
    with logging_server("off") as server, connected(server) as client:
        client.get("/version")
    assert lines == []


def test_configuring_twice_makes_no_second_line(capfd: pytest.CaptureFixture[str]) -> None:
    access_log.configure_access_log("text")
    access_log.configure_access_log("json")
    try:
        access_log.log_access("json", {"path": "/x", "none": None, "list": ["stop", None]})
    finally:
        access_log.configure_access_log("off")
    access_log.log_access("json", {"path": "/y"})
    (line,) = capfd.readouterr().err.splitlines()
    record = json.loads(line)
    assert list(record) == ["time", "path", "list"]
    assert record["list"] == ["stop", None]


# Bodies


def test_a_body_as_large_as_allowed(client: httpx2.Client) -> None:
    body = b'{"prompt": "a"}'
    body += b" " * (LIMIT - len(body))
    assert client.post("/tokenize", content=body, headers=JSON).json()["tokens"] == [97]
    assert client.post("/tokenize", content=iter([body]), headers=JSON).json()["tokens"] == [97]


@pytest.mark.parametrize("path", [*POSTS, "/nowhere"])
def test_a_body_that_says_it_is_too_large_is_refused_unread(server: Server, path: str) -> None:
    with raw(server, post_head(path, f"Content-Length: {LIMIT + 1}")) as connection:
        assert status_line(connection) == b"HTTP/1.1 413 Request Entity Too Large"


def test_a_body_that_becomes_too_large_is_refused_then(server: Server) -> None:
    chunk = b"800\r\n" + b" " * 2048 + b"\r\n"
    with raw(server, post_head("/tokenize", "Transfer-Encoding: chunked"), chunk, chunk) as connection:
        connection.sendall(b"1\r\n \r\n")  # and the end never comes
        assert status_line(connection) == b"HTTP/1.1 413 Request Entity Too Large"


def test_a_client_that_sends_megabytes_gets_to_see_the_413(client: httpx2.Client) -> None:
    for content in (b" " * 8_000_000, iter([b" " * 1_000_000] * 8)):
        response = client.post("/tokenize", content=content, headers=JSON)
        assert response.status_code == 413
        assert error_of(response)["code"] == "request_too_large"
        assert str(LIMIT) in error_of(response)["message"]


def test_a_body_that_comes_too_slowly(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limit, "BODY_SECONDS", 0.1)
    head = post_head("/tokenize", "Content-Length: 100")
    with raw(server, head, b"{") as connection, connection.makefile("rb") as lines:
        received = lines.read()  # it ends: nobody waits for the rest
    assert received.startswith(b"HTTP/1.1 408 Request Timeout\r\n")


NOT_JSON = {
    "no body": b"",
    "half": b'{"prompt": "a"',
    "not UTF-8": b'{"prompt": "\xff"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
    "half a surrogate pair in a name": b'{"\\udfff": 1}',
    "raw surrogate": b'{"prompt": "\xed\xa0\x80"}',
    "NaN": b'{"prompt": NaN}',
    "infinity": b'{"temperature": -Infinity}',
    "too large a number": b'{"temperature": 1e400}',
    "a name twice": b'{"prompt": "a", "prompt": "b"}',
    "a name twice, deeper": b'{"messages": [{"role": "user", "role": "user"}]}',
    "nested": b"[" * 2000,
    "nested and closed": b"[" * 1000 + b"]" * 1000,
    "nested objects": b'{"a":' * 400 + b"1" + b"}" * 400,
    "a list": b"[]",
    "null": b"null",
    "a number": b"1",
    "many digits": b"1" * 2000,
    "a name that is not known": b'{"nonsense": 1}',
    "a name with all kinds of characters": b'{"\\u0000\\n\\u2028\xf0\x9f\x98\x80": 1}',
}


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON)
def test_what_is_not_json_is_refused(client: httpx2.Client, path: str, body: bytes) -> None:
    response = client.post(path, content=body, headers=JSON)
    assert response.status_code == 400
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert 10 < len(error["message"]) < 700


def test_many_digits_within_a_larger_limit() -> None:
    """Python itself refuses whole numbers of more than 4,300 digits."""
    with serving() as server, connected(server) as client:
        for number in (b"1" * 100_000, b"-" + b"9" * 4300, b"1." + b"0" * 100_000):
            response = client.post("/tokenize", content=b'{"prompt": ' + number + b"}", headers=JSON)
            assert response.status_code == 400
            error_of(response)


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "header, message",
    [
        (None, "the request has no Content-Type; send the header 'Content-Type: application/json'"),
        (
            "application/x-www-form-urlencoded",  # as curl -d has it
            "Content-Type is 'application/x-www-form-urlencoded'; "
            "send the header 'Content-Type: application/json'",
        ),
        ("text/plain", "Content-Type is 'text/plain'; send the header 'Content-Type: application/json'"),
        ("json", "Content-Type is 'json'; send the header 'Content-Type: application/json'"),
    ],
)
def test_another_content_type(client: httpx2.Client, path: str, header: str | None, message: str) -> None:
    headers = {} if header is None else {"Content-Type": header}
    response = client.post(path, content=b'{"prompt": "a"}', headers=headers)
    assert (response.status_code, error_of(response)["message"]) == (415, message)


@pytest.mark.parametrize(
    "header", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"]
)
def test_json_by_other_spellings(client: httpx2.Client, header: str) -> None:
    response = client.post("/tokenize", content=b'{"prompt": "a"}', headers={"Content-Type": header})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "path, body, param, message",
    [
        ("/tokenize", {"prompt": 5}, "prompt", "prompt is 5; it should be a valid string"),
        ("/tokenize", {"prompt": None}, "prompt", "prompt is null; it should be a valid string"),
        ("/tokenize", {"prompt": {"a": 1}}, "prompt", "prompt is an object; it should be a valid string"),
        ("/tokenize", [], None, "the body is a list of 0; it should be a JSON object"),
        (
            "/tokenize",
            {"prompt": "a", "colour": 1},
            "colour",
            "colour is not known here; leave it out (GET /docs shows what there is)",
        ),
        ("/detokenize", {}, "tokens", "tokens is missing"),
        (
            "/detokenize",
            {"tokens": [1, True]},
            "tokens.1",
            "tokens.1 is true; it should be a valid integer",
        ),
        ("/detokenize", {"tokens": [1.5]}, "tokens.0", "tokens.0 is 1.5; it should be a valid integer"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}, {"role": "user"}]},
            "messages.1.content",
            "messages.1.content is missing",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "nobody", "content": "a"}]},
            "messages.0.role",
            "messages.0.role is 'nobody'; it should be 'system', 'developer', 'user', 'assistant', 'tool' "
            "or 'function'",
        ),
    ],
)
def test_the_field_at_fault(
    client: httpx2.Client, path: str, body: Any, param: str | None, message: str
) -> None:
    response = client.post(path, json=body)
    expected = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    assert (response.status_code, error_of(response)) == (400, expected)


def test_what_came_is_quoted_in_part_only(client: httpx2.Client) -> None:
    for body in ({"tokens": "x" * 1500}, {"tokens": [], "y" * 1500: 1}, {"tokens": [], "model": "z" * 1500}):
        error = error_of(client.post("/detokenize", json=body))
        assert len(error["message"]) <= 620
        assert len(error["param"]) <= 620


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
def test_each_key_opens(keyed: Server, key: str) -> None:
    with connected(keyed) as client:
        headers = {"Authorization": f"Bearer {key}"}
        assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.post("/tokenize", json={"prompt": "a"}, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/docs", "/openapi.json"])
def test_what_needs_no_key(keyed: Server, path: str) -> None:
    with connected(keyed) as client:
        assert client.get(path).status_code == 200


def test_a_key_is_asked_for_before_the_body(keyed: Server) -> None:
    with raw(keyed, post_head("/v1/completions", "Content-Length: 1000")) as connection:
        assert status_line(connection) == b"HTTP/1.1 401 Unauthorized"


# Errors


def test_the_unexpected_is_told_to_the_log_alone(
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


def test_paths_and_methods_that_are_not_there(client: httpx2.Client) -> None:
    response = client.post("/v2/nowhere?a=b")
    assert (response.status_code, error_of(response)["code"]) == (404, "unknown_url")
    assert "POST /v2/nowhere;" in response.text
    response = client.delete("/tokenize")
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "seconds, header", [(None, None), (0.0, "1"), (1.0, "1"), (1.01, "2"), (59.5, "60"), (1e9, "60")]
)
def test_retry_after_is_whole_seconds(seconds: float | None, header: str | None) -> None:
    response = error_response(QueueFull("full"), retry_after=seconds)
    assert (response.status_code, response.headers.get("retry-after")) == (429, header)


def test_any_message_can_be_sent() -> None:
    error = InvalidRequest("half a pair: \ud800", param="\udfff")
    assert error_body(error)["error"]["message"] == r"half a pair: \ud800"
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
        assert response.headers["retry-after"] == "1"  # nothing has ended yet, so there is no pace
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


def test_a_stream_passes_piece_by_piece(server: Server) -> None:
    """The layers hold nothing back, and what they add to a message costs nothing that grows."""
    body = json.dumps({"prompt": "a", "max_tokens": 5, "ignore_eos": True, "stream": True}).encode()
    head = post_head("/v1/completions", f"Content-Length: {len(body)}", "Connection: close")
    with raw(server, head, body) as connection, connection.makefile("rb") as lines:
        received = lines.read()
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert received.count(b"\r\nx-request-id: ") == 1
    assert received.rstrip().endswith(b"data: [DONE]\n\n\r\n0")
