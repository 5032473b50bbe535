"""Models like BERT: Hugging Face's vectors on the whole engine, default poolings, and what is refused."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError, InvalidRequest, NotSupported, PromptTooLong, UnsupportedModel
from orca_jax.model import reference
from orca_jax.request.pooling import POOLINGS, Pooling
from server.commands.loading import load_served
from server.commands.notes import Notes
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions, RouterOptions
from server.settings.serve_settings import ServeSettings
from tests.device.model.golden import DIRECTORY
from tests.device.model.golden_embeddings import (
    BEGIN,
    EMBEDDING_NAMES,
    RANKER_NAMES,
    SEPARATOR,
    load_embeddings,
    load_ranked,
)
from tests.endpoint.harness import serving_model
from tests.endpoint.http_client import connected

CLOSE = 1e-4
NAME = "bert-segments"
SIZES: dict[str, Any] = {"max_batch_size": 5, "max_batch_tokens": 96, "dtype": "float32"}


def assert_hugging_faces(llm: LLM, name: str, rows: list[int], pooling: Pooling) -> None:
    golden = load_embeddings(name)
    ours = llm.embed([golden.prompts[row] for row in rows], pooling=pooling, normalize=False)
    np.testing.assert_allclose(np.stack(ours), golden.vectors[pooling][rows], rtol=0, atol=CLOSE)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DIRECTORY / NAME, **SIZES) as one:
        yield one


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("bert-relu-masked", {}, marks=pytest.mark.matrix),
        ("roberta-padding", {}),
        pytest.param("xlm-roberta-one-head", {}, marks=pytest.mark.matrix),
        pytest.param(NAME, {}, marks=pytest.mark.matrix),
        pytest.param(NAME, {"tensor_parallel": 2, "pipeline_parallel": 2}, marks=pytest.mark.matrix),
        pytest.param(NAME, {"policy": "orca"}, marks=pytest.mark.matrix),
        pytest.param(NAME, {"deterministic": True}, marks=pytest.mark.matrix),
        ("modernbert-windows", {}),
        pytest.param("modernbert-biases-masked", {}, marks=pytest.mark.matrix),
        pytest.param("modernbert-one-head", {}, marks=pytest.mark.matrix),
        pytest.param(
            "modernbert-windows",
            {"tensor_parallel": 2, "pipeline_parallel": 2},
            marks=pytest.mark.matrix,
        ),
        pytest.param("modernbert-windows", {"deterministic": True}, marks=pytest.mark.matrix),
        pytest.param(NAME, {"quantization": "int8"}, marks=pytest.mark.matrix),
    ],
)
def test_vectors_are_hugging_faces(name: str, options: dict[str, Any]) -> None:
    golden = load_embeddings(name)
    every = [*range(len(golden.prompts))]
    with LLM(DIRECTORY / name, **SIZES, **options) as llm:
        if "quantization" not in options:
            for pooling in POOLINGS:
                assert_hugging_faces(llm, name, every, pooling)
            for alone in every[:3]:
                assert_hugging_faces(llm, name, [alone], "mean")
            return
        ours = np.stack(llm.embed(golden.prompts))
        exact = golden.vectors["cls"] / np.linalg.norm(golden.vectors["cls"], axis=1, keepdims=True)
        assert (ours * exact).sum(axis=1).min() > 0.999


@settings(max_examples=20)
@given(data=st.data())
def test_in_any_company(llm: LLM, data: st.DataObject) -> None:
    """Prompts of any lengths share iterations, in any order."""
    rows = data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=9))
    assert_hugging_faces(llm, NAME, rows, data.draw(st.sampled_from(POOLINGS)))


@pytest.mark.matrix(but=[NAME])
@pytest.mark.parametrize("name", EMBEDDING_NAMES)
def test_the_reference_agrees(name: str) -> None:
    """The reference's logits of the first and the last token are the products of Hugging Face's states."""
    golden, loaded = load_embeddings(name), load_checkpoint(DIRECTORY / name, dtype=jnp.float32)
    table = np.asarray(loaded.parameters["token_embedding"])
    for row in (0, 1, 5):
        logits = reference.forward(loaded.config, loaded.parameters, jnp.array(golden.prompts[row]))
        for place, pooling in ((0, "cls"), (-1, "last")):
            expected = table @ golden.vectors[pooling][row]
            np.testing.assert_allclose(logits[place], expected, rtol=1e-4, atol=1e-3)


def test_they_generate_nothing(llm: LLM) -> None:
    with pytest.raises(NotSupported, match=r"makes embeddings and generates nothing.*LLM\.embed"):
        llm.generate([[1, 2]], SamplingParams(max_tokens=1))
    with pytest.raises(NotSupported, match="makes embeddings and generates nothing"):
        llm.score([[1, 2]])
    with pytest.raises(PromptTooLong, match="the prompt may have at most 64"):
        llm.embed([[1] * 65])


def test_the_first_token_of_a_decoder_sees_no_other() -> None:
    with (
        LLM(DIRECTORY / "qwen2-tied", **SIZES) as llm,
        pytest.raises(InvalidRequest, match=r"pooling is 'cls', .* use last or mean"),
    ):
        llm.embed([[1, 2]], pooling="cls")


@pytest.mark.parametrize("option", ["chunked_prefill", "prefix_caching"])
def test_prompts_run_whole(option: str) -> None:
    options: dict[str, Any] = {option: True}
    with pytest.raises(ConfigError, match=f"{option} is True, and the tokens of this model see later ones"):
        LLM(DIRECTORY / NAME, **SIZES, **options)


def sentence_transformers(tmp_path: Path, **modes: bool) -> Path:
    place = tmp_path / "model"
    shutil.copytree(DIRECTORY / NAME, place)
    (place / "1_Pooling").mkdir()
    fields = {"word_embedding_dimension": 48, "include_prompt": True, **modes}
    (place / "1_Pooling" / "config.json").write_text(json.dumps(fields))
    return place


def test_the_checkpoint_names_its_pooling_and_special_tokens_are_added(tmp_path: Path) -> None:
    """As a checkpoint of Sentence Transformers: mean pooling, and a tokenizer that adds [CLS] and [SEP]."""
    place = sentence_transformers(tmp_path, pooling_mode_cls_token=False, pooling_mode_mean_tokens=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "to", "be", "or", "not", "##s"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.decoder = tokenizers.decoders.WordPiece()
    ends: Any = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    made.save(str(place / "tokenizer.json"))
    with LLM(place, **SIZES) as llm:
        (of_text,) = llm.embed("to bes or")
        (of_ids,) = llm.embed([[2, 4, 5, 8, 6, 3]], pooling="mean")
        (first,) = llm.embed([[2, 4, 5, 8, 6, 3]], pooling="cls")
    np.testing.assert_allclose(of_text, of_ids, atol=1e-6)
    assert np.abs(of_text - first).max() > 0.01


def test_vectors_that_would_differ_are_refused(tmp_path: Path) -> None:
    place = sentence_transformers(tmp_path, pooling_mode_cls_token=False, pooling_mode_max_tokens=True)
    with pytest.raises(UnsupportedModel, match="the pooling is max_tokens; it must be one of cls_token"):
        LLM(place, **SIZES)
    (place / "2_Dense").mkdir()
    with pytest.raises(UnsupportedModel, match="has 2_Dense, a layer after the pooling"):
        LLM(place, **SIZES)


def numpys(activation: str) -> Callable[[np.ndarray], np.ndarray]:
    erf = np.vectorize(math.erf)
    return {
        "tanh": np.tanh,
        "silu": lambda x: x / (1 + np.exp(-x)),
        "gelu": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    }[activation]


def test_an_option_is_taken_instead_of_the_checkpoints_pooling(tmp_path: Path) -> None:
    """Also instead of one that the engine does not have; a request's is taken before both."""
    place = sentence_transformers(tmp_path, pooling_mode_cls_token=False, pooling_mode_max_tokens=True)
    golden = load_embeddings(NAME)
    with LLM(place, pooling="mean", **SIZES) as llm:
        cases: list[tuple[Pooling | None, Pooling]] = [(None, "mean"), ("cls", "cls")]
        for asked, expected in cases:
            (ours,) = llm.embed([golden.prompts[2]], pooling=asked, normalize=False)
            np.testing.assert_allclose(ours, golden.vectors[expected][2], atol=CLOSE)
    (place / "2_Dense").mkdir()
    with pytest.raises(UnsupportedModel, match="has 2_Dense, a layer after the pooling"):
        LLM(place, pooling="mean", **SIZES)


