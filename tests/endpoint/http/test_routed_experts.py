"""`return_routed_experts` over HTTP: each choice's experts as base64, from a simulated engine."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest

from server.gateway import served_model
from tests.endpoint.harness import Server, serving
from tests.endpoint.http_client import connected
from tests.endpoint.routed_model import SPARSE
from tests.host.engines import writing

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASK: dict[str, Any] = {"max_tokens": 5, "return_routed_experts": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(writing("ABCDEFGH"), model=SPARSE) as server:
        yield server


def body(path: str, **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "four"}
    return {**asked, **ASK, **fields}


def assert_places(experts: dict[str, Any], n_tokens: int) -> None:
    """The simulated engine gives each token's place in the request as its experts."""
    assert (experts["dtype"], experts["shape"]) == ("uint8", [n_tokens, 1, 1])
    assert np.frombuffer(base64.b64decode(experts["data"]), "uint8").tolist() == list(range(n_tokens))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_choice_has_the_experts_of_all_its_tokens_but_the_last(
    client: httpx2.Client, path: str
) -> None:
    answer = client.post(path, json=body(path, n=3)).json()
    assert len(answer["choices"]) == 3
    for choice in answer["choices"]:
        assert_places(choice["routed_experts"], answer["usage"]["prompt_tokens"] + 5 - 1)
    plain = client.post(path, json=body(path, return_routed_experts=False)).json()
    assert "routed_experts" not in plain["choices"][0]


def test_experts_and_log_probabilities_together(client: httpx2.Client) -> None:
    (choice,) = client.post(COMPLETIONS, json=body(COMPLETIONS, logprobs=1)).json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == 5
    assert_places(choice["routed_experts"], 8)
    (chat,) = client.post(CHAT, json=body(CHAT)).json()["choices"]
    assert chat["logprobs"] is None


def test_a_prompt_alone_has_the_experts_of_all_its_tokens(client: httpx2.Client) -> None:
    asked = body(COMPLETIONS, max_tokens=0, echo=True)
    (choice,) = client.post(COMPLETIONS, json=asked).json()["choices"]
    assert choice["text"] == "four"
    assert_places(choice["routed_experts"], 4)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_in_a_stream_a_choice_s_last_chunk_has_the_experts(client: httpx2.Client, path: str) -> None:
    lines = client.post(path, json=body(path, n=2, stream=True)).text.split("\n\n")
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    ends = [choice for choice in choices if choice["finish_reason"] is not None]
    assert sorted(choice["index"] for choice in ends) == [0, 1]
    n_prompt = client.post(path, json=body(path)).json()["usage"]["prompt_tokens"]
    for choice in choices:
        if choice in ends:
            assert_places(choice["routed_experts"], n_prompt + 4)
        else:
            assert "routed_experts" not in choice


def test_experts_of_too_many_tokens_are_refused(
    client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_model, "MOST_ROUTED_BYTES", 3 * 8)  # a token takes one byte
    assert client.post(COMPLETIONS, json=body(COMPLETIONS, n=3)).status_code == 200
    for asked in (body(COMPLETIONS, n=4), body(COMPLETIONS, prompt=["four"] * 2, n=2), body(CHAT, n=9)):
        refused = client.post(CHAT if "messages" in asked else COMPLETIONS, json=asked)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "return_routed_experts"
        assert "an answer may have those of 24 tokens" in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_model_without_experts_refuses_by_name(path: str) -> None:
    with serving() as dense, connected(dense) as client:
        refused = client.post(path, json=body(path))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("return_routed_experts", "not_supported")
    assert "it has no experts" in error["message"]


def test_a_beam_search_has_none(client: httpx2.Client) -> None:
    refused = client.post(COMPLETIONS, json=body(COMPLETIONS, use_beam_search=True, best_of=2))
    assert refused.status_code == 400
    assert "return_routed_experts" in refused.json()["error"]["message"]
