"""Qwen3's models for embeddings and rankings: Hugging Face's results on the whole engine and over HTTP."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.convert import convert_checkpoint
from orca_jax.errors import InvalidRequest, NotSupported
from orca_jax.request.tokenizer import Tokenizer
from server.http.relevance.similarity import QWEN3_TEMPLATE
from tests.device.model.golden import DIRECTORY
from tests.device.model.golden_embeddings import QWEN3_RANKER_NAMES, load_embeddings, load_qwen3_ranked
from tests.endpoint.harness import serving_model
from tests.endpoint.http_client import connected

CLOSE = 1e-4
EMBEDDING = "qwen3-embedding"
SIZES: dict[str, Any] = {"max_batch_size": 5, "max_batch_tokens": 96, "dtype": "float32"}


def with_words(name: str, place: Path, *, n_positions: int | None = None) -> Path:
    """A copy of a model with a tokenizer whose words are "w4", "w5", ... for the token ids."""
    shutil.copytree(DIRECTORY / name, place)
    words = {"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3} | {f"w{i}": i for i in range(4, 131)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.decoder = tokenizers.decoders.WordPiece()
    made.save(str(place / "tokenizer.json"))
    if n_positions is not None:
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(config | {"max_position_embeddings": n_positions}))
    return place


def words(token_ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in token_ids)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in QWEN3_RANKER_NAMES),
        pytest.param("qwen3-ranker-tokens", {"tensor_parallel": 2, "pipeline_parallel": 2}),
        pytest.param("qwen3-ranker-tied", {"tensor_parallel": 2}, marks=pytest.mark.matrix),
        pytest.param("qwen3-ranker-labels", {"pipeline_parallel": 2}, marks=pytest.mark.matrix),
        pytest.param("qwen3-ranker-tokens", {"policy": "orca"}, marks=pytest.mark.matrix),
    ],
)
def test_results_are_hugging_faces(name: str, options: dict[str, Any]) -> None:
    golden = load_qwen3_ranked(name)
    with LLM(DIRECTORY / name, **SIZES, **options) as llm:
        ours = llm.embed([[*first, *second] for first, second in golden.pairs], normalize=False)
    np.testing.assert_allclose(np.stack(ours), golden.results, atol=CLOSE)


@pytest.mark.parametrize("name", QWEN3_RANKER_NAMES)
def test_scores_and_rankings_over_http(name: str, tmp_path: Path) -> None:
    golden, place = load_qwen3_ranked(name), with_words(name, tmp_path / "model", n_positions=256)
    texts = [(words(first), words(second)) for first, second in golden.pairs]
    with (
        LLM(place, **SIZES) as llm,
        serving_model(llm.service, llm.config, llm.serving, tokenizer=llm.tokenizer) as server,
        connected(server) as client,
    ):
        body: dict[str, Any] = {
            "text_1": [each for each, _ in texts],
            "text_2": [each for _, each in texts],
        }
        plain = {"template": "{text_1} {text_2}"}
        data = client.post("/v1/score", json=body | plain).json()["data"]
        assert [one["score"] for one in data] == pytest.approx(golden.scores.tolist(), abs=CLOSE)
        # The default is the published template, in either route.
        written = QWEN3_TEMPLATE.replace("{query}", "{text_1}").replace("{document}", "{text_2}")
        defaults = [one["score"] for one in client.post("/v1/score", json=body).json()["data"]]
        published = client.post("/v1/score", json=body | {"template": written}).json()["data"]
        assert defaults == pytest.approx([one["score"] for one in published], abs=1e-5)
        assert np.abs(np.array(defaults) - golden.scores).max() > 0.01
        query, documents = texts[0][0], [each for _, each in texts[:4]]
        asked: dict[str, Any] = {"query": query, "documents": documents}
        ranked = client.post("/v1/rerank", json=asked | {"template": "{query} {document}"}).json()
        of_each = {one["index"]: one["relevance_score"] for one in ranked["results"]}
        assert of_each[0] == pytest.approx(golden.scores[0], abs=CLOSE)
        assert list(of_each.values()) == sorted(of_each.values(), reverse=True)
        by_default = client.post("/v1/rerank", json=asked).json()["results"]
        assert {one["index"]: one["relevance_score"] for one in by_default}[0] == pytest.approx(
            defaults[0], abs=1e-5
        )
        # An instruction changes the result as it does in the template.
        task = {"instruction": "w9 w10 w11"}
        written = written.replace("{instruction}", task["instruction"])
        published = client.post("/v1/score", json=body | {"template": written}).json()["data"]
        expected = [one["score"] for one in published]
        assert np.abs(np.array(expected) - defaults).max() > 1e-3
        for fields in (task, {"chat_template_kwargs": task}):
            instructed = client.post("/v1/score", json=body | fields).json()["data"]
            assert [one["score"] for one in instructed] == pytest.approx(expected, abs=1e-5)
        ranked = client.post("/v1/rerank", json=asked | task).json()["results"]
        of_each = {one["index"]: one["relevance_score"] for one in ranked}
        assert of_each[0] == pytest.approx(expected[0], abs=1e-5)
        refused = client.post("/v1/rerank", json=asked | {"template": "{query}"})
        assert refused.status_code == 400 and "{document} once each" in refused.text
        refused = client.post("/v1/completions", json={"prompt": "w5"})
        assert refused.status_code == 400 and "ranks texts and generates nothing" in refused.text


def test_a_document_cannot_end_the_prompt() -> None:
    """The name of a special token is one token in the template, and text in a document: here a word."""
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 1}, unk_token="[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.decoder = tokenizers.decoders.WordPiece()
    library.add_special_tokens(["<|im_end|>"])
    with (
        LLM(DIRECTORY / "qwen3-ranker-tokens", **SIZES) as llm,
        serving_model(llm.service, llm.config, llm.serving, tokenizer=Tokenizer(library)) as server,
        connected(server) as client,
    ):
        asked = {"query": "a", "documents": ["b<|im_end|>c"], "template": "{query} {document}<|im_end|> d"}
        answer = client.post("/v1/rerank", json=asked).json()
        assert answer["usage"]["prompt_tokens"] == len(["a", "b<|im_end|>c", "<|im_end|>", "d"])


def test_a_ranker_pools_the_last_token_alone() -> None:
    with LLM(DIRECTORY / "qwen3-ranker-label", **SIZES) as llm:
        with pytest.raises(InvalidRequest, match=r"pooling is 'mean'; this model ranks texts .* use last"):
            llm.embed([[5, 6]], pooling="mean")
        with pytest.raises(NotSupported, match="ranks texts and generates nothing"):
            llm.generate([[5, 6]], SamplingParams(max_tokens=1))


def test_an_embedding_model_as_published(tmp_path: Path) -> None:
    """Normalised states of last tokens, by the checkpoint's files, without a head; scores are cosines."""
    golden, place = load_embeddings(EMBEDDING), with_words(EMBEDDING, tmp_path / "model")
    expected = golden.vectors["last"] / np.linalg.norm(golden.vectors["last"], axis=1, keepdims=True)
    with LLM(place, **SIZES) as llm:
        np.testing.assert_allclose(np.stack(llm.embed(golden.prompts)), expected, atol=CLOSE)
        with pytest.raises(NotSupported, match="generates nothing, as its folder 1_Pooling says; use"):
            llm.generate([[5, 6]], SamplingParams(max_tokens=1))
        with (
            serving_model(llm.service, llm.config, llm.serving, tokenizer=llm.tokenizer) as server,
            connected(server) as client,
        ):
            body = {"text_1": "w5 w6 w7", "text_2": ["w8 w9", "w5 w6"]}
            data = client.post("/v1/score", json=body).json()["data"]
            first, *others = llm.embed([[5, 6, 7], [8, 9], [5, 6]])
            cosines = [float(first @ other) for other in others]
            assert [one["score"] for one in data] == pytest.approx(cosines, abs=1e-5)
            refused = client.post("/v1/score", json=body | {"template": "{text_1}{text_2}"})
            assert refused.status_code == 400 and "compares two texts as they are" in refused.text


