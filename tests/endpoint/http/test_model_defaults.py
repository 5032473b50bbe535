"""Sampling parameters that the model recommends apply where a request leaves them out, on both endpoints."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from orca_jax.request.generation_defaults import GenerationDefaults
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from server.rpc import generation_pb2 as pb
from server.rpc.messages import sampling_params
from tests.endpoint.harness import END, serving
from tests.endpoint.http_client import connected

DEFAULTS = GenerationDefaults(
    source="generation_config.json",
    sampling={"temperature": 0.6, "top_p": 0.9, "top_k": 20},
    max_tokens=7,
)
PATHS = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}
CHAT = "/v1/chat/completions"


class Sampled:
    """Ends every output at once; records the parameters of the last request."""

    def __init__(self) -> None:
        self.last = SamplingParams()

    def __call__(self, request: Request, index: int) -> int:
        self.last = request.sampling
        return END


@pytest.fixture(scope="module")
def sampled() -> Sampled:
    return Sampled()


@pytest.fixture(scope="module")
def client(sampled: Sampled) -> Iterator[httpx2.Client]:
    with serving(sampled, ready=False) as server, connected(server) as client:
        server.call(lambda: server.gateway.open(replace(server.model, defaults=DEFAULTS)))
        yield client


@pytest.mark.parametrize("path", PATHS)
def test_defaults_apply_where_nothing_is_asked_for(
    client: httpx2.Client, sampled: Sampled, path: str
) -> None:
    assert client.post(path, json=PATHS[path]).status_code == 200
    assert (sampled.last.temperature, sampled.last.top_p, sampled.last.top_k) == (0.6, 0.9, 20)
    asked: dict[str, Any] = {"temperature": 0, "top_p": None, "top_k": 0}
    assert client.post(path, json={**PATHS[path], **asked}).status_code == 200
    assert (sampled.last.temperature, sampled.last.top_p, sampled.last.top_k) == (0, 0.9, 0)


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        ("/v1/completions", {}, 16),
        (CHAT, {}, 7),
        (CHAT, {"max_tokens": 9}, 9),
        (CHAT, {"max_completion_tokens": 3}, 3),
        (CHAT, {"min_tokens": 8, "ignore_eos": True}, 8),
    ],
)
def test_the_length_of_a_reply(
    client: httpx2.Client, sampled: Sampled, path: str, fields: dict[str, Any], expected: int
) -> None:
    assert client.post(path, json={**PATHS[path], **fields}).status_code == 200
    assert sampled.last.max_tokens == expected


def test_defaults_apply_over_grpc() -> None:
    assert sampling_params(pb.SamplingParams(), DEFAULTS.sampling) == SamplingParams(**DEFAULTS.sampling)
    asked = pb.SamplingParams(temperature=0.0, top_k=3)
    assert sampling_params(asked, DEFAULTS.sampling) == SamplingParams(temperature=0.0, top_p=0.9, top_k=3)
