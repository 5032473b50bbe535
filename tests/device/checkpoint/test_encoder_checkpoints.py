"""Checkpoints of models with an encoder: converted and back, wrong in one thing, and in other spellings."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from orca_jax.checkpoint.convert import convert_checkpoint
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.errors import BadModelConfig, CheckpointError, TensorMismatch, UnsupportedModel
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.config_json import config_to_json
from orca_jax.families.hf_config import hf_config_of, read_config, read_hf_config
from orca_jax.families.registry import FAMILIES
from tests.device.checkpoint.tiny_checkpoint import Tensors, write_checkpoint, write_json
from tests.device.model.golden import DIRECTORY
from tests.device.model.golden_encoders import NAMES, quick_and_long

COPIES = re.compile(r"(model\.)?(encoder|decoder)\.embed_tokens\.weight")
COMPUTED = re.compile(r".*embed_positions\.weight|final_logits_bias")
QUICK = ("t5-gelu-copies", "t5-gated-silu-no-head", "bart-bare")
BIAS = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def _config_of(name: str) -> dict[str, Any]:
    config = json.loads((DIRECTORY / name / "config.json").read_text())
    others = DIRECTORY / name / "generation_config.json"
    return config | (json.loads(others.read_text()) if others.exists() else {})


@cache
def _tensors_of(name: str) -> Tensors:
    return load_file(DIRECTORY / name / "model.safetensors")


def one_of_each_family() -> dict[str, str]:
    return {_config_of(name)["model_type"]: name for name in NAMES}


@pytest.mark.parametrize("name", quick_and_long(NAMES, QUICK))
def test_to_orbax_and_back(tmp_path: Path, name: str) -> None:
    convert_checkpoint(DIRECTORY / name, tmp_path / "orbax")
    convert_checkpoint(tmp_path / "orbax", tmp_path / "back")
    first = {key: value for key, value in _tensors_of(name).items() if not COPIES.fullmatch(key)}
    back = load_file(tmp_path / "back" / "model.safetensors")
    if "bare" in name:
        first = {f"model.{key}": value for key, value in first.items()}
    for key, value in first.items():
        np.testing.assert_array_equal(back.pop(key), value, key)
    config = read_config(DIRECTORY / name)
    if "lm_head.weight" in back:  # written where T5's family may have one of its own
        np.testing.assert_array_equal(back.pop("lm_head.weight"), first["shared.weight"])
        assert not config.embedding.tied
    assert not [key for key in back if not COMPUTED.fullmatch(key)]
    assert read_config(tmp_path / "back") == config


@pytest.mark.parametrize("name", NAMES)
def test_a_written_config_reads_as_the_same_model(tmp_path: Path, name: str) -> None:
    model = read_config(DIRECTORY / name)
    family = FAMILIES[_config_of(name)["model_type"]]
    written = family.write(model)
    assert written is not None
    fields = ConfigFields(Path("config.json"), json.loads(json.dumps(written)))
    assert family.read(fields) == model
    fields.leave_others(family.unread)
    assert not fields.unread
    write_json(tmp_path / "config.json", hf_config_of(model))
    assert read_config(tmp_path) == model


@pytest.mark.parametrize("name", ["umt5-untied", "bart-gelu", "t5-relu"])
def test_orbax_with_an_orca_json_becomes_the_same_tensors(tmp_path: Path, name: str) -> None:
    """A checkpoint that never was Hugging Face's gets the names that follow from its model."""
    convert_checkpoint(DIRECTORY / name, tmp_path / "orbax")
    (tmp_path / "orbax" / "config.json").unlink()
    model = read_config(DIRECTORY / name)
    write_json(tmp_path / "orbax" / "orca.json", {"model": config_to_json(model)})
    convert_checkpoint(tmp_path / "orbax", tmp_path / "back")
    first, back = _tensors_of(name), load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == first.keys()
    assert all(np.array_equal(back[key], first[key]) for key in back)
    assert read_config(tmp_path / "back") == model
    assert _config_of(name)["model_type"] == hf_config_of(model)["model_type"]


