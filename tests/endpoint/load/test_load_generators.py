"""Requests as common load generators write them, with every default spelled out, work unchanged."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.endpoint.harness import serving
from tests.endpoint.http_client import connected

COMPLETION: dict[str, Any] = {"model": "test", "prompt": "a", "max_tokens": 8, "stream": True}
CHAT: dict[str, Any] = {
    "model": "test",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    "max_completion_tokens": 8,
    "stream": True,
}
BODIES = {
    "vllm bench serve": {
        **COMPLETION,
        "repetition_penalty": 1.0,
        "logprobs": None,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
        "top_p": 1.0,
        "min_p": 0.0,
    },
    "vllm bench serve, chat": {**CHAT, "stream_options": {"include_usage": True}},
    "guidellm": {
        **COMPLETION,
        "max_completion_tokens": 8,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "stop": None,
        "ignore_eos": True,
    },
    "guidellm, chat": {
        **CHAT,
        "max_tokens": 8,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "stop": None,
        "ignore_eos": True,
    },
    "a client of OpenAI's defaults": {
        **COMPLETION,
        "best_of": 1,
        "echo": False,
        "frequency_penalty": 0,
        "logit_bias": None,
        "logprobs": None,
        "n": 1,
        "presence_penalty": 0,
        "seed": None,
        "stop": None,
        "stream_options": None,
        "suffix": None,
        "temperature": 1,
        "top_p": 1,
        "user": "me",
    },
}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx2.Client]:
    with serving() as server, connected(server) as http:
        yield http


@pytest.mark.parametrize("name", BODIES)
def test_requests_of_load_generators_work(http: httpx2.Client, name: str) -> None:
    body = BODIES[name]
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert '"finish_reason":"length"' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("n, best_of, status", [(3, 3, 200), (3, 1, 200), (3, 4, 400), (1, 2, 400)])
def test_best_of_may_equal_n(http: httpx2.Client, n: int, best_of: int, status: int) -> None:
    body = {"prompt": "a", "max_tokens": 1, "n": n, "best_of": best_of}
    assert http.post("/v1/completions", json=body).status_code == status
