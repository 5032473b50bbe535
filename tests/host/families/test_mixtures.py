"""config.json of mixtures of experts, and how experts are split over devices."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca_jax.config import ParallelConfig
from orca_jax.errors import BadModelConfig, CheckpointError, ConfigError, UnsupportedModel
from orca_jax.families.hf_config import read_config
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import FeedForward, ModelConfig
from orca_jax.families.parameters import parameter_table
from orca_jax.planning.stage_layers import check_split, tensor_degrees

LLAMA: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 96,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "sliding_window": None}
QWEN = {"num_experts": 6, "moe_intermediate_size": 12, "decoder_sparse_step": 1, "mlp_only_layers": []}
QWEN2 = LLAMA | QWEN | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 40}
QWEN3 = LLAMA | QWEN | {"model_type": "qwen3_moe", "norm_topk_prob": True, "head_dim": 10}
OLMOE = LLAMA | {"model_type": "olmoe", "num_experts": 6, "clip_qkv": None}


def read(tmp_path: Path, config: dict[str, Any], **changes: Any) -> ModelConfig:
    values = {name: value for name, value in (config | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_config(tmp_path)


def experts(model: ModelConfig) -> Experts:
    found = model.layers[0].experts
    assert found is not None
    return found


def test_fields_of_the_families(tmp_path: Path) -> None:
    mixtral = read(tmp_path, MIXTRAL)
    assert experts(mixtral) == Experts(number=8, top_k=2, renormalised=True)
    assert mixtral.feed_forward.size == 80 and mixtral.layers[0].norm.eps == 1e-5
    assert experts(read(tmp_path, MIXTRAL, num_local_experts=..., num_experts=5)).number == 5
    qwen2 = read(tmp_path, QWEN2)
    assert experts(qwen2) == Experts(number=6, top_k=2, shared_size=40, shared_gate=True)
    assert qwen2.feed_forward.size == 12 and qwen2.attention.qkv_bias
    qwen3 = read(tmp_path, QWEN3)
    assert experts(qwen3) == Experts(number=6, top_k=2, renormalised=True)
    assert not experts(read(tmp_path, QWEN3, norm_topk_prob=...)).renormalised
    assert experts(read(tmp_path, QWEN3, num_experts=..., num_local_experts=3)).number == 3
    olmoe = read(tmp_path, OLMOE, num_key_value_heads=None)
    assert olmoe.attention.group == 1 and olmoe.attention.qk_norm is not None
    assert not experts(olmoe).renormalised


@pytest.mark.parametrize(
    ("step", "dense", "sparse"),
    [(1, [], [0, 1, 2, 3]), (2, [], [1, 3]), (1, [0, 2], [1, 3]), (2, [3], [1]), (3, None, [2])],
)
def test_which_layers_are_sparse(tmp_path: Path, step: int, dense: Any, sparse: list[int]) -> None:
    model = read(tmp_path, QWEN3, decoder_sparse_step=step, mlp_only_layers=dense)
    kinds = [layer.feed_forward for layer in model.layers if layer.feed_forward is not None]
    assert [i for i, kind in enumerate(kinds) if kind.experts is not None] == sparse
    assert {kind.size for kind in kinds if kind.experts is None} <= {80}


@pytest.mark.parametrize(
    ("config", "changes", "error", "words"),
    [
        (MIXTRAL, {"num_local_experts": ...}, BadModelConfig, "num_local_experts: expected a whole number"),
        (MIXTRAL, {"num_local_experts": 0}, BadModelConfig, "num_local_experts is 0"),
        (MIXTRAL, {"num_local_experts": 1 << 20}, BadModelConfig, "num_local_experts is 1048576"),
        (MIXTRAL, {"num_experts": 5}, BadModelConfig, "disagrees with itself"),
        (MIXTRAL, {"num_experts_per_tok": 9}, BadModelConfig, "num_experts_per_tok is 9"),
        (MIXTRAL, {"num_experts_per_tok": 0}, BadModelConfig, "num_experts_per_tok is 0"),
        (MIXTRAL, {"norm_topk_prob": True}, UnsupportedModel, "norm_topk_prob"),
        (QWEN2, {"shared_expert_intermediate_size": ...}, BadModelConfig, "shared_expert_intermediate_size"),
        (QWEN2, {"shared_expert_intermediate_size": 0}, BadModelConfig, "shared_expert_intermediate_size"),
        (QWEN2, {"use_sliding_window": True}, UnsupportedModel, "there are no layer_types"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 4}, BadModelConfig, "use_sliding_window is not true"),
        (QWEN3, {"moe_intermediate_size": "wide"}, BadModelConfig, "moe_intermediate_size: expected"),
        (QWEN3, {"decoder_sparse_step": 0}, BadModelConfig, "decoder_sparse_step: expected"),
        (QWEN3, {"mlp_only_layers": [4]}, BadModelConfig, "expected layers from 0 to 3, found [4]"),
        (QWEN3, {"mlp_only_layers": [0.5]}, BadModelConfig, "mlp_only_layers: expected layers"),
        (OLMOE, {"clip_qkv": 8.0}, UnsupportedModel, "clip_qkv is 8.0"),
    ],
)
def test_unsupported_models_are_refused(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], error: type[CheckpointError], words: str
) -> None:
    with pytest.raises(CheckpointError) as raised:
        read(tmp_path, config, **changes)
    assert type(raised.value) is error and words in str(raised.value), str(raised.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_k": 9}, "top_k is 9"),
        ({"n_groups": 3}, "n_experts 8 is not a multiple of n_groups 3"),
        ({"n_groups": 4, "top_groups": 5}, "top_groups is 5"),
        ({"n_groups": 4, "top_k": 3}, "1 groups have 2 experts"),
        ({"n_groups": 8, "top_k": 1, "correction_bias": True}, "a group of 1 experts has no 2 scores"),
        ({"scores": "softmax_of_chosen", "renormalised": True}, "neither renormalised nor corrected"),
        ({"shared_gate": True}, "no shared_size"),
        ({"shared_size": 0}, "shared_size is 0"),
        ({"multiplier": 0.0}, "experts_multiplier"),
    ],
)
def test_experts_that_cannot_be(fields: dict[str, Any], words: str) -> None:
    values: dict[str, Any] = {"number": 8, "top_k": 2, **fields}
    with pytest.raises(ConfigError, match=words):
        Experts(**values)


def test_a_limit_without_a_gate() -> None:
    with pytest.raises(ConfigError, match="gate_limit is set, but the layer is not gated"):
        FeedForward(size=8, gate_limit=7.0)


def test_the_expected_number_of_experts_that_are_hit() -> None:
    # Of 4 experts a token leaves 2, another token leaves each of those with one half, and so on.
    assert [Experts(number=4, top_k=2).expected_hit(n) for n in (0, 1, 2, 3)] == [0, 2, 3, 3.5]


def test_wide_experts_are_cut_and_narrow_ones_stay_whole(tmp_path: Path) -> None:
    model = read(tmp_path, QWEN2, moe_intermediate_size=512, num_experts=6)
    table = parameter_table(model)
    up, down = table["layers.0.experts.up.weight"], table["layers.0.experts.down.weight"]
    assert up.shape == (6, 2, 512, 48) and down.shape == (6, 48, 512)
    assert up.stacked_shape == (6 * 2 * 512, 48) and down.stacked_shape == (6 * 48, 512)
    # 512 over 4 devices leaves 128, which is wide enough; over 8 it does not, and 6 is no multiple of 8.
    assert [up.split_axis(n) for n in (2, 4, 8)] == [2, 2, 2]
    assert (up.local_shape(4), down.local_shape(4)) == ((6, 2, 128, 48), (6, 48, 128))
    narrow = parameter_table(read(tmp_path, QWEN2, moe_intermediate_size=12, num_experts=6))
    up, down = narrow["layers.0.experts.up.weight"], narrow["layers.0.experts.down.weight"]
    assert (up.local_shape(2), down.local_shape(2)) == ((3, 2, 12, 48), (3, 48, 12))
    assert (up.local_shape(4), down.local_shape(4)) == ((6, 2, 3, 48), (6, 48, 3))
    assert narrow["layers.0.router.weight"].local_shape(2) == (6, 48), "each device routes all tokens"
    assert narrow["layers.0.shared.up.weight"].local_shape(2) == (2, 20, 48)


def test_over_how_many_devices_experts_can_be_split(tmp_path: Path) -> None:
    model = read(tmp_path, QWEN3, moe_intermediate_size=9, num_experts=8)
    assert tensor_degrees(model, 16) == [1, 2, 4, 8], "8 experts"
    model = read(tmp_path, QWEN3, moe_intermediate_size=12, num_experts=3, num_experts_per_tok=1)
    assert tensor_degrees(model, 16) == [1, 2, 4], "3 experts, but 12 of each"
    with pytest.raises(
        ConfigError, match="ffn_size 12, or its n_experts 3, is not a multiple of it; 1, 2, 4"
    ):
        check_split(model, ParallelConfig(tensor_parallel=8))
    with pytest.raises(ConfigError, match="shared_size 10 is not"):
        check_split(
            read(tmp_path, QWEN2, shared_expert_intermediate_size=10), ParallelConfig(tensor_parallel=4)
        )
