"""/v1/embeddings with OpenAI's client, over an engine whose vectors are known."""

import base64
from typing import Any

import httpx2
import numpy as np
import pytest

from orca_jax.simulation.engine import SIMULATED_SIZE, simulated_vector
from tests.endpoint.harness import MODEL, Server, serving_model
from tests.endpoint.http_client import connected
from tests.endpoint.openai_client import client_of
from tests.host.engines import CONFIG, LETTERS, orca, simulated


def vector_of(text: str, dimensions: int = SIMULATED_SIZE) -> np.ndarray:
    vector = simulated_vector(list(text.encode()))[:dimensions]
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("encoding_format", [None, "float", "base64"])
def test_openai_s_client(server: Server, encoding_format: Any) -> None:
    texts = ["one", "two and more", "one"]
    more: dict[str, Any] = {} if encoding_format is None else {"encoding_format": encoding_format}
    with client_of(server) as client:
        answer = client.embeddings.create(model="test", input=texts, **more)
        assert (answer.object, answer.model) == ("list", "test")
        assert [one.index for one in answer.data] == [0, 1, 2]
        for one, text in zip(answer.data, texts, strict=True):
            ours: Any = one.embedding
            if isinstance(ours, str):
                ours = np.frombuffer(base64.b64decode(ours), "<f4")
            np.testing.assert_allclose(ours, vector_of(text), atol=1e-6)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, texts))
        (short,) = client.embeddings.create(model="test", input="one", dimensions=3).data
        np.testing.assert_allclose(short.embedding, vector_of("one", 3), atol=1e-6)
        ids = client.embeddings.create(model="test", input=[[*b"one"], [*b"two"]]).data
        np.testing.assert_allclose(ids[1].embedding, vector_of("two"), atol=1e-6)
        (one,) = client.embeddings.create(model="test", input=[*b"one"]).data
        np.testing.assert_allclose(one.embedding, vector_of("one"), atol=1e-6)


def test_the_server_s_pooling_and_what_a_request_says(client: httpx2.Client) -> None:
    body = {"input": "abc", "normalize": False}
    last, mean = simulated_vector([*b"abc"]), simulated_vector([*b"abc"]) / np.float32(3)
    for more, vector in (({}, last), ({"pooling": "mean"}, mean)):
        answer = client.post("/v1/embeddings", json=body | more).json()
        assert answer["data"][0]["embedding"] == vector.tolist()
    service = orca(simulated(), tokenizer=LETTERS, pooling="mean")
    with (
        service,
        serving_model(service, MODEL, CONFIG, tokenizer=LETTERS) as other,
        connected(other) as asking,
    ):
        for more, vector in (({}, mean), ({"pooling": "last"}, last)):
            answer = asking.post("/v1/embeddings", json=body | more).json()
            assert answer["data"][0]["embedding"] == vector.tolist()


def test_more_inputs_than_the_queue_takes(client: httpx2.Client) -> None:
    """300 inputs wait in the server: the queue takes 256 requests, and a response uses 128 places."""
    answer = client.post("/v1/embeddings", json={"input": [f"text {i}" for i in range(300)]})
    assert answer.status_code == 200
    data = answer.json()["data"]
    assert [one["index"] for one in data] == list(range(300))
    np.testing.assert_allclose(data[299]["embedding"], vector_of("text 299"), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": []}, "input", "input has 0 inputs; a request may have 1 to 2048"),
        ({"input": ["a"] * 2049}, "input", "input has 2049 inputs"),
        ({"input": ["a", ""]}, "input", "input 1: the prompt has no tokens"),
        ({"input": [[1], [300]]}, "input", "input 1: token id 300 is not in the vocabulary"),
        ({"input": "a" * 512}, "input", "the prompt has 512 tokens"),
        ({"input": "a" * 513}, "input", "input has 513 characters"),
        ({"input": "a", "dimensions": 9}, "dimensions", "dimensions is 9; it must be from 1 to 8"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions is 0"),
        (
            {"input": "a", "pooling": "max"},
            "pooling",
            "pooling is 'max'; it should be 'last', 'mean' or 'cls'",
        ),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "is not built yet"),
        ({"input": "a", "task": "query"}, "task", "task is not known here"),
        ({"input": "a", "priority": 1}, "priority", "priority is 1, but the engine's scheduling policy"),
        ({"input": "a", "model": "other"}, "model", "there is no model 'other'"),
        ({}, "input", "input is missing"),
    ],
)
def test_mistakes_are_named(client: httpx2.Client, body: dict[str, Any], param: str, message: str) -> None:
    answer = client.post("/v1/embeddings", json=body)
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert (error["param"], message in error["message"]) == (param, True), error


def test_an_answer_has_bounded_size(client: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.gateway.gateway._MOST_NUMBERS", 40)
    answer = client.post("/v1/embeddings", json={"input": ["a"] * 6})
    message = "input has 6 inputs, for 8 numbers each; send 5 at a time, or ask for fewer dimensions"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
    assert client.post("/v1/embeddings", json={"input": ["a"] * 5}).status_code == 200
    assert client.post("/v1/embeddings", json={"input": ["a"] * 6, "dimensions": 6}).status_code == 200
