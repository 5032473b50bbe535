"""Published configurations with one field changed or spelt differently: the result, or the refusal."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import BadModelConfig, CheckpointError, UnsupportedModel
from orca_jax.families.hf_config import read_config
from orca_jax.families.model_config import ModelConfig
from tests.host.families.published_checkpoints import FACTORS, PUBLISHED

Config = dict[str, Any]


MISTRAL = PUBLISHED["mistralai/Mistral-7B-v0.1"].config
QWEN2 = PUBLISHED["Qwen/Qwen2.5-0.5B-Instruct"].config
QWEN3 = PUBLISHED["Qwen/Qwen3-0.6B"].config
PHI3 = PUBLISHED["microsoft/Phi-3-mini-4k-instruct"].config
PHI3_LONG = PUBLISHED["microsoft/Phi-3.5-mini-instruct"].config
PHI4_MINI = PUBLISHED["microsoft/Phi-4-mini-instruct"].config
STARCODER2 = PUBLISHED["bigcode/starcoder2-3b"].config


def read(tmp_path: Path, config: Config, **changes: Any) -> ModelConfig:
    values = {name: value for name, value in (config | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_config(tmp_path)


def windows(model: ModelConfig) -> list[int | None]:
    return [attention.scores.window for attention in model.attentions]


def test_which_layers_have_a_window(tmp_path: Path) -> None:
    assert windows(read(tmp_path, MISTRAL)) == [4096] * 32
    assert windows(read(tmp_path, MISTRAL, sliding_window=...)) == [4096] * 32  # as transformers has it
    assert windows(read(tmp_path, MISTRAL, sliding_window=None)) == [None] * 32
    assert windows(read(tmp_path, PHI3, sliding_window=...)) == [None] * 32
    assert windows(read(tmp_path, STARCODER2)) == [4096] * 30
    for config in (QWEN2, QWEN3):
        small = config | {"num_hidden_layers": 3}
        assert windows(read(tmp_path, small)) == [None] * 3
        on = small | {"use_sliding_window": True, "sliding_window": 8}
        assert windows(read(tmp_path, on)) == [None] * 3
        assert windows(read(tmp_path, on, max_window_layers=1)) == [None, 8, 8]
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        assert windows(read(tmp_path, on, layer_types=kinds)) == [8, None, 8]


def test_the_rotated_part_and_its_factors(tmp_path: Path) -> None:
    long, mini = read(tmp_path, PHI3_LONG).attention.rotary, read(tmp_path, PHI4_MINI).attention.rotary
    assert long is not None and long.scaling is not None and mini is not None
    assert (long.size, mini.size) == (96, 96)  # of 96 and 128 elements
    assert long.scaling.original_positions == 4096
    assert long.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    plain = 10000.0 ** -(2 * 5 / 96)
    assert long.frequencies(131072)[5] == pytest.approx(plain / 6)
    assert long.frequencies(4096)[5] == pytest.approx(plain / (1 + 5 / 64))


@pytest.mark.parametrize("config", [PHI3_LONG, PHI4_MINI])
def test_every_spelling_of_longrope(tmp_path: Path, config: Config) -> None:
    model = read(tmp_path, config)
    partial = {"partial_rotary_factor": config.get("partial_rotary_factor", 1.0)}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS, **partial}
    new = config | {"rope_scaling": ..., "rope_theta": ..., "partial_rotary_factor": ...}
    assert read(tmp_path, new, rope_parameters=rope) == model
    assert read(tmp_path, new, rope_parameters=rope | {"original_max_position_embeddings": 4096}) == model
    assert read(tmp_path, config, original_max_position_embeddings=...) == model  # transformers' default
    assert read(tmp_path, config, rope_scaling={"type": "su", **FACTORS}) == model


@pytest.mark.parametrize(
    ("config", "changes", "error", "word"),
    [
        (MISTRAL, {"layer_types": ["full_attention"] * 32}, UnsupportedModel, "layer_types"),
        (MISTRAL, {"sliding_window": 0}, BadModelConfig, "sliding_window is 0"),
        (MISTRAL, {"sliding_window": "wide"}, BadModelConfig, "sliding_window: expected a whole number"),
        (QWEN2, {"use_mrope": True}, UnsupportedModel, "use_mrope"),
        (QWEN2, {"dual_chunk_attention_config": {"chunk_size": 9}}, UnsupportedModel, "dual_chunk"),
        (QWEN2, {"layer_types": ["full_attention"]}, BadModelConfig, "layer_types: expected 24 of"),
        (QWEN3, {"layer_types": ["sliding_attention"] * 28}, BadModelConfig, "use_sliding_window"),
        (QWEN3, {"num_attention_heads": 15}, BadModelConfig, "num_attention_heads 15 is not a multiple"),
        (PHI3_LONG, {"rope_scaling": {"type": "yarn", **FACTORS}}, UnsupportedModel, "long_factor"),
        (PHI3, {"rope_scaling": {"type": "linear", "factor": 2.0}}, UnsupportedModel, "found 'linear'"),
        (PHI4_MINI, {"partial_rotary_factor": 0.5}, BadModelConfig, "one for each of the 32 pairs"),
        (PHI4_MINI, {"interpolate_factor": 2}, UnsupportedModel, "interpolate_factor"),
        (PHI4_MINI, {"lm_head_bias": True}, UnsupportedModel, "lm_head_bias"),
        (PHI3, {"auto_map": {"AutoModelForCausalLM": "mine.Phi4"}}, UnsupportedModel, "auto_map"),
        (MISTRAL, {"auto_map": PHI3["auto_map"]}, UnsupportedModel, "auto_map"),
        (
            PHI3_LONG,
            {"rope_scaling": {**PHI3_LONG["rope_scaling"], "original_max_position_embeddings": 8192}},
            BadModelConfig,
            "disagrees with itself: original_max_position_embeddings",
        ),
        (STARCODER2, {"mlp_type": "gated"}, UnsupportedModel, "mlp_type"),
        (STARCODER2, {"norm_type": "rms_norm"}, UnsupportedModel, "norm_type"),
        (STARCODER2, {"norm_epsilon": 0}, BadModelConfig, "norm_epsilon"),
    ],
)
def test_unsupported_options_are_refused(
    tmp_path: Path, config: Config, changes: Config, error: type[CheckpointError], word: str
) -> None:
    with pytest.raises(error, match=word):
        read(tmp_path, config, **changes)
