"""Nemotron-H's config.json: kinds of layers in both spellings, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import BadModelConfig, CorruptFile, UnsupportedModel
from orca_jax.families.hf_config import hf_config_of, model_of, read_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.recurrence_config import Mamba2
from tests.host.families.published_checkpoints import PUBLISHED

SMALL: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-*E",
    "vocab_size": 50,
    "hidden_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "intermediate_size": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 16,
    "moe_latent_size": 10,
}
# The names of older files, and of transformers 5.24.
SPELLINGS = (
    ("mamba", "mlp", "attention", "moe"),
    ("linear_attention", "mlp", "full_attention", "moe"),
)


def kinds_of(model: ModelConfig) -> list[str]:
    def kind(i: int) -> str:
        layer = model.layers[i]
        parts = {
            "M": layer.recurrence,
            "*": layer.attention,
            "-E"[layer.experts is not None]: layer.feed_forward,
        }
        return "".join(name for name, part in parts.items() if part is not None)

    return [kind(i) for i in range(model.n_layers)]


def test_each_layer_has_one_part() -> None:
    model = model_of(SMALL)
    assert kinds_of(model) == ["M", "-", "*", "E"]
    assert [layer.norms for layer in model.layers] == [
        *(("attn_norm",), ("mlp_norm",), ("attn_norm",), ("mlp_norm",))
    ]
    assert model.attention.rotary is None and model.positions is None
    experts = model.layers[3].experts
    assert experts is not None
    assert (experts.shared_size, experts.latent_size, experts.multiplier) == (16, 10, 1.0)
    assert not model.feed_forward.gated and model.feed_forward.activation == "relu2"
    assert model_of(hf_config_of(model)) == model


@pytest.mark.parametrize("kinds", SPELLINGS)
def test_kinds_may_be_listed(kinds: tuple[str, ...]) -> None:
    listed = {name: value for name, value in SMALL.items() if name != "hybrid_override_pattern"}
    assert model_of(listed | {"layers_block_type": list(kinds)}) == model_of(SMALL)
    assert model_of(SMALL | {"layers_block_type": list(kinds), "num_hidden_layers": 4}) == model_of(SMALL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "MX"}, "hybrid_override_pattern: expected a kind for each layer"),
        ({"hybrid_override_pattern": ""}, "expected a kind for each layer, of M, [*], - and E"),
        ({"layers_block_type": ["mamba", "conv"]}, "layers_block_type: expected a kind for each layer"),
        ({"layers_block_type": ["mamba"]}, "disagrees with itself: hybrid_override_pattern is M-[*]E"),
        ({"num_hidden_layers": 5}, "disagrees with itself: num_hidden_layers is 5, but 4 kinds"),
        ({"hybrid_override_pattern": "M-E"}, "a model without any attention layer is not supported"),
    ],
)
def test_kinds_that_cannot_be(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | changes))
    with pytest.raises(BadModelConfig, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_bias": True}, "mlp_bias: expected false, found true; a bias in layers with experts"),
        ({"n_shared_experts": 2}, "n_shared_experts: expected 1, found 2"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act: expected silu, found gelu"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        model_of(SMALL | changes)


def test_an_infinite_number_is_read(tmp_path: Path) -> None:
    """transformers 4 writes Infinity, which is not JSON; it may stand nowhere else."""
    config = PUBLISHED["nvidia/NVIDIA-Nemotron-Nano-9B-v2"].config
    text = json.dumps(config)
    assert "[0.0, Infinity]" in text
    path = tmp_path / "config.json"
    path.write_text(text)
    model = read_config(tmp_path)
    mixer = model.layers[0].recurrence
    assert isinstance(mixer, Mamba2) and (mixer.least_step, mixer.most_step) == (0.001, None)
    path.write_text(text.replace('"layer_norm_epsilon": 1e-05', '"layer_norm_epsilon": Infinity'))
    with pytest.raises(BadModelConfig, match="layer_norm_epsilon: expected a number"):
        read_config(tmp_path)
    path.write_text(text.replace("Infinity", "-Infinity"))
    with pytest.raises(CorruptFile, match="it holds -Infinity, which is not JSON"):
        read_config(tmp_path)
