"""Llama 4's config.json: which layers attend in chunks, are rotated, and have experts."""

from typing import Any

import numpy as np
import pytest

from orca_jax.errors import BadModelConfig
from orca_jax.families.attention_config import Temperature
from orca_jax.families.hf_config import hf_config_of, model_of
from orca_jax.families.rotary import Rotary, Scaling

SMALL: dict[str, Any] = {
    "model_type": "llama4_text",
    "vocab_size": 50,
    "hidden_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "intermediate_size": 8,
    "intermediate_size_mlp": 20,
    "interleave_moe_layer_step": 2,
    "num_local_experts": 4,
    "attention_chunk_size": 16,
    "floor_scale": 32,
}


def test_every_fourth_layer_sees_all_tokens_without_positions() -> None:
    model = model_of(SMALL)
    assert [each.scores.chunked for each in model.attentions] == [True, True, True, False]
    assert [each.scores.window for each in model.attentions] == [16, 16, 16, None]
    assert [each.rotary is not None for each in model.attentions] == [True, True, True, False]
    assert [each.qk_norm is not None for each in model.attentions] == [True, True, True, False]
    temperatures = [each.scores.temperature for each in model.attentions]
    assert temperatures == [None, None, None, Temperature(scale=0.1, step=32, offset=1)]


def test_every_second_layer_has_experts() -> None:
    model = model_of(SMALL)
    assert [layer.experts is not None for layer in model.layers] == [False, True, False, True]
    assert [layer.feed_forward.size for layer in model.layers if layer.feed_forward] == [20, 8, 20, 8]
    experts = model.layers[1].experts
    assert experts is not None
    assert (experts.top_k, experts.shared_size, experts.weighs_inputs) == (1, 8, True)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_qk_norm": False, "attn_temperature_tuning": False, "attention_bias": True},
        {"no_rope_layers": [1, 0, 1, 0], "moe_layers": [0, 1, 2, 3]},
        {"layer_types": ["full_attention"] * 4, "attention_chunk_size": None},
    ],
)
def test_a_written_config_is_read_as_the_same_model(changes: dict[str, Any]) -> None:
    model = model_of(SMALL | changes)
    assert model_of(hf_config_of(model)) == model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_chunk_size": None}, "disagrees with itself: layers have chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types: expected 4 of full_attention, chunked"),
        ({"moe_layers": [4]}, "moe_layers: expected layers from 0 to 3, found"),
        ({"interleave_moe_layer_step": 0}, "interleave_moe_layer_step: expected at least 1, found 0"),
    ],
)
def test_layers_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadModelConfig, match=message):
        model_of(SMALL | changes)


def test_a_scaling_may_have_no_ramp() -> None:
    """Frequencies that turn more than once in the original positions stay, all others are divided."""
    scaling = Scaling(
        kind="llama3", factor=16.0, original_positions=64, low_freq_factor=1.0, high_freq_factor=1.0
    )
    plain = Rotary(size=16).frequencies(1024)
    found = Rotary(size=16, scaling=scaling).frequencies(1024)
    turns = plain * 64 / (2 * np.pi)
    np.testing.assert_allclose(found, np.where(turns > 1, plain, plain / 16), rtol=1e-6)
    assert 0 < (turns > 1).sum() < 8
