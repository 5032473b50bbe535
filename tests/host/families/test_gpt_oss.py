"""config.json of gpt-oss, and its sinks as a weight."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import BadModelConfig, CheckpointError, UnsupportedModel
from orca_jax.families.attention_config import Scores
from orca_jax.families.hf_config import hf_config_of, read_config
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.mixtures.gpt_oss import YARN
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import parameter_table
from orca_jax.families.presets import PRESETS
from orca_jax.families.rotary import Scaling

CONFIG: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 96,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 11,
    "initial_context_length": 24,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 24,
        "truncate": False,
    },
    "swiglu_limit": 7.0,
}


def read(tmp_path: Path, **changes: Any) -> ModelConfig:
    values = {name: value for name, value in (CONFIG | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_config(tmp_path)


def test_the_fields_of_gpt_oss(tmp_path: Path) -> None:
    model = read(tmp_path)
    feed_forward, attention = model.feed_forward, model.attention
    assert feed_forward.experts == Experts(number=6, top_k=3, scores="softmax_of_chosen", router_bias=True)
    assert (feed_forward.gate_limit, feed_forward.bias, feed_forward.gated) == (7.0, True, True)
    assert attention.qkv_bias and attention.out_bias and attention.head_size == 10
    assert [each.scores for each in model.attentions] == [
        Scores(window=11, sinks=True),
        Scores(sinks=True),
        Scores(window=11, sinks=True),
    ]
    assert attention.rotary is not None and attention.rotary.base == 150_000
    assert attention.rotary.scaling == Scaling(kind="yarn", factor=4.0, original_positions=24, truncate=False)
    assert model.layers[0].norm.eps == 1e-5 and not model.embedding.tied


def test_transformers_defaults_of_missing_fields(tmp_path: Path) -> None:
    absent = dict.fromkeys(("rope_scaling", "rope_theta", "head_dim", "sliding_window", "swiglu_limit"), ...)
    model = read(tmp_path, **absent, num_experts_per_tok=..., experts_per_token=2)
    rotary = model.attention.rotary
    assert rotary is not None and (rotary.base, rotary.scaling) == (150_000, YARN)
    assert (model.head_size, model.attention.scores.window) == (64, 128)
    experts = model.layers[0].experts
    assert experts is not None and experts.top_k == 2
    assert model.feed_forward.gate_limit == 7.0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": {"rope_type": "default"}},
        {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
        {"sliding_window": None},
        {"attention_bias": False, "tie_word_embeddings": True, "swiglu_limit": 3.5},
    ],
)
def test_it_is_written_as_it_is_read(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = read(tmp_path, **changes)
    written = hf_config_of(model)
    assert written["model_type"] == "gpt_oss"
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert read_config(tmp_path) == model


def test_no_other_family_writes_sinks(tmp_path: Path) -> None:
    model = read(tmp_path)
    plain = replace(model.feed_forward, experts=None, gate_limit=None)
    dense = tuple(replace(layer, feed_forward=plain) for layer in model.layers)
    gpt2 = PRESETS["gpt2"]
    attention = replace(gpt2.attention, scores=Scores(sinks=True))
    with_sinks = tuple(replace(layer, attention=attention) for layer in gpt2.layers)
    for other in (replace(model, layers=dense), replace(gpt2, layers=with_sinks)):
        with pytest.raises(UnsupportedModel, match="has no Hugging Face layout"):
            hf_config_of(other)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"swiglu_alpha": 1.5}, UnsupportedModel, "swiglu_alpha is 1.5; only 1.702 is supported"),
        ({"swiglu_limit": 0}, BadModelConfig, "swiglu_limit is 0"),
        ({"experts_per_token": 4}, BadModelConfig, "disagrees with itself: num_experts_per_tok is 3"),
        ({"num_experts_per_tok": 7}, BadModelConfig, "num_experts_per_tok is 7"),
        ({"num_local_experts": ...}, BadModelConfig, "num_local_experts: expected a whole number"),
        ({"num_key_value_heads": ...}, BadModelConfig, "num_key_value_heads: expected a whole number"),
        (
            {"layer_types": ["chunked_attention"] * 3},
            BadModelConfig,
            "layer_types: expected 3 of full_attention",
        ),
        ({"sliding_window": 0}, BadModelConfig, "sliding_window is 0"),
        ({"sink_size": 4}, UnsupportedModel, "sink_size is 4: this field is not known"),
    ],
)
def test_unsupported_models_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[CheckpointError], words: str
) -> None:
    with pytest.raises(CheckpointError) as raised:
        read(tmp_path, **changes)
    assert type(raised.value) is error and words in str(raised.value), str(raised.value)


def test_devices_have_the_sinks_of_their_heads(tmp_path: Path) -> None:
    model = read(tmp_path)
    sinks = parameter_table(model)["layers.0.sinks"]
    assert (sinks.axes, sinks.shape, sinks.local_shape(2)) == (("G", "K"), (4, 2), (4, 1))
    repeated = parameter_table(model.for_devices(8))["layers.0.sinks"]
    assert (repeated.axes, repeated.shape, repeated.local_shape(8)) == (("K",), (8,), (1,))
