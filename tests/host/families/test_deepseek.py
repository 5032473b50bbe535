"""config.json of DeepSeek-V2 and -V3."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import BadModelConfig, CheckpointError, ConfigError, UnsupportedModel
from orca_jax.families.attention_config import Attention, Latent, QKNorm, Scores, latent_attention
from orca_jax.families.hf_config import read_config
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.parameters import parameter_shapes, parameter_table
from orca_jax.families.rotary import Rotary, Scaling
from orca_jax.families.weight_form import EXACT

# DeepSeek-V2-Lite, as published.
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V3 = V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": None,
    "model_type": "deepseek_v3",
    "q_lora_rank": 24,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def read(tmp_path: Path, config: dict[str, Any], **changes: Any) -> ModelConfig:
    values = {name: value for name, value in (config | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_config(tmp_path)


def experts(model: ModelConfig) -> Experts:
    found = model.layers[-1].experts
    assert found is not None
    return found


def test_deepseek_v2_lite_as_published(tmp_path: Path) -> None:
    model = read(tmp_path, V2_LITE)
    latent = Latent(rank=512, rotary_size=64, plain_size=128, value_size=128)
    assert model.attention.latent == latent and model.attention.rotary is not None
    assert model.attention.rotary.interleaved
    # Its cosines and sines are not scaled: mscale equals mscale_all_dim, whose square scales the scores.
    assert model.attention.rotary.attention_factor == 1.0
    assert model.attention.scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert experts(model) == Experts(number=64, top_k=6, shared_size=2816)
    assert [layer.feed_forward and layer.feed_forward.size for layer in model.layers] == [10944] + [1408] * 26
    assert sum(math.prod(shape) for shape in parameter_shapes(model).values()) == 15_706_484_224  # "16B"
    assert (model.head_size, model.n_kv_heads, model.attention.cached_width) == (576, 1, 576)


def test_groups_and_corrections(tmp_path: Path) -> None:
    grouped = read(tmp_path, V2_LITE, topk_method="group_limited_greedy", n_group=8, topk_group=3)
    assert experts(grouped) == Experts(number=64, top_k=6, shared_size=2816, n_groups=8, top_groups=3)
    # Where the choice is greedy groups say nothing.
    assert experts(read(tmp_path, V2_LITE, n_group=8, topk_group=3)).n_groups == 1
    model = read(tmp_path, V3)
    assert experts(model) == Experts(
        number=64,
        top_k=6,
        scores="sigmoid",
        renormalised=True,
        least_sum=1e-20,
        multiplier=2.5,
        correction_bias=True,
        n_groups=8,
        top_groups=4,
        shared_size=2816,
    )
    assert model.attention.latent is not None and model.attention.latent.query_rank == 24
    exact = {name for name, parameter in parameter_table(model).items() if parameter.form == EXACT}
    assert exact == {f"layers.{i}.router.correction" for i in range(1, 27)}
    halves = read(tmp_path, V3, rope_interleave=False)
    assert halves.attention.rotary is not None and not halves.attention.rotary.interleaved


@pytest.mark.parametrize(
    ("first", "every", "sparse"),
    [(0, 1, range(27)), (3, 1, range(3, 27)), (1, 2, range(2, 27, 2)), (27, 1, range(0))],
)
def test_which_layers_are_sparse(tmp_path: Path, first: int, every: int, sparse: range) -> None:
    model = read(tmp_path, V3, first_k_dense_replace=first, moe_layer_freq=every)
    mixed = [i for i, layer in enumerate(model.layers) if layer.experts is not None]
    assert mixed == list(sparse)


def test_defaults_of_missing_fields(tmp_path: Path) -> None:
    """Missing fields have transformers' defaults, except sizes, which are required."""
    less = {"first_k_dense_replace", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"}
    less |= {"scoring_func", "topk_method", "moe_layer_freq", "attention_bias", "num_key_value_heads"}
    model = read(tmp_path, V3 | dict.fromkeys(less, ...))
    assert [layer.experts is None for layer in model.layers[:4]] == [True] * 3 + [False]
    assert experts(model) == experts(read(tmp_path, V3))
    assert experts(read(tmp_path, V3, n_shared_experts=...)).shared_size is None


@pytest.mark.parametrize(
    ("config", "changes", "error", "words"),
    [
        (V3, {"scoring_func": "softmax"}, UnsupportedModel, "scoring_func: expected one of sigmoid"),
        (V3, {"topk_method": "greedy"}, UnsupportedModel, "topk_method: expected one of noaux_tc"),
        (V2_LITE, {"topk_method": "noaux_tc"}, UnsupportedModel, "greedy, group_limited_greedy"),
        (V2_LITE, {"scoring_func": "sigmoid"}, UnsupportedModel, "scoring_func: expected one of softmax"),
        (V2_LITE, {"norm_topk_prob": True}, UnsupportedModel, "norm_topk_prob: expected false"),
        (V2_LITE, {"mlp_bias": True}, UnsupportedModel, "mlp_bias"),
        (V3, {"moe_layer_freq": 0}, BadModelConfig, "moe_layer_freq: expected at least 1, found 0"),
        (V3, {"num_key_value_heads": 4}, BadModelConfig, "num_key_value_heads is 4"),
        (V3, {"head_dim": 128}, BadModelConfig, "head_dim is 128"),
        (V3, {"qk_head_dim": 128}, BadModelConfig, "qk_head_dim is 128"),
        (V3, {"kv_lora_rank": 0}, BadModelConfig, "kv_lora_rank is 0"),
        (V3, {"kv_lora_rank": ...}, BadModelConfig, "kv_lora_rank: expected a whole number"),
        (V3, {"qk_rope_head_dim": 63}, BadModelConfig, "63"),
        (V3, {"v_head_dim": -1}, BadModelConfig, "v_head_dim is -1"),
        (V3, {"n_group": 7}, BadModelConfig, "n_routed_experts 64 is not a multiple of n_group 7"),
        (V3, {"num_experts_per_tok": 33}, BadModelConfig, "num_experts_per_tok is 33, but 4 groups have 32"),
        (V3, {"rope_scaling": {"type": "yarn", "factor": 2.0, "alpha": 3}}, UnsupportedModel, "alpha"),
        (V3, {"sliding_window": 7}, UnsupportedModel, "sliding_window"),
        (
            V2_LITE,
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            UnsupportedModel,
            "quant_method",
        ),
    ],
)
def test_unsupported_models_are_refused(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], error: type[CheckpointError], words: str
) -> None:
    with pytest.raises(error) as raised:
        read(tmp_path, config, **changes)
    assert words in str(raised.value)


