"""Gemma 4's config.json: heads by layer, whose keys and values a layer takes, and what is refused."""

from typing import Any

import pytest

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.hf_config import hf_config_of, model_of
from orca_jax.families.presets import PRESETS
from orca_jax.planning.stage_memory import slot_bytes

KINDS = ["sliding_attention", "full_attention"] * 3
SMALL: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 50,
    "hidden_size": 12,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "global_head_dim": 8,
    "max_position_embeddings": 64,
    "intermediate_size": 20,
    "layer_types": KINDS,
    "sliding_window": 5,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 50,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
FAMILY_OF_EXPERTS = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 8,
}


def test_the_last_layers_take_keys_and_values_of_their_kind() -> None:
    model = model_of(SMALL)
    assert [attention.kv_from for attention in model.attentions] == [None, None, None, 1, 2, 1]
    assert [attention.head_size for attention in model.attentions] == [6, 8] * 3
    sizes = [layer.feed_forward.size for layer in model.layers if layer.feed_forward]
    assert sizes == [20, 20, 20, 40, 40, 40]
    rotaries = [attention.rotary for attention in model.attentions[:2]]
    assert [rotary and (rotary.size, rotary.base, rotary.n_turned) for rotary in rotaries] == [
        *((6, 1e4, None), (8, 1e6, 1))
    ]


@pytest.mark.parametrize("changes", [{}, FAMILY_OF_EXPERTS, {"hidden_size_per_layer_input": 0}])
def test_a_written_config_is_read_as_the_same_model(changes: dict[str, Any]) -> None:
    model = model_of(SMALL | changes)
    assert model_of(hf_config_of(model)) == model


def test_heads_may_be_listed_by_layer() -> None:
    """As transformers 5.24 saves them."""
    plain = {name: value for name, value in SMALL.items() if name != "global_head_dim"}
    listed = {str(i): {"head_dim": 8} for i in (1, 3, 5)}
    assert model_of(plain | {"per_layer_config": listed}) == model_of(SMALL)
    with pytest.raises(UnsupportedModel, match="expected the same heads in all layers of full_attention"):
        model_of(plain | {"per_layer_config": {"1": {"head_dim": 8}}})


def test_the_last_layer_has_no_window() -> None:
    """transformers says so, whatever the file says."""
    assert model_of(SMALL | {"layer_types": [*KINDS[:5], "sliding_attention"]}) == model_of(SMALL)


def test_experts_are_beside_the_dense_feed_forward() -> None:
    layer = model_of(SMALL | FAMILY_OF_EXPERTS).layers[1]
    assert layer.feed_forward is not None and layer.feed_forward.experts is None
    assert layer.beside is not None and layer.beside.experts is not None
    assert (layer.beside.size, layer.beside.experts.top_k, layer.beside.experts.scaled) == (8, 2, True)
    assert layer.attention is not None
    assert (layer.attention.values_are_keys, layer.attention.n_kv_heads) == (True, 1)


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (BadModelConfig, {"num_kv_shared_layers": 5}, "num_kv_shared_layers: expected a number of last"),
        (UnsupportedModel, {"use_bidirectional_attention": "all"}, "attention to later tokens"),
        (UnsupportedModel, {"vocab_size_per_layer_input": 60}, "expected vocab_size, 50, found 60"),
        (
            UnsupportedModel,
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "factor": 8.0}}},
            "rope_parameters.full_attention: a factor",
        ),
    ],
)
def test_what_is_not_computed_is_refused(error: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(error, match=message):
        model_of(SMALL | changes)


def test_a_token_of_e2b_is_cached_once_for_layers_that_share() -> None:
    model = PRESETS["gemma-4-e2b"]
    # Of 35 layers 15 have keys and values: 12 of one head of 256 elements, 3 of one of 512.
    assert slot_bytes(model, range(35), 1, 2) == 2 * 2 * (12 * 256 + 3 * 512)
