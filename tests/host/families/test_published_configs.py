"""config.json of well-known models, with the fields that were published: shape, size, and a way back.

The number of parameters is the published one.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import BadModelConfig, CheckpointError, UnsupportedModel
from orca_jax.families.hf_config import hf_config_of, read_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import parameter_shapes

Config = dict[str, Any]


def _config(model_type: str, architecture: str, sizes: tuple[int, ...], **other: Any) -> Config:
    """Sizes: vocabulary, hidden, layers, heads, K/V heads, feed-forward, positions."""
    names = (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("intermediate_size", "max_position_embeddings"),
    )
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0",
        "use_cache": True,
        **dict(zip(names, sizes, strict=True)),
        **other,
    }


def _phi3(sizes: tuple[int, ...], **other: Any) -> Config:
    code = {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    }
    return _config("phi3", "Phi3ForCausalLM", sizes) | {
        "auto_map": code,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **other,
    }


MISTRAL = _config(
    *("mistral", "MistralForCausalLM", (32000, 4096, 32, 32, 8, 14336, 32768)),
    rms_norm_eps=1e-05,
    rope_theta=10000.0,
    sliding_window=4096,
    tie_word_embeddings=False,
)
QWEN2 = _config(
    *("qwen2", "Qwen2ForCausalLM", (151936, 896, 24, 14, 2, 4864, 32768)),
    max_window_layers=24,
    rms_norm_eps=1e-06,
    rope_theta=1000000.0,
    sliding_window=32768,
    tie_word_embeddings=True,
    use_mrope=False,
    use_sliding_window=False,
)
QWEN3 = _config(
    *("qwen3", "Qwen3ForCausalLM", (151936, 1024, 28, 16, 8, 3072, 40960)),
    attention_bias=False,
    head_dim=128,
    max_window_layers=28,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=None,
    tie_word_embeddings=True,
    use_sliding_window=False,
)
PHI3 = _phi3((32064, 3072, 32, 32, 32, 8192, 4096), rope_scaling=None, sliding_window=2047)
FACTORS = {"short_factor": [1.0 + i / 64 for i in range(48)], "long_factor": [1.0 + i for i in range(48)]}
PHI3_LONG = PHI3 | {
    "max_position_embeddings": 131072,
    "rope_scaling": {"type": "longrope", **FACTORS},
    "sliding_window": 262144,
}
PHI4_MINI = _phi3(
    (200064, 3072, 32, 24, 8, 8192, 131072),
    full_attn_mod=1,
    interpolate_factor=1,
    lm_head_bias=False,
    mlp_bias=False,
    partial_rotary_factor=0.75,
    rope_scaling={"type": "longrope", **FACTORS},
    sliding_window=262144,
    tie_word_embeddings=True,
)
STARCODER2 = _config(
    *("starcoder2", "Starcoder2ForCausalLM", (49152, 3072, 30, 24, 2, 12288, 16384)),
    activation_function="gelu",
    attention_softmax_in_fp32=True,
    hidden_act="gelu_pytorch_tanh",
    layer_norm_epsilon=1e-05,
    mlp_type="default",
    norm_epsilon=1e-05,
    norm_type="layer_norm",
    residual_dropout=0.1,
    embedding_dropout=0.1,
    rope_theta=999999.4420358813,
    scale_attention_softmax_in_fp32=True,
    scale_attn_weights=True,
    sliding_window=4096,
    use_bias=True,
)
MODELS = {
    "Mistral 7B": (MISTRAL, 7_241_732_096),
    "Qwen 2.5 0.5B": (QWEN2, 494_032_768),
    "Qwen 3 0.6B": (QWEN3, 596_049_920),
    "Phi-3 mini": (PHI3, 3_821_079_552),
    "Phi-3 mini 128k": (PHI3_LONG, 3_821_079_552),
    "Phi-4 mini": (PHI4_MINI, 3_836_021_760),
    "StarCoder 2 3B": (STARCODER2, 3_030_371_328),
}


def read(tmp_path: Path, config: Config, **changes: Any) -> ModelConfig:
    values = {name: value for name, value in (config | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_config(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model(tmp_path: Path, name: str) -> None:
    config, n_parameters = MODELS[name]
    model = read(tmp_path, config)
    assert sum(math.prod(shape) for shape in parameter_shapes(model).values()) == n_parameters
    assert read(tmp_path, hf_config_of(model)) == model


def windows(model: ModelConfig) -> list[int | None]:
    return [layer.attention.scores.window for layer in model.layers]


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
def test_what_is_not_computed_is_refused(
    tmp_path: Path, config: Config, changes: Config, error: type[CheckpointError], word: str
) -> None:
    with pytest.raises(error, match=word):
        read(tmp_path, config, **changes)
