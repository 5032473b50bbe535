"""config.json of Llama in old and new spellings, and what is refused by its name."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import BadModelConfig, CheckpointError, UnsupportedModel
from orca_jax.families.hf_config import hf_config_of, read_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.rotary import Scaling

PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "pretraining_tp": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SCALINGS: tuple[dict[str, Any], ...] = (
    {"type": "linear", "factor": 2.0},
    {"type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 16,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
        "truncate": False,
    },
    {
        "type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [1.5, 2, 3, 4],
        "original_max_position_embeddings": 24,
    },
    LLAMA3,
    {"rope_type": "default"},
)


def read(tmp_path: Path, **changes: Any) -> ModelConfig:
    values = {name: value for name, value in (PLAIN | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_config(tmp_path)


def test_the_shape_of_a_model(tmp_path: Path) -> None:
    model = read(tmp_path)
    own = model.attention
    assert (own.n_heads, own.n_kv_heads, own.group, own.head_size) == (6, 2, 3, 8)
    assert own.rotary is not None and (own.rotary.size, own.rotary.base) == (8, 500000.0)
    assert model.feed_forward.gated and model.positions is None and not model.embedding.tied
    assert model.eos_token_ids == (2, 3)
    assert read(tmp_path, head_dim=10).attention.width == 60
    assert read(tmp_path, num_key_value_heads=...).attention.group == 1


@pytest.mark.parametrize("scaling", SCALINGS)
def test_old_and_new_spellings_say_the_same(tmp_path: Path, scaling: dict[str, Any]) -> None:
    old = read(tmp_path, rope_scaling=scaling)
    kind = scaling.get("rope_type", scaling.get("type"))
    new = {**scaling, "rope_type": kind, "rope_theta": 500000.0}
    new.pop("type", None)
    assert read(tmp_path, rope_theta=..., rope_parameters=new) == old
    written = hf_config_of(old)
    assert written["model_type"] == "llama"
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert read_config(tmp_path) == old
    rotary = old.attention.rotary
    assert rotary is not None and (rotary.scaling is None) == (kind == "default")


def test_frequencies_that_llama3_scales(tmp_path: Path) -> None:
    rotary = read(tmp_path, rope_scaling=LLAMA3).attention.rotary
    assert rotary is not None and isinstance(rotary.scaling, Scaling)
    plain, scaled = read(tmp_path).attention.rotary, rotary.frequencies(96)
    assert plain is not None
    # Of 4 pairs the first turns more than 4 times in 32 positions, the others less than once.
    assert (plain.frequencies(96) / scaled).round(3).tolist() == [1.0, 8.0, 8.0, 8.0]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"rope_scaling": {"rope_type": "spiral"}}, UnsupportedModel, ["rope_scaling.rope_type", "spiral"]),
        ({"rope_scaling": {**LLAMA3, "ntk_alpha": 2}}, UnsupportedModel, ["rope_scaling.ntk_alpha"]),
        ({"rope_scaling": {"type": "linear"}}, BadModelConfig, ["rope_scaling.factor: expected a number"]),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, BadModelConfig, ["factor is -1"]),
        ({"rope_scaling": [1]}, BadModelConfig, ["rope_scaling: expected an object"]),
        (
            {"rope_scaling": {"type": "longrope", "long_factor": [2]}},
            BadModelConfig,
            ["one for each of the 4"],
        ),
        ({"rope_parameters": {"rope_theta": 1e4}}, BadModelConfig, ["disagrees with itself: rope_theta"]),
        ({"partial_rotary_factor": 0.5}, UnsupportedModel, ["partial_rotary_factor is 0.5"]),
        ({"use_alibi": True}, UnsupportedModel, ["use_alibi is True", "how positions are encoded"]),
        ({"sliding_window": 32}, UnsupportedModel, ["sliding_window is 32"]),
        ({"quantization_config": {"bits": 4}}, UnsupportedModel, ["quantization_config"]),
        ({"hidden_act": "mish"}, UnsupportedModel, ["hidden_act", "mish"]),
        (
            {"num_key_value_heads": 4},
            BadModelConfig,
            ["num_attention_heads 6 is not a multiple of num_key_value"],
        ),
        ({"num_attention_heads": 7}, BadModelConfig, ["hidden_size 48 is not a multiple", "head_dim"]),
        ({"head_dim": 7}, BadModelConfig, ["rotary_size is 7"]),
        ({"vocab_size": ...}, BadModelConfig, ["vocab_size: expected a whole number"]),
    ],
)
def test_unsupported_options_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[CheckpointError], words: list[str]
) -> None:
    with pytest.raises(error) as raised:
        read(tmp_path, **changes)
    for word in words:
        assert word in str(raised.value), str(raised.value)


def test_null_and_false_fields_are_no_matter(tmp_path: Path) -> None:
    assert read(tmp_path, odd_flag=False, sliding_window=None, use_sliding_window=False) == read(tmp_path)
