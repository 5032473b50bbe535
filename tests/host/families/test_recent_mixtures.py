"""Mixtures of 2025 and 2026: how experts are chosen, which layers have them, and refusals."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import BadModelConfig, CheckpointError, UnsupportedModel
from orca_jax.families.attention_config import Temperature
from orca_jax.families.hf_config import read_config
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.packed_form import w4
from orca_jax.families.parameters import parameter_shapes
from tests.host.families.published_checkpoints import PUBLISHED

Config = dict[str, Any]

GLM = PUBLISHED["zai-org/GLM-4.5"].config
GLM_AIR = PUBLISHED["zai-org/GLM-4.5-Air"].config
MINIMAX = PUBLISHED["MiniMaxAI/MiniMax-M2"].config
KIMI = PUBLISHED["moonshotai/Kimi-K2.5"].config
GLM_FLASH: Config = {
    "model_type": "glm4_moe_lite",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rope_theta": 1000000,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
ERNIE: Config = {
    "model_type": "ernie4_5_moe",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_capacity": [64, 64, 64],
    "moe_gate": "topk",
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_end_index": 27,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_use_aux_free": True,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "use_bias": False,
    "vocab_size": 103424,
}
MISTRAL4: Config = {
    "model_type": "mistral4",
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "kv_lora_rank": 256,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 128,
    "num_attention_heads": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 32,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "rope_parameters": {
        "type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
        "partial_rotary_factor": 0.5,
    },
    "v_head_dim": 128,
    "vocab_size": 131072,
}
FLEX: Config = {
    "model_type": "flex_olmo",
    "hidden_size": 64,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_experts": 7,
    "num_experts_per_tok": 5,
    "num_hidden_layers": 2,
    "vocab_size": 96,
}


def read(tmp_path: Path, config: Config, **changes: Any) -> ModelConfig:
    values = {name: value for name, value in (config | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_config(tmp_path)


def experts(model: ModelConfig) -> Experts:
    found = model.layers[-1].experts
    assert found is not None
    return found


def sparse(model: ModelConfig) -> list[int]:
    return [i for i, layer in enumerate(model.layers) if layer.experts is not None]


def rotated(model: ModelConfig) -> int:
    rotary = model.attention.rotary
    assert rotary is not None
    return rotary.size


def test_glm(tmp_path: Path) -> None:
    model = read(tmp_path, GLM)
    corrected = {"scores": "sigmoid", "renormalised": True, "correction_bias": True, "least_sum": 1e-20}
    assert experts(model) == Experts(number=160, top_k=8, multiplier=2.5, shared_size=1536, **corrected)
    assert sparse(model) == [*range(3, 92)]
    assert rotated(model) == rotated(read(tmp_path, GLM, partial_rotary_factor=...)) == 64
    assert model.attention.qk_norm is not None and model.attention.qkv_bias and not model.attention.out_bias
    assert read(tmp_path, GLM_AIR).attention.qk_norm is None
    flash = read(tmp_path, GLM_FLASH)
    assert flash.attention.latent is not None and flash.attention.latent.query_rank == 768
    assert experts(flash) == Experts(number=64, top_k=4, multiplier=1.8, shared_size=1536, **corrected)
    assert sparse(flash) == [*range(1, 47)]
    kinds = ["sparse"] * 2 + ["dense"] * 45
    assert sparse(read(tmp_path, GLM_FLASH, mlp_layer_types=kinds, first_k_dense_replace=...)) == [0, 1]


def test_minimax(tmp_path: Path) -> None:
    model = read(tmp_path, MINIMAX)
    assert experts(model) == Experts(
        number=256, top_k=8, scores="sigmoid", renormalised=True, correction_bias=True
    )
    assert rotated(model) == rotated(read(tmp_path, MINIMAX, rotary_dim=..., partial_rotary_factor=0.5)) == 64
    assert rotated(read(tmp_path, MINIMAX, rotary_dim=...)) == 128
    assert model.attention.qk_norm is not None and model.attention.qk_norm.over == "width"


def test_ernie(tmp_path: Path) -> None:
    model = read(tmp_path, ERNIE)
    assert experts(model) == Experts(
        number=64, top_k=6, renormalised=True, least_sum=1e-12, correction_bias=True, shared_size=3072
    )
    assert sparse(model) == sparse(read(tmp_path, ERNIE, moe_layer_end_index=-1)) == [*range(1, 28)]
    some = {"moe_layer_start_index": 4, "moe_layer_end_index": 12, "moe_layer_interval": 3}
    assert sparse(read(tmp_path, ERNIE, **some)) == [5, 8, 11]
    assert sum(math.prod(shape) for shape in parameter_shapes(model).values()) == 21_825_437_888  # "21B"


def test_mistral4_with_and_without_vision(tmp_path: Path) -> None:
    model = read(tmp_path, MISTRAL4)
    assert experts(model) == Experts(
        number=128, top_k=4, renormalised=True, least_sum=1e-20, shared_size=2048
    )
    assert sparse(model) == [*range(36)]
    assert model.attention.latent is not None and model.attention.latent.query_rank == 1024
    assert model.attention.scores.temperature == Temperature(scale=0.1, step=8192)
    assert model.attention.scale == pytest.approx(128**-0.5 * (0.1 * math.log(128) + 1) ** 2)
    count = sum(math.prod(shape) for shape in parameter_shapes(model).values())
    assert 118e9 < count < 120e9  # "119B"
    whole: Config = {"model_type": "mistral3", "text_config": MISTRAL4, "vision_config": {}}
    assert read(tmp_path, whole, bos_token_id=..., eos_token_id=...).layers == model.layers


def test_kimis_experts_alone_are_packed(tmp_path: Path) -> None:
    model = read(tmp_path, KIMI, text_config=KIMI["text_config"] | {"num_hidden_layers": 2})
    packed = dict.fromkeys(("experts.up.weight", "experts.down.weight"), w4(32, scale="bfloat16"))
    assert [dict(layer.forms) for layer in model.layers] == [{}, packed]


def test_flex_olmo_norms_after_each_part(tmp_path: Path) -> None:
    model = read(tmp_path, FLEX)
    assert {layer.residual for layer in model.layers} == {"after"}
    assert model.attention.rotary is not None and model.attention.rotary.base == 500_000.0
    assert not experts(model).renormalised


@pytest.mark.parametrize(
    ("config", "changes", "error", "words"),
    [
        (GLM, {"scoring_func": "softmax"}, UnsupportedModel, "scoring_func: expected one of sigmoid"),
        (GLM, {"n_group": 7}, BadModelConfig, "n_routed_experts 160 is not a multiple of n_group 7"),
        (GLM, {"moe_layer_freq": 2}, UnsupportedModel, "moe_layer_freq"),
        (GLM_FLASH, {"partial_rotary_factor": 0.5}, UnsupportedModel, "only 1.0 is supported"),
        (GLM_FLASH, {"first_k_dense_replace": 2}, BadModelConfig, "the first layer with experts is 1"),
        (GLM_FLASH, {"mlp_layer_types": ["dense"]}, BadModelConfig, "expected 47 of dense, sparse"),
        (MINIMAX, {"use_routing_bias": False}, UnsupportedModel, "use_routing_bias: expected true"),
        (MINIMAX, {"use_qk_norm": False}, UnsupportedModel, "use_qk_norm: expected true"),
        (MINIMAX, {"qk_norm_type": "per_head"}, UnsupportedModel, "expected one of per_layer"),
        (MINIMAX, {"attn_type_list": [0, 1] * 31}, UnsupportedModel, "layers with linear attention"),
        (MINIMAX, {"layernorm_mlp_beta": 2.0}, UnsupportedModel, "layernorm_mlp_beta is 2.0; only 1.0"),
        (MINIMAX, {"shared_intermediate_size": 8}, UnsupportedModel, "shared_intermediate_size is 8; only 0"),
        (MINIMAX, {"head_dim": 0}, BadModelConfig, "rotary_size is 0"),
        (ERNIE, {"use_bias": True}, UnsupportedModel, "use_bias: expected false"),
        (ERNIE, {"moe_gate": "hash"}, UnsupportedModel, "moe_gate: expected one of topk"),
        (ERNIE, {"moe_layer_interval": 0}, BadModelConfig, "moe_layer_interval: expected at least 1"),
        (ERNIE, {"moe_norm_min": -1.0}, BadModelConfig, "moe_norm_min is -1"),
        (MISTRAL4, {"n_group": 4}, UnsupportedModel, "n_group is 4; groups of experts are not supported"),
        (MISTRAL4, {"head_dim": 64}, BadModelConfig, "head_dim is 64"),
        (MISTRAL4, {"qk_rope_head_dim": 32, "head_dim": 96}, BadModelConfig, "qk_rope_head_dim is 32"),
        (MISTRAL4, {"rope_parameters": ...}, BadModelConfig, "rope_parameters: expected an object"),
        (FLEX, {"num_experts_per_tok": 8}, BadModelConfig, "num_experts_per_tok is 8"),
        (KIMI, {"quantization_config": {"quant_method": "hqq"}}, UnsupportedModel, "quantised by HQQ"),
        (KIMI, {"text_config": KIMI["text_config"] | {"quantization_config": {"quant_method": "hqq"}}},
         UnsupportedModel, "quantised by HQQ"),
    ],
)  # fmt: skip
def test_unsupported_options_are_refused(
    tmp_path: Path, config: Config, changes: Config, error: type[CheckpointError], words: str
) -> None:
    with pytest.raises(error, match=words):
        read(tmp_path, config, **changes)