def test_t5_has_one_table_for_all_layers_and_umt5_one_for_each() -> None:
    t5 = load_checkpoint(DIRECTORY / "t5-relu", dtype=np.float32).parameters
    np.testing.assert_array_equal(t5["layers.0.relative_bias"], t5["layers.1.relative_bias"])
    np.testing.assert_array_equal(t5["layers.0.relative_bias"], _tensors_of("t5-relu")[BIAS])
    umt5 = load_checkpoint(DIRECTORY / "umt5-untied", dtype=np.float32).parameters
    np.testing.assert_array_equal(umt5["layers.0.relative_bias"], _tensors_of("umt5-untied")[BIAS])
    second = BIAS.replace("block.0", "block.1")
    np.testing.assert_array_equal(umt5["layers.1.relative_bias"], _tensors_of("umt5-untied")[second])


@pytest.mark.parametrize("model_type", one_of_each_family())
def test_missing_misshaped_and_extra_tensors(tmp_path: Path, model_type: str) -> None:
    name = one_of_each_family()[model_type]
    tensors = {key: value for key, value in _tensors_of(name).items() if not COPIES.fullmatch(key)}
    kinds = {re.sub(r"\b\d+\b", "{i}", key): key for key in tensors}
    cases: list[tuple[Tensors, str]] = [(tensors | {"adapter.weight": np.zeros(3, "f4")}, "adapter.weight")]
    for key in kinds.values():
        values = tensors[key]
        if not COMPUTED.fullmatch(key) and key != "lm_head.weight":
            cases.append(({other: each for other, each in tensors.items() if other != key}, key))
        cases.append((tensors | {key: np.concatenate([values, values[:1]])}, key))
        cases.append((tensors | {key: values[None]}, key))
    for i, (wrong, meant) in enumerate(cases):
        directory = write_checkpoint(tmp_path / str(i), _config_of(name), wrong)
        with pytest.raises(TensorMismatch) as raised:
            load_checkpoint(directory, dtype=np.float32)
        assert f"'{meant}'" in str(raised.value), str(raised.value)


@pytest.mark.parametrize(
    ("name", "wrong", "error", "word"),
    [
        ("t5-relu", {"num_heads": 0}, BadModelConfig, "num_heads"),
        ("t5-relu", {"d_kv": None}, BadModelConfig, "d_kv"),
        ("t5-relu", {"num_layers": 2}, BadModelConfig, "2 encoder layers, but .* layer 2"),
        ("t5-relu", {"num_decoder_layers": 1}, BadModelConfig, "1 decoder layers, but .* layer 1"),
        (
            "t5-relu",
            {"feed_forward_proj": "gated-tanh"},
            UnsupportedModel,
            "expected one of relu, .*gated-silu",
        ),
        (
            "t5-relu",
            {"dense_act_fn": "gelu_new"},
            BadModelConfig,
            "feed_forward_proj is 'relu', dense_act_fn",
        ),
        (
            "t5-relu",
            {"relative_attention_num_buckets": 7},
            BadModelConfig,
            "relative_attention_num_buckets is 7",
        ),
        ("t5-relu", {"is_encoder_decoder": False}, UnsupportedModel, "a decoder alone is not supported"),
        ("t5-relu", {"odd_scale": True}, UnsupportedModel, "odd_scale"),
        ("t5-relu", {"architectures": ["T5EncoderModel"]}, UnsupportedModel, "T5EncoderModel"),
        ("t5-gated", {"architectures": ["T5Model"]}, UnsupportedModel, "T5Model.* has no head"),
        ("t5-gated", {"feed_forward_proj": "relu"}, TensorMismatch, "wi.weight' is missing"),
        ("t5-gated", {"tie_word_embeddings": True}, BadModelConfig, "tie_word_embeddings to true, but"),
        ("t5-relu", {"decoder_start_token_id": 103}, BadModelConfig, "special token id is 103"),
        ("bart-gelu", {"decoder_attention_heads": 4}, BadModelConfig, "cross|heads"),
        ("bart-gelu", {"encoder_attention_heads": 5}, BadModelConfig, "d_model 24 is not a multiple of"),
        ("bart-gelu", {"normalize_before": True}, UnsupportedModel, "normalize_before: expected false"),
        ("bart-gelu", {"static_position_embeddings": True}, UnsupportedModel, "static_position_embeddings"),
        (
            "mbart-scaled",
            {"add_final_layer_norm": False},
            UnsupportedModel,
            "add_final_layer_norm: expected true",
        ),
        ("bart-gelu", {"extra_pos_embeddings": 3}, UnsupportedModel, "extra_pos_embeddings: expected 2"),
        ("bart-gelu", {"forced_eos_token_id": [2, 3]}, UnsupportedModel, "only one id is supported"),
        ("bart-gelu", {"max_position_embeddings": 81}, TensorMismatch, "embed_positions"),
        (
            "bart-gelu",
            {"decoder_start_token_id": None, "bos_token_id": None},
            BadModelConfig,
            "decoder_start_token_id is None",
        ),
        ("pegasus-relu", {"encoder_layers": 1}, BadModelConfig, "1 encoder layers"),
    ],
)
def test_impossible_and_unknown_configs(
    tmp_path: Path, name: str, wrong: dict[str, Any], error: type[CheckpointError], word: str
) -> None:
    directory = write_checkpoint(tmp_path, _config_of(name) | wrong, _tensors_of(name))
    with pytest.raises(error, match=word):
        load_checkpoint(directory, dtype=np.float32)


