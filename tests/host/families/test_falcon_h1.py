"""Falcon-H1's config.json: both kinds of mixers in each layer, and where its multipliers go."""

from typing import Any

import pytest

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.hf_config import hf_config_of, model_of
from orca_jax.families.recurrence_config import Mamba2
from orca_jax.planning.stage_memory import slot_bytes, state_bytes

SMALL: dict[str, Any] = {
    "model_type": "falcon_h1",
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "intermediate_size": 20,
    "mamba_d_ssm": 24,
    "mamba_n_heads": 4,
    "mamba_d_state": 5,
}


def test_a_layer_keeps_keys_values_and_states() -> None:
    model = model_of(SMALL)
    assert all(layer.has_both for layer in model.layers) and model.has_state
    assert slot_bytes(model, range(2), 1, 2) == 2 * 2 * 8 * 2
    channels = 24 + 2 * 5
    assert state_bytes(model, range(2), 1, 2) == 2 * (3 * channels * 2 + 4 * 5 * 6 * 4)


def test_multipliers_of_inputs_are_those_of_results() -> None:
    """Attention is linear in its values and its scores in queries and keys, as long as nothing has a bias."""
    changes = {
        **{"attention_in_multiplier": 0.5, "attention_out_multiplier": 3.0, "key_multiplier": 2.0},
        **{"ssm_in_multiplier": 2.0, "ssm_multipliers": [1.0, 2.0, 3.0, 4.0, 5.0], "ssm_out_multiplier": 0.7},
        **{"mlp_multipliers": [1.5, 0.5], "embedding_multiplier": 6.0, "lm_head_multiplier": 0.1},
    }
    model = model_of(SMALL | changes)
    layer, mixer = model.layers[0], model.layers[0].recurrence
    assert isinstance(mixer, Mamba2) and mixer.norm is None
    assert mixer.multipliers == (2.0, 4.0, 6.0, 8.0, 10.0)
    assert model.attention.scale == 8**-0.5 * 2.0 * 0.25
    assert (layer.attention_multiplier, layer.recurrence_multiplier) == (1.5, 0.7)
    assert (model.feed_forward.gate_multiplier, model.feed_forward.multiplier) == (1.5, 0.5)
    assert (model.embedding.multiplier, model.logit_multiplier) == (6.0, 0.1)
    assert model_of(hf_config_of(model)) == model


@pytest.mark.parametrize("changes", [{}, {"mamba_rms_norm": True, "attention_bias": True, "mlp_bias": True}])
def test_a_written_config_is_read_as_the_same_model(changes: dict[str, Any]) -> None:
    model = model_of(SMALL | changes)
    assert model_of(hf_config_of(model)) == model


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (
            UnsupportedModel,
            {"attention_bias": True, "attention_in_multiplier": 0.5},
            "attention_in_multiplier: expected 1 with attention_bias, found 0.5",
        ),
        (
            UnsupportedModel,
            {"mamba_proj_bias": True, "ssm_in_multiplier": 2.0},
            "ssm_in_multiplier: expected 1 with mamba_proj_bias, found 2.0",
        ),
        (BadModelConfig, {"ssm_multipliers": [1.0]}, "ssm_multipliers: expected 5 numbers, found"),
        (BadModelConfig, {"mamba_d_head": 5}, "mamba_n_heads 4 times mamba_d_head 5 is not 24"),
    ],
)
def test_what_is_not_computed_is_refused(error: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(error, match=message):
        model_of(SMALL | changes)
