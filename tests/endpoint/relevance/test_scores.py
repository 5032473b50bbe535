"""/v1/score and /v1/rerank: mean log-probabilities, over an engine with a known one for each token."""

import math
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from orca_jax.request.sampled import TokenLogprobs
from orca_jax.simulation import engine
from tests.endpoint.harness import Server, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A token's log-probability is (id - 200) / 100, which is different for each token."""

    def logprobs(token_id: int, n_top: int) -> TokenLogprobs:
        return TokenLogprobs(token_id, (token_id - 200) / 100, ())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "simulated_logprobs", logprobs)
        with serving() as server:
            yield server


def mean(text: str) -> float:
    return sum((byte - 200) / 100 for byte in text.encode()) / len(text)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_a_score_is_the_mean_over_the_second_text(client: httpx2.Client, path: str) -> None:
    seconds = ["x", "a longer one", "zz"]
    answer = client.post(path, json={"text_1": "first", "text_2": seconds}).json()
    assert (answer["object"], answer["model"]) == ("list", "test")
    assert [(one["index"], one["object"]) for one in answer["data"]] == [(i, "score") for i in range(3)]
    for one, text in zip(answer["data"], seconds, strict=True):
        assert one["score"] == pytest.approx(mean(text), abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == 15 + sum(map(len, seconds))


def test_pairs_and_a_template(client: httpx2.Client) -> None:
    body = {"text_1": ["one", "two"], "text_2": ["b", "cd"], "template": "<{text_1}> {text_2}"}
    answer = client.post("/v1/score", json=body).json()
    assert [one["score"] for one in answer["data"]] == pytest.approx([mean("b"), mean("cd")], abs=1e-6)
    assert answer["usage"]["total_tokens"] == len("<one> b") + len("<two> cd")
    (one,) = client.post("/v1/score", json={"text_1": "a", "text_2": "b"}).json()["data"]
    assert one["score"] == pytest.approx(mean("b"), abs=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_documents_are_ranked_by_the_query_after_them(
    client: httpx2.Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine for which text is likelier after a longer document."""
    plain = engine.returned

    def by_length(*arguments: Any) -> Any:
        result = plain(*arguments)
        rows = arguments[0]
        answers = {
            i: (token_ids, [one._replace(logprob=-1 / len(rows[i][0].prompt_ids)) for one in logprobs])
            for i, (token_ids, logprobs) in result.answers.items()
        }
        return result._replace(answers=answers)

    monkeypatch.setattr(engine, "returned", by_length)
    documents = ["aa", {"text": "aaaaaa"}, "aaaa"]
    body: dict[str, Any] = {"query": "q", "documents": documents}
    answer = client.post(path, json=body).json()
    assert [one["index"] for one in answer["results"]] == [1, 2, 0]
    assert [one["document"]["text"] for one in answer["results"]] == ["aaaaaa", "aaaa", "aa"]
    scores = [math.exp(-1 / (n + 1)) for n in (6, 4, 2)]  # and the line break
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx(scores)
    assert answer["usage"]["total_tokens"] == 12 + 3 * 2
    answer = client.post(path, json={**body, "top_n": 2, "return_documents": False}).json()
    assert [sorted(one) for one in answer["results"]] == [["index", "relevance_score"]] * 2


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (
            "score",
            {"text_1": ["a"] * 3, "text_2": ["b"] * 2},
            "text_1",
            "text_1 has 3 texts and text_2 has 2",
        ),
        ("score", {"text_1": [], "text_2": ["b"]}, "text_1", "text_1 has 0 texts"),
        ("score", {"text_1": "a", "text_2": []}, "text_2", "text_2 has 0 inputs"),
        ("score", {"text_1": "", "text_2": "b"}, "text_1", "text_1 has no tokens"),
        ("score", {"text_1": "a", "text_2": ["b", ""]}, "text_2", "pair 1: text_2 has no tokens"),
        ("score", {"text_1": "a" * 400, "text_2": "b" * 200}, "text_1", "the prompt has 599 tokens"),
        ("score", {"text_1": "a", "text_2": "b", "template": "{text_2}{text_1}"}, "template", "at its end"),
        ("score", {"text_1": "a", "text_2": "b", "template": "{text_1}{text_2}!"}, "template", "at its end"),
        (
            "score",
            {"text_1": "a", "text_2": "b", "instruction": "c"},
            "instruction",
            "only a model that ranks",
        ),
        (
            "rerank",
            {"query": "a", "documents": ["b"], "instruction": "c"},
            "instruction",
            "put it into template",
        ),
        ("score", {"text_1": "a", "text_2": "b", "softmax": True}, "softmax", "is not known here"),
        ("rerank", {"query": "a", "documents": []}, "documents", "documents has 0 inputs"),
        ("rerank", {"query": "", "documents": ["b"]}, "query", "query has no tokens"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "top_n"),
        ("rerank", {"query": "a", "documents": [{"body": "b"}]}, "documents.0", "at text Field required"),
    ],
)
def test_mistakes_are_named(
    client: httpx2.Client, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"] and error["param"] == param, error
