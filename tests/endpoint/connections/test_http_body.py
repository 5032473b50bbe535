"""HTTP request bodies: size limits, timeouts, malformed JSON, and error messages."""

import select
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import Server, serving
from tests.endpoint.http_client import JSON, connected, error_of, post_head, raw, received, status_line
from tests.host.engines import SOON

POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
LIMIT = 4096


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", max_body_bytes=LIMIT)
    with serving(options=options) as server:
        yield server


def test_a_body_as_large_as_allowed(client: httpx2.Client) -> None:
    body = b'{"prompt": "a"}'
    body += b" " * (LIMIT - len(body))
    assert client.post("/tokenize", content=body, headers=JSON).json()["tokens"] == [97]
    assert client.post("/tokenize", content=iter([body]), headers=JSON).json()["tokens"] == [97]


@pytest.mark.parametrize("path", [*POSTS, "/nowhere"])
def test_a_body_with_too_large_a_content_length_is_rejected_unread(server: Server, path: str) -> None:
    with raw(server, post_head(path, f"Content-Length: {LIMIT + 1}")) as connection:
        assert status_line(connection) == b"HTTP/1.1 413 Request Entity Too Large"


def test_a_body_that_grows_too_large_is_rejected_then(server: Server) -> None:
    chunk = b"800\r\n" + b" " * 2048 + b"\r\n"
    with raw(server, post_head("/tokenize", "Transfer-Encoding: chunked"), chunk, chunk) as connection:
        connection.sendall(b"1\r\n \r\n")  # and the body never ends
        assert status_line(connection) == b"HTTP/1.1 413 Request Entity Too Large"


def test_a_body_in_chunks_that_arrives_at_once_and_is_too_large_is_rejected(server: Server) -> None:
    chunk = b"1001\r\n" + b" " * (LIMIT + 1) + b"\r\n"
    whole = post_head("/tokenize", "Transfer-Encoding: chunked") + chunk + b"0\r\n\r\n"
    with raw(server, whole) as connection:
        assert status_line(connection) == b"HTTP/1.1 413 Request Entity Too Large"


def test_a_client_that_sends_megabytes_can_read_the_413(server: Server) -> None:
    """The connection stays usable for the next request."""
    with httpx2.Client(base_url=server.url, timeout=SOON, headers=JSON) as client:
        for i in range(6):
            content = iter([b" " * 1_000_000] * 8) if i % 2 else b" " * 8_000_000
            response = client.post("/tokenize", content=content)
            assert response.status_code == 413
            assert error_of(response)["code"] == "request_too_large"
            assert str(LIMIT) in error_of(response)["message"]
            assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("dripping", [False, True])
def test_a_body_that_arrives_too_slowly(framing: str, dripping: bool) -> None:
    """The timeout runs from the start; data that arrives does not restart it."""
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", body_timeout=0.4)
    part = b"1\r\n \r\n" if "chunked" in framing else b" "
    start = time.monotonic()
    with serving(options=options) as server, raw(server, post_head("/tokenize", framing), part) as connection:
        while not select.select([connection], [], [], 0.05)[0]:
            assert time.monotonic() - start < SOON / 2, "the server waits for ever"
            if dripping:
                connection.sendall(part)
        assert time.monotonic() - start > 0.39
        answer = received(connection)  # the connection ends without waiting for the rest
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"0.4 seconds; send it faster (orca serve --body-timeout)" in answer


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
def test_malformed_json_is_rejected(client: httpx2.Client, path: str, body: bytes) -> None:
    response = client.post(path, content=body, headers=JSON)
    assert response.status_code == 400
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert 10 < len(error["message"]) < 700


def test_many_digits_within_a_larger_limit() -> None:
    """Python itself rejects integers of more than 4,300 digits."""
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
            "application/x-www-form-urlencoded",  # as curl -d sends it
            "Content-Type is 'application/x-www-form-urlencoded'; "
            "send the header 'Content-Type: application/json'",
        ),
        ("text/plain", "Content-Type is 'text/plain'; send the header 'Content-Type: application/json'"),
        ("json", "Content-Type is 'json'; send the header 'Content-Type: application/json'"),
    ],
)
def test_a_content_type_that_is_not_json_is_rejected(
    client: httpx2.Client, path: str, header: str | None, message: str
) -> None:
    headers = {} if header is None else {"Content-Type": header}
    response = client.post(path, content=b'{"prompt": "a"}', headers=headers)
    assert (response.status_code, error_of(response)["message"]) == (415, message)


@pytest.mark.parametrize(
    "header", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"]
)
def test_content_types_that_are_json_are_accepted(client: httpx2.Client, header: str) -> None:
    response = client.post("/tokenize", content=b'{"prompt": "a"}', headers={"Content-Type": header})
    assert response.status_code == 200


def test_a_float_without_a_fraction_is_an_integer(client: httpx2.Client) -> None:
    response = client.post("/detokenize", content=b'{"tokens": [97.0, 9.8e1, 99]}', headers=JSON)
    assert response.json() == {"prompt": "abc"}


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
            "colour is not known here; leave it out (GET /openapi.json shows what there is)",
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
            "messages.1.content is missing; give a text, or a list of parts of type text",
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
def test_an_error_names_the_field_at_fault(
    client: httpx2.Client, path: str, body: Any, param: str | None, message: str
) -> None:
    response = client.post(path, json=body)
    expected = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    assert (response.status_code, error_of(response)) == (400, expected)


def test_long_values_are_quoted_in_part(client: httpx2.Client) -> None:
    for body in ({"tokens": "x" * 1500}, {"tokens": [], "y" * 1500: 1}, {"tokens": [], "model": "z" * 1500}):
        error = error_of(client.post("/detokenize", json=body))
        assert len(error["message"]) <= 620
        assert len(error["param"]) <= 620