def test_a_copy_of_the_embedding_must_be_one(tmp_path: Path) -> None:
    tensors = dict(_tensors_of("t5-gelu-copies"))
    copy = tensors["decoder.embed_tokens.weight"].copy()
    copy[3, 1] += 1e-3
    directory = write_checkpoint(
        tmp_path, _config_of("t5-gelu-copies"), tensors | {"decoder.embed_tokens.weight": copy}
    )
    with pytest.raises(TensorMismatch, match=r"'decoder.embed_tokens.weight' differs from 'shared.weight'"):
        load_checkpoint(directory, dtype=np.float32)


def test_the_embedding_by_the_name_of_the_encoders_copy(tmp_path: Path) -> None:
    tensors = dict(_tensors_of("bart-gelu"))
    tensors["model.encoder.embed_tokens.weight"] = tensors.pop("model.shared.weight")
    directory = write_checkpoint(tmp_path, _config_of("bart-gelu"), tensors)
    loaded = load_checkpoint(directory, dtype=np.float32)
    expected = tensors["model.encoder.embed_tokens.weight"]
    np.testing.assert_array_equal(loaded.parameters["token_embedding"], expected)


def test_a_table_that_early_checkpoints_have_is_left_out(tmp_path: Path) -> None:
    """transformers does not read the relative bias of cross attention, which the first T5s have."""
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors = _tensors_of("t5-relu") | {name: np.ones((32, 3), "f4")}
    directory = write_checkpoint(tmp_path, _config_of("t5-relu"), tensors)
    assert load_checkpoint(directory, dtype=np.float32).config == read_config(DIRECTORY / "t5-relu")


def test_generation_config_goes_before_config(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, _config_of("bart-gelu"), _tensors_of("bart-gelu"))
    before = read_config(directory)
    assert (before.decoder_start_token_id, before.forced_bos_token_id, before.forced_eos_token_id) == (
        2,
        0,
        2,
    )
    write_json(directory / "generation_config.json", {"decoder_start_token_id": 7, "forced_bos_token_id": 9})
    after = read_config(directory)
    assert (after.decoder_start_token_id, after.forced_bos_token_id, after.forced_eos_token_id) == (7, 9, 2)
    write_json(directory / "generation_config.json", {"decoder_start_token_id": "x"})
    with pytest.raises(BadModelConfig, match=r"generation_config.json: decoder_start_token_id"):
        read_config(directory)


def test_where_the_golden_models_state_it() -> None:
    starts = {name: read_hf_config(DIRECTORY / name).model.decoder_start_token_id for name in NAMES}
    assert starts["t5-few-buckets"] == 5 and starts["t5-relu"] == 0 and starts["mbart-forced"] == 2
    assert read_config(DIRECTORY / "mbart-forced").forced_bos_token_id == 7
