"""ModernBERT's config.json in both spellings, and configs that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import BadModelConfig, CheckpointError, ConfigError, UnsupportedModel
from orca_jax.families.hf_config import hf_config_of, read_config
from orca_jax.families.model_config import ModelConfig, RankerHead

# As ModernBERT-base was published, with fewer layers.
OLDER: dict[str, Any] = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "classifier_activation": "gelu",
    "classifier_pooling": "mean",
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 5,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
    "vocab_size": 50368,
}


CLASSIFIER = "ModernBertForSequenceClassification"
RANKER: dict[str, Any] = {"architectures": [CLASSIFIER], "id2label": {"0": "LABEL_0"}}


def read(tmp_path: Path, **changes: Any) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(OLDER | changes))
    return read_config(tmp_path)


def test_the_published_config(tmp_path: Path) -> None:
    model = read(tmp_path)
    assert [each.scores.window for each in model.attentions] == [None, 65, 65, None, 65]
    bases = [each.rotary.base for each in model.attentions if each.rotary is not None]
    assert bases == [160000.0, 10000.0, 10000.0, 160000.0, 10000.0]
    assert [layer.residual for layer in model.layers] == ["bare", "pre", "pre", "pre", "pre"]
    assert model.is_bidirectional and model.positions is None and model.n_positions == 8193
    assert model.embedding.norm == model.final_norm and not model.attention.qkv_bias


def test_both_spellings_are_one_model(tmp_path: Path) -> None:
    model = read(tmp_path, global_rope_theta=500.0, local_rope_theta=50.0, local_attention=9)
    written = hf_config_of(model)
    assert written["model_type"] == "modernbert" and written["local_attention"] == 8
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert read_config(tmp_path) == model
    assert written["rope_parameters"]["sliding_attention"]["rope_theta"] == 50.0


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_classifier_of_one_label_ranks(tmp_path: Path, pooling: str, bias: bool) -> None:
    changes = {"classifier_pooling": pooling, "classifier_bias": bias, "classifier_activation": "silu"}
    model = read(tmp_path, **RANKER, **changes)
    head = model.ranker_head
    assert model.ranker and head.pooling == pooling and (head.activation, head.bias) == ("silu", bias)
    assert head.norm == model.final_norm and model.pooled_size == 1
    (tmp_path / "config.json").write_text(json.dumps(hf_config_of(model)))
    assert read_config(tmp_path) == model


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"architectures": ["ModernBertForTokenClassification"]},
            UnsupportedModel,
            "expected one of ModernBertModel, .*found .*ModernBertForTokenClassification",
        ),
        (
            {"architectures": [CLASSIFIER]},
            UnsupportedModel,
            "id2label has 2 labels; only a classifier of one label",
        ),
        (
            RANKER | {"classifier_pooling": "max"},
            UnsupportedModel,
            "classifier_pooling: expected one of cls, mean",
        ),
        (
            RANKER | {"classifier_activation": "xielu"},
            UnsupportedModel,
            "classifier_activation: expected one of .*found .xielu",
        ),
        ({"local_attention": -2}, BadModelConfig, "local_attention is 0"),
        ({"global_attn_every_n_layers": 0}, BadModelConfig, "global_attn_every_n_layers: expected at least"),
        ({"layer_types": ["full_attention"]}, BadModelConfig, "layer_types: expected 5 of"),
        ({"rope_parameters": {"rope_theta": 1.0}}, BadModelConfig, "rope_parameters|rope_theta"),
        ({"hidden_activation": "mish"}, UnsupportedModel, "hidden_activation: expected one of"),
        ({"odd_window": 3}, UnsupportedModel, "odd_window"),
    ],
)
def test_what_cannot_be(
    tmp_path: Path, changes: dict[str, Any], error: type[CheckpointError], words: str
) -> None:
    with pytest.raises(error, match=words):
        read(tmp_path, **changes)


def test_a_head_has_no_activation_with_weights() -> None:
    with pytest.raises(ConfigError, match="xielu, which has weights of its own, is not supported"):
        RankerHead(activation="xielu")
