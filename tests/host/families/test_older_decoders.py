"""config.json of GPT-NeoX, GPT-J, BLOOM and Falcon as published: shape, size, spellings, a way back.

The numbers of parameters are the published ones.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import BadModelConfig, CheckpointError, UnsupportedModel
from orca_jax.families.decoders.falcon import FALCON
from orca_jax.families.hf_config import hf_config_of, read_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import parameter_shapes

Config = dict[str, Any]

PYTHIA: Config = {
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "bos_token_id": 0,
    "classifier_dropout": 0.1,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
GPTJ: Config = {
    "architectures": ["GPTJForCausalLM"],
    "model_type": "gptj",
    "activation_function": "gelu_new",
    "attn_pdrop": 0.0,
    "bos_token_id": 50256,
    "embd_pdrop": 0.0,
    "eos_token_id": 50256,
    "gradient_checkpointing": False,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "n_embd": 4096,
    "n_head": 16,
    "n_inner": None,
    "n_layer": 28,
    "n_positions": 2048,
    "resid_pdrop": 0.0,
    "rotary": True,
    "rotary_dim": 64,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "tie_word_embeddings": False,
    "tokenizer_class": "GPT2Tokenizer",
    "vocab_size": 50400,
}
BLOOM: Config = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True,
    "n_embed": 1024,
    "n_inner": None,
    "n_layer": 24,
    "num_attention_heads": 16,
    "offset_alibi": 100,
    "pad_token_id": 3,
    "pretraining_tp": 1,
    "skip_bias_add": True,
    "skip_bias_add_qkv": False,
    "slow_but_exact": False,
    "unk_token_id": 0,
    "use_cache": True,
    "vocab_size": 250880,
}
FALCON_7B: Config = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_falcon.FalconConfig",
        "AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM",
    },
    "bias": False,
    "bos_token_id": 11,
    "eos_token_id": 11,
    "hidden_dropout": 0.0,
    "hidden_size": 4544,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "parallel_attn": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 65024,
}
FALCON_40B = FALCON_7B | {
    "hidden_size": 8192,
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
}
FALCON_RW = FALCON_7B | {
    "alibi": True,
    "bias": True,
    "hidden_size": 2048,
    "multi_query": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "parallel_attn": False,
    "vocab_size": 50304,
}


def read(tmp_path: Path, config: Config, **changes: Any) -> ModelConfig:
    values = {name: value for name, value in (config | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "n_parameters"),
    [
        (PYTHIA, 162_322_944),
        (GPTJ, 6_050_882_784),
        (BLOOM, 559_214_592),
        (FALCON_7B, 6_921_720_704),
        (FALCON_40B, 41_303_293_952),
        (FALCON_RW, 1_311_625_216),
    ],
)
def test_published_configs_have_their_size_and_a_way_back(
    tmp_path: Path, config: Config, n_parameters: int
) -> None:
    model = read(tmp_path, config)
    assert sum(map(math.prod, parameter_shapes(model).values())) == n_parameters
    assert model.n_positions == 2048 and model.positions is None
    written = hf_config_of(model)
    assert written["model_type"] == config["model_type"]
    assert read(tmp_path, written) == model


def test_shapes_of_the_families(tmp_path: Path) -> None:
    pythia, gptj, bloom = (read(tmp_path, config) for config in (PYTHIA, GPTJ, BLOOM))
    assert pythia.attention.rotary is not None and gptj.attention.rotary is not None
    assert pythia.attention.rotary.size == 16 and not pythia.attention.rotary.interleaved
    assert gptj.attention.rotary.interleaved and gptj.head_bias
    assert [model.layers[0].residual for model in (pythia, gptj, bloom)] == [
        *("parallel_two_norms", "parallel", "pre"),
    ]
    assert bloom.attention.scores.alibi == 1.0 and bloom.embedding.norm is not None
    small, large, rw = (read(tmp_path, config) for config in (FALCON_7B, FALCON_40B, FALCON_RW))
    assert [model.n_kv_heads for model in (small, large, rw)] == [1, 8, 32]
    assert [model.layers[0].residual for model in (small, large, rw)] == [
        *("parallel", "parallel_two_norms", "pre"),
    ]
    assert rw.attention.scores.alibi == 64**-0.5 and rw.attention.rotary is None


def test_old_and_new_spellings_say_the_same(tmp_path: Path) -> None:
    pythia = read(tmp_path, PYTHIA, rotary_emb_base=500, rotary_pct=0.5)
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    assert read(tmp_path, PYTHIA, rotary_emb_base=..., rotary_pct=..., rope_parameters=rope) == pythia
    assert read(tmp_path, PYTHIA, rotary_emb_base=500, rotary_pct=0.5, rope_theta=500.0) == pythia
    linear = {"type": "linear", "factor": 2.0}
    scaled = read(tmp_path, PYTHIA, rope_scaling=linear)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    assert read(tmp_path, PYTHIA, rope_parameters=rope) == scaled != read(tmp_path, PYTHIA)
    general = {"hidden_size": 1024, "n_head": 16, "n_embed": ..., "num_attention_heads": ...}
    assert read(tmp_path, BLOOM, **general, seq_length=2048) == read(tmp_path, BLOOM)
    assert read(tmp_path, FALCON_7B, num_kv_heads=71, ffn_hidden_size=4 * 4544) == read(tmp_path, FALCON_7B)
    general = {"hidden_size": 4096, "num_hidden_layers": 28, "n_embd": ..., "n_layer": ...}
    assert read(tmp_path, GPTJ, **general) == read(tmp_path, GPTJ)


def test_falcons_norms_have_the_names_of_its_layers(tmp_path: Path) -> None:
    for config, name in ((FALCON_7B, "input_layernorm"), (FALCON_40B, "ln_attn")):
        stored = FALCON.stored_name("layers.3.attn_norm.scale", "transformer.", read(tmp_path, config))
        assert stored.names == (f"transformer.h.3.{name}.weight",)


@pytest.mark.parametrize(
    ("config", "changes", "error", "words"),
    [
        (PYTHIA, {"rope_theta": 5e4}, BadModelConfig, "rotary_emb_base is 10000, rope_theta is 50000"),
        (PYTHIA, {"rotary_pct": 0.01}, BadModelConfig, "rotary_size is 0"),
        (PYTHIA, {"num_key_value_heads": 4}, UnsupportedModel, "num_key_value_heads is 4"),
        (PYTHIA, {"rope_scaling": {"type": "spiral"}}, UnsupportedModel, "spiral"),
        (PYTHIA, {"num_hidden_layers": 10**15}, BadModelConfig, "num_hidden_layers is 10000"),
        (GPTJ, {"rotary": False}, UnsupportedModel, "rotary: expected true"),
        (GPTJ, {"rotary_dim": 63}, BadModelConfig, "rotary_dim is 63"),
        (GPTJ, {"rotary_dim": 512}, BadModelConfig, "rotary_dim is 512"),
        (GPTJ, {"n_head": 15}, BadModelConfig, "n_embd 4096 is not a multiple of n_head 15"),
        (GPTJ, {"rotary_dim": ...}, BadModelConfig, "rotary_dim: expected a whole number"),
        (BLOOM, {"apply_residual_connection_post_layernorm": True}, UnsupportedModel, "apply_residual"),
        (BLOOM, {"slow_but_exact": True}, UnsupportedModel, "slow_but_exact"),
        (BLOOM, {"n_inner": 1000}, UnsupportedModel, "n_inner is 1000"),
        (BLOOM, {"hidden_size": 512}, BadModelConfig, "hidden_size is 512, n_embed is 1024"),
        (FALCON_7B, {"num_ln_in_parallel_attn": 2}, UnsupportedModel, "num_ln_in_parallel_attn 2"),
        (FALCON_40B, {"parallel_attn": False}, UnsupportedModel, "parallel_attn False"),
        (FALCON_40B, {"num_kv_heads": 9}, BadModelConfig, "num_attention_heads 128 is not a multiple"),
        (FALCON_7B, {"num_kv_heads": 9}, BadModelConfig, "num_kv_heads is 9"),
        (FALCON_RW, {"num_kv_heads": 8}, BadModelConfig, "num_kv_heads is 8"),
        (FALCON_7B, {"partial_rotary_factor": 0.5}, UnsupportedModel, "partial_rotary_factor"),
        (FALCON_7B, {"quantization_config": {"bits": 4}}, UnsupportedModel, "quantization_config"),
    ],
)
def test_unsupported_options_are_refused(
    tmp_path: Path, config: Config, changes: Config, error: type[CheckpointError], words: str
) -> None:
    with pytest.raises(error, match=words):
        read(tmp_path, config, **changes)