@pytest.mark.parametrize(
    ("name", "pooling", "words"),
    [
        ("qwen2-tied", "cls", "in this model that token sees no other; use last or mean"),
        ("bert-ranker", "mean", "ranks texts by the state of the first token; use cls"),
        ("t5-gated", "mean", "embeddings are not supported for a model with an encoder"),
    ],
)
def test_a_pooling_that_a_model_cannot_have(name: str, pooling: Pooling, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(DIRECTORY / name, pooling=pooling, **SIZES)


def with_words(name: str, place: Path) -> Path:
    """A copy of a ranker with a tokenizer whose words are "w5", "w6", ... for the token ids."""
    shutil.copytree(DIRECTORY / name, place)
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": BEGIN, "[SEP]": SEPARATOR, "[MASK]": 4}
    words |= {f"w{i}": i for i in range(5, 131)}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.decoder = tokenizers.decoders.WordPiece()
    ends: Any = [("[CLS]", BEGIN), ("[SEP]", SEPARATOR)]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    made.save(str(place / "tokenizer.json"))
    return place


MEAN = "modernbert-ranker-mean"
# Room for several pairs in an iteration.
LONG: dict[str, Any] = SIZES | {"max_batch_tokens": 640}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in RANKER_NAMES),
        (MEAN, {"deterministic": True}),
        pytest.param(
            MEAN,
            {"tensor_parallel": 2, "pipeline_parallel": 2},
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_a_ranker_gives_hugging_faces_results(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Results on the engine, in the reference, and over HTTP, where pairs of texts become rankings."""
    golden, place = load_ranked(name), with_words(name, tmp_path / "model")
    prompts = [[BEGIN, *first, SEPARATOR, *second, SEPARATOR] for first, second in golden.pairs]
    texts = [tuple(" ".join(f"w{i}" for i in text) for text in pair) for pair in golden.pairs]
    relevance = 1 / (1 + np.exp(-golden.results.astype(np.float64)))
    with LLM(place, **LONG, **options) as llm:
        ours = llm.embed(prompts, normalize=False)
        np.testing.assert_allclose(np.stack(ours)[:, 0], golden.results, atol=CLOSE)
        service = llm.service
        with (
            serving_model(service, llm.config, llm.serving, tokenizer=llm.tokenizer) as server,
            connected(server) as client,
        ):
            body = {"text_1": [first for first, _ in texts], "text_2": [second for _, second in texts]}
            data = client.post("/v1/score", json=body).json()["data"]
            assert [one["score"] for one in data] == pytest.approx(relevance.tolist(), abs=CLOSE)
            query = texts[0][0]
            documents = [second for _, second in texts[:4]]
            ranked = client.post("/v1/rerank", json={"query": query, "documents": documents}).json()
            of_each = {one["index"]: one["relevance_score"] for one in ranked["results"]}
            assert of_each[0] == pytest.approx(relevance[0], abs=CLOSE)
            assert list(of_each.values()) == sorted(of_each.values(), reverse=True)
    config = llm.config
    loaded = load_checkpoint(place, dtype=jnp.float32)
    assert (config.embedding.separator == SEPARATOR) == (config.embedding.n_segments > 1)
    table = np.asarray(loaded.parameters["token_embedding"])
    parameters = {key: np.asarray(value) for key, value in loaded.parameters.items()}
    logits = np.asarray(reference.forward(config, loaded.parameters, jnp.array(prompts[0])))
    states = np.linalg.lstsq(table, logits.T, rcond=None)[0].T  # of which logits are products
    state = states.mean(axis=0) if config.ranker_head.mean else states[0]
    inner = parameters["ranker.dense.weight"] @ state + parameters.get("ranker.dense.bias", 0)
    inner = numpys(config.ranker_head.activation)(inner)
    if config.ranker_head.norm is not None:
        inner = (inner - inner.mean()) / np.sqrt(inner.var() + config.ranker_head.norm.eps)
        inner = inner * parameters["ranker.norm.scale"] + parameters.get("ranker.norm.bias", 0)
    result = parameters["ranker.out.weight"] @ inner + parameters["ranker.out.bias"]
    assert result[0] == pytest.approx(golden.results[0], abs=1e-3)


def test_a_server_warms_up_by_an_embedding() -> None:
    keys = ApiKeys.read(None, {})
    settings = ServeSettings(
        engine=EngineConfig(model=str(DIRECTORY / NAME), **SIZES),
        endpoint=EndpointOptions(),
        routing=RouterOptions(),
        api_keys=keys,
        admin_keys=keys,
    )
    llm, model = load_served(settings, Notes())
    with llm:
        assert not model.can_chat and llm.service.most_output(0) == 64
        assert llm.service.timeline.n_arrived == 1


def test_a_ranker_has_one_pooling(tmp_path: Path) -> None:
    """The state that the head was trained on; any other would give results of no meaning."""
    with LLM(DIRECTORY / MEAN, **LONG) as llm:
        assert (
            llm.embed([[5, 6]], normalize=False)[0] == llm.embed([[5, 6]], pooling="mean", normalize=False)[0]
        )
        with pytest.raises(
            InvalidRequest, match=r"'cls'; this model ranks texts by the mean of all .*use mean"
        ):
            llm.embed([[5, 6]], pooling="cls")


@pytest.mark.parametrize("name", ["bert-ranker", MEAN])
def test_a_classifier_of_several_labels_is_refused(name: str, tmp_path: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(DIRECTORY / name, place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"id2label": {"0": "a", "1": "b"}}))
    with pytest.raises(UnsupportedModel, match="id2label has 2 labels; only a classifier of one label"):
        LLM(place, **SIZES)
