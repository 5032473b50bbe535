"""Decoders of 2024 and 2025: layers without rotary positions or a window, temperatures, and refusals."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orca_jax.errors import BadModelConfig, CheckpointError, ConfigError, UnsupportedModel
from orca_jax.families.attention_config import QKNorm, Temperature
from orca_jax.families.hf_config import read_config
from orca_jax.families.model_config import FeedForward, ModelConfig
from orca_jax.families.norm_config import Norm
from tests.host.families.published_checkpoints import PUBLISHED

Config = dict[str, Any]

SMOLLM3 = PUBLISHED["HuggingFaceTB/SmolLM3-3B"].config
OLMO3 = PUBLISHED["allenai/Olmo-3-1025-7B"].config
COMMAND = PUBLISHED["CohereLabs/c4ai-command-r7b-12-2024"].config
EXAONE = PUBLISHED["LGAI-EXAONE/EXAONE-4.0-32B"].config
EXAONE_SMALL = PUBLISHED["LGAI-EXAONE/EXAONE-4.0-1.2B"].config
APERTUS = PUBLISHED["swiss-ai/Apertus-8B-2509"].config
MISTRAL3 = PUBLISHED["mistralai/Mistral-Small-3.1-24B-Instruct-2503"].config
MINISTRAL3 = PUBLISHED["mistralai/Ministral-3-8B-Base-2512"].config["text_config"] | {
    "architectures": ["Ministral3ForCausalLM"]
}
HUNYUAN: Config = {
    "model_type": "hunyuan_v1_dense",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rope_scaling": {
        **{"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0},
        "type": "dynamic",
    },
}


def read(tmp_path: Path, config: Config, **changes: Any) -> ModelConfig:
    values = {name: value for name, value in (config | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_config(tmp_path)


def rotated(model: ModelConfig) -> list[bool]:
    return [attention.rotary is not None for attention in model.attentions]


def windows(model: ModelConfig) -> list[int | None]:
    return [attention.scores.window for attention in model.attentions]


def test_which_layers_have_rotary_positions(tmp_path: Path) -> None:
    every_fourth = [True, True, True, False]
    assert rotated(read(tmp_path, SMOLLM3)) == every_fourth * 9
    without = {"no_rope_layers": ..., "layer_types": ..., "num_hidden_layers": 6}
    assert rotated(read(tmp_path, SMOLLM3, **without, no_rope_layer_interval=3)) == [True, True, False] * 2
    # transformers reads a list that is longer than the model.
    assert rotated(read(tmp_path, SMOLLM3, num_hidden_layers=2, layer_types=...)) == [True, True]
    assert rotated(read(tmp_path, COMMAND)) == every_fourth * 8
    assert rotated(read(tmp_path, EXAONE)) == every_fourth * 16
    assert all(rotated(read(tmp_path, EXAONE_SMALL)))
    assert not any(rotated(read(tmp_path, EXAONE_SMALL, sliding_window=4096)))
    assert all(rotated(read(tmp_path, OLMO3)))


def test_which_layers_have_a_window(tmp_path: Path) -> None:
    assert windows(read(tmp_path, OLMO3, num_hidden_layers=4, layer_types=...)) == [4096, 4096, 4096, None]
    pattern = {"num_hidden_layers": 3, "layer_types": ..., "sliding_window": 8}
    assert windows(read(tmp_path, COMMAND, **pattern, sliding_window_pattern=3)) == [8, 8, None]
    assert windows(read(tmp_path, EXAONE, **pattern, sliding_window_pattern=2)) == [8, None, 8]
    own = {"layer_types": ..., "use_sliding_window": True, "sliding_window": 8}
    assert windows(read(tmp_path, SMOLLM3, **own)) == [None, None, None, 8] * 9


def test_layers_with_a_window_have_no_scaling_in_olmo3(tmp_path: Path) -> None:
    local, *_, full = (attention.rotary for attention in read(tmp_path, OLMO3).attentions)
    assert local is not None and full is not None and full.scaling is not None
    assert local.scaling is None and local.base == full.base == 500_000.0


def test_alpha_is_another_base(tmp_path: Path) -> None:
    rotary = read(tmp_path, HUNYUAN).attention.rotary
    assert rotary is not None and rotary.scaling is None
    assert rotary.base == pytest.approx(10_000.0 * 1000.0 ** (8 / 6))
    whole = {"rope_scaling": ..., "rope_theta": ...}
    newer = HUNYUAN["rope_scaling"] | {"rope_type": "dynamic", "rope_theta": 10000.0}
    assert read(tmp_path, HUNYUAN, **whole, rope_parameters=newer).attention.rotary == rotary
    plain = read(tmp_path, HUNYUAN, rope_scaling=None).attention.rotary
    assert plain is not None and plain.base == 10_000.0


def test_the_temperature_of_ministral_3(tmp_path: Path) -> None:
    scores = read(tmp_path, MINISTRAL3).attention.scores
    assert scores.temperature == Temperature(scale=0.1, step=16_384)
    rope = {name: value for name, value in MINISTRAL3["rope_parameters"].items() if "scaling" not in name}
    assert read(tmp_path, MINISTRAL3, rope_parameters=rope).attention.scores.temperature is None


def test_a_head_is_tied_where_the_text_says_so(tmp_path: Path) -> None:
    """transformers writes true outside of text_config, which is its class's default."""
    untied, tied = (MISTRAL3["text_config"] | {"tie_word_embeddings": value} for value in (False, True))
    assert not read(tmp_path, MISTRAL3).embedding.tied
    assert not read(tmp_path, MISTRAL3, tie_word_embeddings=True, text_config=untied).embedding.tied
    assert read(tmp_path, MISTRAL3, tie_word_embeddings=False, text_config=tied).embedding.tied
    assert read(tmp_path, MISTRAL3, tie_word_embeddings=True).embedding.tied


