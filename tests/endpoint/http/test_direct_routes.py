"""Requests answered without FastAPI's routing: the answers are those that FastAPI gives."""

import re
from typing import Any

import httpx2
import pytest

from server.http import app
from server.http.generation import completions
from tests.endpoint.harness import serving
from tests.endpoint.http_client import JSON, connected
from tests.log_records import messages_of

ONE = {"max_tokens": 2, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "ab"}], **ONE}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"json": {"prompt": "ab", **ONE}}),
    ("/v1/completions", {"json": {"prompt": "ab", "stream": True, "max_tokens": 1}}),
    ("/v1/completions", {"json": {"prompt": "ab", "user": "someone", **ONE}}),
    ("/v1/completions", {"json": {"prompt": "ab", "model": "another", **ONE}}),
    ("/v1/completions", {"json": {"prompt": "ab", "max_tokens": -1}}),
    ("/v1/completions", {"json": {"prompt": "ab", "nonsense": 1}}),
    ("/v1/completions", {"json": {"prompt": "a" * 5000, **ONE}}),
    ("/v1/completions", {"content": b"", "headers": JSON}),
    ("/v1/completions", {"content": b'{"prompt": "a"', "headers": JSON}),
    ("/v1/completions", {"content": b"{}", "headers": {"Content-Type": "text/plain"}}),
    (
        "/v1/completions",
        {"content": b"{}", "headers": {"Content-Type": "application/json", "Origin": "http://a"}},
    ),
    ("/v1/completions?model=x", {"json": {"prompt": "ab", **ONE}}),
    ("/v1/completions/", {"json": {"prompt": "ab", **ONE}}),
    ("/v1/chat/completions", {"json": {**CHAT, "store": True}}),
    ("/v1/chat/completions", {"json": {**CHAT, "store": True}}),
    ("/v1/chat/completions", {"json": {"messages": []}}),
    ("/v1/embeddings", {"json": {"input": "ab"}}),
    ("/score", {"json": {"text_1": "a", "text_2": "b"}}),
    ("/rerank", {"json": {"query": "a"}}),
]


def shown(response: httpx2.Response) -> tuple[int, dict[str, str], str]:
    """A response without ids and times."""
    headers = {
        name: value for name, value in response.headers.items() if name not in ("date", "x-request-id")
    }
    text = re.sub(r"[0-9a-f]{32}", "ID", re.sub(r'"created": ?\d+', "", response.text))
    return response.status_code, headers, text


def answers(requests: list[tuple[str, dict[str, Any]]]) -> list[tuple[int, dict[str, str], str]]:
    with serving() as server, connected(server) as client:
        shown_answers = [shown(client.post(path, **what)) for path, what in requests]
        counted = re.findall(r'requests_total\{method="POST",path="([^"]*)"(.*)', client.get("/metrics").text)
    return [*shown_answers, (0, dict(counted), "requests counted")]


def test_answers_are_those_of_fastapi(monkeypatch: pytest.MonkeyPatch) -> None:
    direct = answers(REQUESTS)
    with monkeypatch.context() as without:
        without.setattr(app, "DirectRoutes", lambda whole, routers: whole)
        assert direct == answers(REQUESTS)
    assert any(headers.get("x-orca-ignored") == "store" for _, headers, _ in direct)
    assert [status for status, _, _ in direct[:4]] == [200, 200, 200, 404] and direct[-1][1][
        "/v1/completions"
    ]


def test_an_unexpected_error_is_answered_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(completions, "check_number", fail)
    ((status, _, text),) = answers(REQUESTS[:1])[:1]
    assert status == 500 and "the server failed in an unexpected way" in text
    assert any("Exception in ASGI application" in message for message in messages_of(caplog, "uvicorn"))


def test_the_routes_that_generate_are_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """No dependency is solved for them: FastAPI's way is broken here."""

    async def broken(*_: object) -> None:
        raise AssertionError("FastAPI answers")

    monkeypatch.setattr("fastapi.routing.solve_dependencies", broken)
    statuses = [
        answer[0]
        for answer in answers(
            [REQUESTS[0], ("/v1/chat/completions", {"json": CHAT}), ("/tokenize", {"json": {"prompt": "a"}})]
        )
    ]
    assert statuses[:3] == [200, 200, 500]
