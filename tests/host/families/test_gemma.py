"""config.json of Gemma 1 to 3 in the spellings of published models, and what is refused by its name."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import BadModelConfig, CheckpointError, UnsupportedModel
from orca_jax.families.hf_config import hf_config_of, read_config
from orca_jax.families.model_config import ModelConfig

GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GEMMA2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA_2B: dict[str, Any] = {
    "architectures": ["GemmaForCausalLM"],
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}


def read(tmp_path: Path, config: dict[str, Any], **changes: Any) -> ModelConfig:
    values = {name: value for name, value in (config | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_config(tmp_path)


@pytest.mark.parametrize("config", [GEMMA_2B, GEMMA2_2B, GEMMA3_1B])
def test_a_written_config_reads_as_the_same_model(tmp_path: Path, config: dict[str, Any]) -> None:
    model = read(tmp_path, config)
    written = hf_config_of(model)
    assert written["model_type"] == config["model_type"]
    assert read(tmp_path, written) == model


def test_which_layers_of_gemma3_have_a_window(tmp_path: Path) -> None:
    model = read(tmp_path, GEMMA3_1B)
    windows = [attention.scores.window for attention in model.attentions]
    assert windows[:7] == [512] * 5 + [None, 512] and len(windows) == 26
    rotaries = [attention.rotary for attention in model.attentions]
    assert [rotary.base if rotary else None for rotary in rotaries[4:6]] == [1e4, 1e6]
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    assert read(tmp_path, GEMMA3_1B, sliding_window_pattern=..., layer_types=kinds) == model


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}])
def test_gemma3s_spellings_say_the_same(tmp_path: Path, scaling: dict[str, Any]) -> None:
    old = read(tmp_path, GEMMA3_1B, rope_scaling=scaling)
    nested = {
        "full_attention": {"rope_theta": 1e6, **scaling},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    new: dict[str, Any] = {"rope_theta": ..., "rope_scaling": ..., "rope_local_base_freq": ...}
    assert read(tmp_path, GEMMA3_1B, **new, rope_parameters=nested) == old
    local, full = (old.attentions[i].rotary for i in (0, 5))
    assert local is not None and local.scaling is None
    assert full is not None and (full.scaling is None) == (scaling["rope_type"] == "default")


def test_gemma2_has_caps_unless_the_file_says_null(tmp_path: Path) -> None:
    plain = read(tmp_path, GEMMA2_2B)
    absent = read(tmp_path, GEMMA2_2B, attn_logit_softcapping=..., final_logit_softcapping=...)
    assert absent == plain and plain.logit_soft_cap == 30.0
    without = read(tmp_path, GEMMA2_2B, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert without.logit_soft_cap is None and without.attention.scores.soft_cap is None


def test_gemmas_gelu_is_the_approximation(tmp_path: Path) -> None:
    model = read(tmp_path, GEMMA_2B)
    assert model.feed_forward.activation == "gelu_tanh"
    assert read(tmp_path, GEMMA_2B, hidden_activation="gelu_pytorch_tanh") == model


@pytest.mark.parametrize(
    ("config", "changes", "error", "words"),
    [
        (GEMMA_2B, {"hidden_activation": "relu"}, BadModelConfig, "hidden_activation is relu"),
        (GEMMA_2B, {"num_key_value_heads": ...}, BadModelConfig, "num_key_value_heads: expected"),
        (GEMMA_2B, {"use_bidirectional_attention": True}, UnsupportedModel, "use_bidirectional_attention"),
        (GEMMA2_2B, {"sliding_window": None}, BadModelConfig, "sliding_window is null"),
        (GEMMA2_2B, {"sliding_window_size": 8}, BadModelConfig, "sliding_window_size is 8"),
        (GEMMA2_2B, {"query_pre_attn_scalar": 0}, BadModelConfig, "query_pre_attn_scalar"),
        (GEMMA2_2B, {"attn_logit_softcapping": -1}, BadModelConfig, "attn_logit_softcapping is -1"),
        (GEMMA2_2B, {"layer_types": ["spiral"] * 26}, BadModelConfig, "layer_types"),
        (GEMMA3_1B, {"attn_logit_softcapping": 50.0}, UnsupportedModel, "attn_logit_softcapping"),
        (GEMMA3_1B, {"sliding_window_pattern": 0}, BadModelConfig, "sliding_window_pattern"),
        (
            GEMMA3_1B,
            {"rope_theta": ..., "rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            BadModelConfig,
            "rope_parameters.sliding_attention",
        ),
    ],
)
def test_unsupported_options_are_refused(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], error: type[CheckpointError], words: str
) -> None:
    with pytest.raises(error) as raised:
        read(tmp_path, config, **changes)
    assert words in str(raised.value), str(raised.value)