def test_a_head_beside_an_embedding_model_is_not_read(tmp_path: Path) -> None:
    golden, place = load_embeddings(EMBEDDING), tmp_path / "model"
    shutil.copytree(DIRECTORY / EMBEDDING, place)
    tensors = safetensors.numpy.load_file(place / "model.safetensors")
    table = next(value for name, value in tensors.items() if name.endswith("embed_tokens.weight"))
    whole = {f"model.{name}": value for name, value in tensors.items()} | {"lm_head.weight": table + 1}
    safetensors.numpy.save_file(whole, place / "model.safetensors")
    with LLM(place, **SIZES) as llm:
        (ours,) = llm.embed(golden.prompts[:1], normalize=False)
    np.testing.assert_allclose(ours, golden.vectors["last"][0], atol=CLOSE)


@pytest.mark.parametrize("name", [EMBEDDING, "qwen3-ranker-tokens"])
def test_a_converted_checkpoint_is_of_the_same_kind(name: str, tmp_path: Path) -> None:
    """The folders of Sentence Transformers are copied; without them the model would generate."""
    shutil.copytree(DIRECTORY / name, tmp_path / "first")
    if name != EMBEDDING:
        fields = json.loads((tmp_path / "first" / "config.json").read_text())
        false, true = fields.pop("classifier_from_token")
        del fields["is_original_qwen3_reranker"]
        (tmp_path / "first" / "config.json").write_text(json.dumps(fields))
        (tmp_path / "first" / "1_LogitScore").mkdir()
        ids = json.dumps({"false_token_id": false, "true_token_id": true})
        (tmp_path / "first" / "1_LogitScore" / "config.json").write_text(ids)
    convert_checkpoint(tmp_path / "first", tmp_path / "orbax")
    convert_checkpoint(tmp_path / "orbax", tmp_path / "back")
    results: list[np.ndarray] = []
    for place in ("first", "orbax", "back"):
        with LLM(tmp_path / place, **SIZES) as llm:
            assert llm.config.only_pools
            results.append(llm.embed([[5, 6, 7]], normalize=False)[0])
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])
