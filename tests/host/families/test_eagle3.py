"""config.json of EAGLE-3 heads, in each form that is published."""

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import BadModelConfig, HeadMismatch, UnsupportedModel
from orca_jax.families.attention_config import QKNorm
from orca_jax.families.eagle3 import eagle3_head
from orca_jax.families.hf_config import HFConfig
from orca_jax.families.model_config import ModelConfig, alike
from orca_jax.families.parameters import parameter_shapes
from orca_jax.families.presets import PRESETS

# Of the paper's authors, for Llama 3.1 8B.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}
# Of SGLang's trainers, for a Qwen 3 model.
QWEN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "draft_vocab_size": 32000,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32], "use_aux_hidden_state": True},
}
# Of speculators, whose layer's fields are apart.
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "draft_vocab_size": 32000,
    "dtype": "bfloat16",
    "eagle_aux_hidden_state_layer_ids": None,
    "embed_requires_grad": False,
    "has_no_defaults_at_init": False,
    "norm_before_fc": True,
    "norm_before_residual": True,
    "norm_output": True,
    "fc_norm": False,
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "Qwen/Qwen3-8B"}},
    "speculators_model_type": "eagle3",
    "speculators_version": "0.5.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        **{name: value for name, value in QWEN.items() if name not in ("eagle_config", "draft_vocab_size")},
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "layer_types": ["full_attention"],
        "tie_word_embeddings": True,
    },
    "transformers_version": "4.57.1",
}
SERVED_LLAMA, SERVED_QWEN = PRESETS["llama-3.1-8b"], PRESETS["qwen3-8b"]


def read(
    directory: Path, fields: dict[str, Any], served: ModelConfig, tensors: Collection[str] | None = ()
) -> HFConfig:
    (directory / "config.json").write_text(json.dumps(fields))
    return eagle3_head(directory, served, tensors)


def test_a_head_of_the_papers_authors(tmp_path: Path) -> None:
    found = read(tmp_path, LLAMA, SERVED_LLAMA)
    reads = found.model.reads
    assert found.note == "" and reads is not None
    assert (reads.layers, reads.size, reads.n_drafted) == ((2, 16, 29), 4096, 32000)
    assert reads.shares_embedding and not (reads.norm_first or reads.norm_states or reads.norm_output)
    assert (found.model.vocab_size, found.model.n_positions) == (128256, 2048)
    shapes = parameter_shapes(found.model)
    assert "token_embedding" not in shapes
    assert shapes["layers.0.qkv.weight"] == (6, 1024, 8192)  # queries, keys and values of 2 x 4096
    assert shapes["states.project"] == (4096, 3 * 4096)
    assert shapes["head.weight"] == (32000, 4096) and shapes["head.offsets"] == (32000,)
    # Some of the first name the architecture of a whole Llama.
    assert read(tmp_path, {**LLAMA, "architectures": ["LlamaForCausalLM"]}, SERVED_LLAMA) == found


def test_layers_that_are_named_by_their_outputs(tmp_path: Path) -> None:
    found = read(tmp_path, QWEN, SERVED_QWEN, ["embed_tokens.weight"])
    assert found.model.reads is not None and found.model.reads.layers == (2, 18, 33)
    assert parameter_shapes(found.model)["token_embedding"] == (151936, 4096)


@pytest.mark.parametrize(
    "ids, layers", [(None, (2, 18, 33)), ([30, 1, 12], (1, 12, 30)), ([0, 1, 35], (0, 1, 35))]
)
def test_a_head_of_speculators(tmp_path: Path, ids: list[int] | None, layers: tuple[int, ...]) -> None:
    """Layers are named by their inputs, and states of lower layers come first, in whatever order."""
    found = read(tmp_path, {**SPECULATORS, "eagle_aux_hidden_state_layer_ids": ids}, SERVED_QWEN, None)
    reads, attention = found.model.reads, found.model.attention
    assert reads is not None and reads.layers == layers and reads.shares_embedding
    assert reads.norm_first and reads.norm_states and reads.norm_output
    assert isinstance(attention.qk_norm, QKNorm) and attention.qk_norm.over == "head"
    assert parameter_shapes(found.model)["states.input_norm.scale"] == (3 * 4096,)


@pytest.mark.parametrize(
    "fields, served, kind, message",
    [
        (
            {"vocab_size": 130000},
            SERVED_LLAMA,
            HeadMismatch,
            "vocab_size is 130000, and the served model's is",
        ),
        ({"target_hidden_size": 5120}, SERVED_LLAMA, HeadMismatch, "its model is 5120, .* model's is 4096"),
        ({}, replace(SERVED_LLAMA, layers=alike(SERVED_LLAMA.layers[0], 5)), HeadMismatch, "layers 2, 2, 2;"),
        (
            {"draft_vocab_size": 200_000},
            SERVED_LLAMA,
            BadModelConfig,
            "draft_vocab_size: expected 1 to vocab_",
        ),
        ({"num_hidden_layers": 2}, SERVED_LLAMA, UnsupportedModel, "num_hidden_layers: expected 1, found 2"),
        (
            {"model_type": "gpt2"},
            SERVED_LLAMA,
            UnsupportedModel,
            "model_type is llama or qwen3, found .* gpt2",
        ),
        (
            {"architectures": []},
            SERVED_LLAMA,
            UnsupportedModel,
            r"one of LlamaForCausalLMEagle3, .* found \[\]",
        ),
        (
            {"fc_norm": True},
            SERVED_LLAMA,
            UnsupportedModel,
            "fc_norm: expected false, found true; a head that",
        ),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            *(
                SERVED_LLAMA,
                UnsupportedModel,
                "eagle_config.use_aux_hidden_state: expected true, found false",
            ),
        ),
        (
            {"eagle_config": {"residual_scale": 0.5}},
            *(SERVED_LLAMA, UnsupportedModel, "eagle_config.residual_scale is 0.5: this field is not known"),
        ),
        ({"quantization_config": {"bits": 4}}, SERVED_LLAMA, UnsupportedModel, "quantized EAGLE-3 head"),
        ({"hidden_size": "wide"}, SERVED_LLAMA, BadModelConfig, "hidden_size: expected a whole number"),
        ({"num_key_value_heads": 5}, SERVED_LLAMA, BadModelConfig, "config.json: .*num_attention_heads"),
        ({}, PRESETS["t5-small"], HeadMismatch, "needs a decoder; choose ngram"),
    ],
)
def test_other_heads_are_refused(
    tmp_path: Path, fields: dict[str, Any], served: ModelConfig, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        read(tmp_path, {**LLAMA, **fields}, served)
