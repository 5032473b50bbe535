"""Predicted outputs of chat, whose tokens are counted in the usage, and requests that want no drafts."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from orca_jax.config import SchedulingConfig
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import Server, serving
from tests.endpoint.http_client import connected, error_of
from tests.host.engines import CONFIG, writing

REPLY = "abcdefghij"
DRAFTING = replace(CONFIG, scheduling=SchedulingConfig(speculative="ngram"))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(writing(REPLY), config=DRAFTING) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx2.Client]:
    with connected(server) as client:
        yield client


def n_drafted(server: Server) -> int:
    assert server.service.speculation is not None
    return server.service.speculation.n_drafted


def ask(client: httpx2.Client, content: Any = None, **fields: Any) -> httpx2.Response:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 10, **fields}
    prediction = {} if content is None else {"prediction": {"type": "content", "content": content}}
    return client.post("/v1/chat/completions", json={**body, **prediction})


def test_the_usage_counts_the_prediction_s_tokens(client: httpx2.Client, server: Server) -> None:
    before = n_drafted(server)
    answer = ask(client, "abcd!!efghij", n=2).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [REPLY] * 2
    details = answer["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 20, "rejected_prediction_tokens": 4}
    assert n_drafted(server) > before
    streamed = ask(client, "abcxyz", stream=True, stream_options={"include_usage": True})
    assert '"accepted_prediction_tokens":3,"rejected_prediction_tokens":3' in streamed.text
    assert "x-orca-ignored" not in streamed.headers
    assert "completion_tokens_details" not in ask(client).json()["usage"]


def test_what_is_not_drafted_is_named(client: httpx2.Client, server: Server) -> None:
    before = n_drafted(server)
    answer = ask(client, REPLY, speculative="off")
    assert answer.json()["choices"][0]["message"]["content"] == REPLY
    assert "completion_tokens_details" not in answer.json()["usage"]
    assert answer.headers["x-orca-ignored"] == "prediction"
    for path, body in {
        "/v1/completions": {"prompt": "ijabc", "max_tokens": 9},
        "/v1/responses": {"input": "ijabc", "max_output_tokens": 9},
        "/v1/messages": {"messages": [{"role": "user", "content": "ijabc"}], "max_tokens": 9},
    }.items():
        assert client.post(path, json={**body, "speculative": "off"}).status_code == 200, path
    assert n_drafted(server) == before
    assert client.post("/v1/completions", json={"prompt": REPLY, "max_tokens": 9}).status_code == 200
    assert n_drafted(server) > before
    for value in ("on", True):
        error = error_of(ask(client, speculative=value))
        assert error["param"] == "speculative"
    for wrong in ({"type": "text", "content": "a"}, {"type": "content"}, "a"):
        assert error_of(ask(client, prediction=wrong))["param"].startswith("prediction")


def test_a_server_that_refuses_what_it_does_not_use() -> None:
    with (
        serving(
            writing(REPLY), options=EndpointOptions(port=0, grpc_port=0, access_log="off", strict=True)
        ) as server,
        connected(server) as client,
    ):
        error = error_of(ask(client, REPLY))
        assert (error["param"], "--strict" in error["message"]) == ("prediction", True)
        assert ask(client, speculative="off").status_code == 200
