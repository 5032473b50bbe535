"""The access log: the contents of a line, what it never contains, and which requests are logged."""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from server.metrics import access_log
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import Server, serving, until
from tests.endpoint.http_client import connected, post_head, raw
from tests.endpoint.log_lines import Lines
from tests.host.engines import SOON


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
def logging_server(
    style: access_log.AccessLog, *, log_probes: bool = False, **options: Any
) -> Iterator[Server]:
    endpoint = EndpointOptions(port=0, grpc_port=None, access_log=style, log_probes=log_probes)
    with serving(options=endpoint, **options) as server:
        yield server


def test_a_json_line(lines: list[str]) -> None:
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


def test_a_text_line(lines: list[str]) -> None:
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
    records = [json.loads(line) for line in lines]
    assert [(each["path"], each["status"]) for each in records] == [("/ready", 503), ("/version", 200)]


def test_pages_and_their_files_are_logged_only_when_they_fail(lines: list[str]) -> None:
    with logging_server("json") as server, connected(server) as client:
        for path in ("/", "/live", "/docs", "/static/live.html"):
            assert client.get(path).status_code == 200
        assert client.get("/static/nothing").status_code == 404
        until(lambda: len(lines) == 1, "the line of the file that is not there")
    assert json.loads(lines[0])["path"] == "/static/nothing"


def test_log_probes_logs_probes_and_pages(lines: list[str]) -> None:
    paths = ["/health", "/ready", "/metrics", "/live", "/static/live.html"]
    with logging_server("json", log_probes=True) as server, connected(server) as client:
        for path in paths:
            assert client.get(path).status_code == 200
        until(lambda: len(lines) == len(paths), "the lines")
    assert [json.loads(line)["path"] for line in lines] == paths


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


def test_off_writes_no_lines(lines: list[str]) -> None:
    with logging_server("off") as server, connected(server) as client:
        client.get("/version")
    assert lines == []


def test_configuring_twice_does_not_duplicate_lines(capfd: pytest.CaptureFixture[str]) -> None:
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
