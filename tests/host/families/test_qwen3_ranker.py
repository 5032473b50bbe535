"""Qwen3 rankers by their files: which say so, which tokens they compare, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca_jax.config import Sizes
from orca_jax.errors import BadModelConfig, ConfigError, UnsupportedModel
from orca_jax.families.config_json import config_from_json, config_to_json
from orca_jax.families.hf_config import POOLING_FILE, hf_config_of, model_of, read_config
from orca_jax.families.model_config import ModelConfig, RankerHead
from orca_jax.model_files.sentence_pooling import stored_pooling
from orca_jax.planning.sizes import serving_config

FIELDS: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"]}
YES_OR_NO = RankerHead(kind="tokens", n_results=2, token_ids=(4, 7))


def place(directory: Path, files: dict[str, Any] | None = None, **fields: Any) -> Path:
    every = {"config.json": FIELDS | fields} | (files or {})
    for name, values in every.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps(values))
    return directory


WORDS = {"tokenizer.json": {"model": {"vocab": {"a": 0, "no": 4, "yes": 7}}}}


@pytest.mark.parametrize(
    ("files", "fields"),
    [
        (WORDS, {"is_original_qwen3_reranker": True}),
        (WORDS, {"classifier_from_token": ["no", "yes"]}),
        (WORDS, {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True, **CLASSIFIER}),
        ({}, {"classifier_from_token": [4, 7]}),
        ({"1_LogitScore/config.json": {"true_token_id": 7, "false_token_id": 4}}, {}),
    ],
)
def test_the_published_form(tmp_path: Path, files: dict[str, Any], fields: dict[str, Any]) -> None:
    model = read_config(place(tmp_path, files, **fields))
    assert model.ranker and model.ranker_head == YES_OR_NO and model.pooled_size == 2
    assert not model.embedding.tied and model.only_pools and not model.is_bidirectional
    assert model_of(hf_config_of(model)) == model == through_json(model)


@pytest.mark.parametrize("n", [1, 2])
def test_a_converted_one(tmp_path: Path, n: int) -> None:
    fields: dict[str, Any] = {"id2label": {str(i): f"LABEL_{i}" for i in range(n)}, **CLASSIFIER}
    model = read_config(place(tmp_path, **fields))
    assert model.ranker and model.ranker_head == RankerHead(kind="linear", n_results=n)
    assert model.embedding.tied and model_of(hf_config_of(model)) == model == through_json(model)


def through_json(model: ModelConfig) -> ModelConfig:
    values = json.loads(json.dumps(config_to_json(model)))
    return config_from_json(values, lambda *said: AssertionError(said))


def test_plain_models_generate(tmp_path: Path) -> None:
    assert not read_config(place(tmp_path)).only_pools
    embeds = read_config(place(tmp_path, {"1_Pooling/config.json": {"pooling_mode_lasttoken": True}}))
    assert embeds.only_pools and embeds.embeds and embeds.embedding.tied and not embeds.ranker
    assert through_json(embeds) == embeds


@pytest.mark.parametrize(
    ("files", "fields", "error", "says"),
    [
        ({}, {"is_original_qwen3_reranker": True}, BadModelConfig, "needs a tokenizer.json next to it"),
        (WORDS, {"classifier_from_token": ["no", "ja"]}, BadModelConfig, "has no token .*ja"),
        (WORDS, {"classifier_from_token": ["yes"]}, BadModelConfig, "expected two tokens, as in"),
        (WORDS, {"classifier_from_token": [4, 4]}, BadModelConfig, "expected two tokens, as in"),
        ({}, {"classifier_from_token": [4, 40]}, BadModelConfig, "from 0 to 39"),
        ({}, {"id2label": {str(i): "a" for i in range(3)}, **CLASSIFIER}, UnsupportedModel, "has 3 labels"),
        ({"1_LogitScore/config.json": {"true_token_id": 7}}, {}, UnsupportedModel, "false_token_id and true"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, files: dict[str, Any], fields: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        read_config(place(tmp_path, files, **fields))


def test_nothing_is_drafted_for_them() -> None:
    model = model_of(FIELDS | {"classifier_from_token": [4, 7]})
    with pytest.raises(ConfigError, match="with a model that generates nothing"):
        serving_config(model, Sizes(speculative="ngram"), [])


@pytest.mark.parametrize(("named", "pooling"), [("lasttoken", "last"), ("mean", "mean"), ("cls", "cls")])
def test_newer_files_name_their_pooling(tmp_path: Path, named: str, pooling: str) -> None:
    assert stored_pooling(place(tmp_path, {POOLING_FILE: {"pooling_mode": named}})) == pooling


def test_another_named_pooling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="pooling_mode is max; it must be one of cls, mean, lasttoken"):
        stored_pooling(place(tmp_path, {POOLING_FILE: {"pooling_mode": "max"}}))
