"""/v1/score and /v1/rerank of a model that only makes embeddings: cosines of a known engine's vectors."""

from collections.abc import Iterator
from dataclasses import replace

import httpx2
import numpy as np
import pytest

from orca_jax.config import SchedulingConfig
from orca_jax.simulation.engine import simulated_vector
from tests.endpoint.harness import CONFIG, MODEL, Server, serving
from tests.endpoint.http_client import connected

WHOLE = replace(CONFIG, scheduling=SchedulingConfig(chunked_prefill=False, prefix_caching=False))


@pytest.fixture(scope="module")
def asking() -> Iterator[tuple[Server, httpx2.Client]]:
    layers = tuple(layer.with_attention(causal=False) for layer in MODEL.layers)
    with serving(model=replace(MODEL, layers=layers), config=WHOLE) as server, connected(server) as client:
        yield server, client


def cosine(first: str, second: str) -> float:
    a, b = (simulated_vector([*text.encode()]).astype(np.float64) for text in (first, second))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_a_score_is_the_cosine(asking: tuple[Server, httpx2.Client]) -> None:
    _, client = asking
    seconds = ["one", "another", "one"]
    answer = client.post("/v1/score", json={"text_1": "a text", "text_2": seconds}).json()
    expected = [cosine("a text", text) for text in seconds]
    assert len({round(each, 4) for each in expected}) == 2
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == 3 * 6 + 3 + 7 + 3
    (same,) = client.post("/v1/score", json={"text_1": ["x"], "text_2": ["x"]}).json()["data"]
    assert same["score"] == pytest.approx(1, abs=1e-6)


def test_documents_are_ranked_by_it(asking: tuple[Server, httpx2.Client]) -> None:
    _, client = asking
    documents = ["rome", "paris is the capital", "a", "zz"]
    answer = client.post("/v1/rerank", json={"query": "capital?", "documents": documents, "top_n": 3}).json()
    expected = sorted(((cosine("capital?", text), text) for text in documents), reverse=True)[:3]
    assert [one["document"]["text"] for one in answer["results"]] == [text for _, text in expected]
    shown = [one["relevance_score"] for one in answer["results"]]
    assert shown == pytest.approx([score for score, _ in expected], abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("score", {"text_1": "a", "text_2": "b", "template": "{text_1}{text_2}"}, "template", "leave it out"),
        (
            "rerank",
            {"query": "a", "documents": ["b"], "template": "{document}{query}"},
            "template",
            "leave it",
        ),
        ("rerank", {"query": "a", "documents": []}, "documents", "documents has 0 inputs"),
        ("score", {"text_1": "a", "text_2": ["b", ""]}, "text_2", "the prompt has no tokens"),
        ("completions", {"prompt": "a"}, "prompt", "makes embeddings and generates nothing"),
    ],
)
def test_mistakes_are_named(
    asking: tuple[Server, httpx2.Client], path: str, body: dict[str, object], param: str, message: str
) -> None:
    answer = asking[1].post(f"/v1/{path}", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and message in error["message"], error