def test_the_default_scaling_of_apertus(tmp_path: Path) -> None:
    whole = read(tmp_path, APERTUS)
    assert read(tmp_path, APERTUS, rope_scaling=..., rope_theta=...) == whole
    plain = read(tmp_path, APERTUS, rope_scaling={"rope_type": "default"}).attention.rotary
    assert plain is not None and plain.scaling is None


def test_the_eps_of_a_norm_without_bias(tmp_path: Path) -> None:
    norm = read(tmp_path, COMMAND, layer_norm_eps=1e-3).final_norm
    assert norm == Norm(kind="layer_norm", eps=1e-3, bias=False)


@pytest.mark.parametrize(
    ("config", "changes", "error", "words"),
    [
        (SMOLLM3, {"no_rope_layers": [1, 0]}, BadModelConfig, "expected 0 or 1 for each of 36 layers"),
        (SMOLLM3, {"no_rope_layers": [2] * 36}, BadModelConfig, "no_rope_layers"),
        (SMOLLM3, {"no_rope_layers": ..., "no_rope_layer_interval": 0}, BadModelConfig, "at least 1"),
        (SMOLLM3, {"layer_types": ["sliding_attention"] * 36}, BadModelConfig, "use_sliding_window"),
        (OLMO3, {"rope_theta": 10000}, UnsupportedModel, "say both in rope_parameters"),
        (OLMO3, {"rope_parameters": {"full_attention": {"rope_type": "default"}}, "rope_scaling": ...},
         BadModelConfig, "rope_parameters.sliding_attention: expected an object"),
        (COMMAND, {"use_parallel_block": False}, UnsupportedModel, "use_parallel_block"),
        (COMMAND, {"use_gated_activation": False}, UnsupportedModel, "use_gated_activation"),
        (COMMAND, {"use_qk_norm": True}, UnsupportedModel, "use_qk_norm"),
        (COMMAND, {"position_embedding_type": "alibi"}, UnsupportedModel, "position_embedding_type"),
        (COMMAND, {"logit_scale": 0}, BadModelConfig, "logit_scale is 0"),
        (COMMAND, {"layer_norm_eps": 0}, BadModelConfig, "layer_norm_eps"),
        (EXAONE, {"layer_types": ...}, BadModelConfig, "sliding_window_pattern: expected a whole number"),
        (EXAONE, {"sliding_window": None}, BadModelConfig, "sliding_window is null"),
        (APERTUS, {"qk_norm": False}, UnsupportedModel, "qk_norm"),
        (APERTUS, {"post_norm": True}, UnsupportedModel, "post_norm"),
        (HUNYUAN, {"use_qk_norm": False}, UnsupportedModel, "use_qk_norm"),
        (HUNYUAN, {"use_cla": True, "cla_share_factor": 2}, UnsupportedModel, "cla"),
        (HUNYUAN, {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 9}}, UnsupportedModel, "alpha"),
        (MINISTRAL3, {"rope_parameters": ...}, BadModelConfig, "rope_parameters: expected an object"),
        (MISTRAL3, {"text_config": {"model_type": "llama"}}, UnsupportedModel, "expected one of mistral"),
        (MISTRAL3, {"text_config": ...}, BadModelConfig, "text_config: expected an object"),
    ],
)  # fmt: skip
def test_unsupported_options_are_refused(
    tmp_path: Path, config: Config, changes: Config, error: type[CheckpointError], words: str
) -> None:
    with pytest.raises(error, match=words):
        read(tmp_path, config, **changes)


def test_combinations_that_are_not_computed() -> None:
    norm = Norm(kind="rms_norm")
    with pytest.raises(ConfigError, match="after rotation"):
        QKNorm(norm=norm, over="width", after_rotation=True)
    with pytest.raises(ConfigError, match="xielu"):
        FeedForward(size=8, activation="xielu", gated=True)
    with pytest.raises(ConfigError, match="temperature_scale"):
        Temperature(scale=0.0, step=8)


def test_the_default_of_a_yarn_factor_is_the_authors(tmp_path: Path) -> None:
    rotary = read(tmp_path, MINISTRAL3).attention.rotary
    assert rotary is not None and rotary.attention_factor == 1.0  # mscale and mscale_all_dim cancel
    olmo = read(tmp_path, OLMO3).attentions[3].rotary
    assert olmo is not None and olmo.attention_factor == pytest.approx(0.1 * math.log(8) + 1)
    assert np.all(np.isfinite(olmo.frequencies(65_536)))