LATENT = Latent(rank=8, rotary_size=4, plain_size=6, value_size=5)
ATTENTION = latent_attention(LATENT, n_heads=4, rotary=Rotary(size=4))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_kv_heads": 2}, "latent attention has one key/value head of 12 elements, not 2 of 12"),
        ({"head_size": 16}, "one key/value head of 12 elements, not 1 of 16"),
        ({"rotary": None}, "rotates 4 elements, not 0"),
        ({"rotary": Rotary(size=6)}, "rotates 4 elements, not 6"),
        ({"scores": Scores(window=3)}, "a window, a soft cap"),
        ({"qk_norm": QKNorm(norm=Norm(kind="rms_norm"))}, "a qk-norm"),
        ({"causal": False}, "not causal"),
    ],
)
def test_parts_that_do_not_go_together(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(ATTENTION, **changes)


def test_checks_of_latent_attention() -> None:
    with pytest.raises(ConfigError, match="latent_rank is 0"):
        replace(LATENT, rank=0)
    with pytest.raises(ConfigError, match="only rms_norm"):
        replace(LATENT, norm=Norm())


def test_heads_over_devices() -> None:
    """Each device has the single K/V head, and its share of the query heads."""
    split: Attention = ATTENTION.repeated(2)
    assert (split.n_kv_heads, split.group, split.kv_width, split.scale) == (2, 2, 24, ATTENTION.scale)
    assert ATTENTION.scale == 10**-0.5


def test_the_factor_of_scores() -> None:
    yarn = Scaling(kind="yarn", factor=40.0, original_positions=4096, mscale=1.0, mscale_all_dim=1.0)
    assert Rotary(size=64, scaling=yarn).score_factor == pytest.approx(1.3688879454113936**2)
    assert Rotary(size=64).score_factor == 1.0
    assert Rotary(size=64, scaling=Scaling(kind="yarn", factor=2.0, original_positions=8)).score_factor == 1.0
