"""A ModelConfig's parts refuse what is not computed, and a ModelConfig comes back from its JSON."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orca_jax.errors import ConfigError
from orca_jax.families.attention_config import QKNorm, Scores
from orca_jax.families.config_json import config_from_json, config_to_json, plain_error
from orca_jax.families.model_config import (
    Attention,
    Embedding,
    FeedForward,
    Layer,
    LearnedPositions,
    ModelConfig,
    Norm,
)
from orca_jax.families.presets import PRESETS
from orca_jax.families.rotary import Rotary, Scaling
from tests.gpt_config import gpt_config

ATTENTION = Attention(n_heads=2, n_kv_heads=2, head_size=4)
LAYER = Layer(attention=ATTENTION, feed_forward=FeedForward(size=16))
WIDER = replace(LAYER, feed_forward=FeedForward(size=24, activation="silu", bias=False), residual="post")
MODEL = ModelConfig(
    vocab_size=10,
    n_positions=8,
    hidden_size=8,
    layers=(LAYER, LAYER, LAYER, WIDER, LAYER),
    embedding=Embedding(size=6, tied=False),
    positions=None,
    final_norm=Norm(kind="rms_norm", eps=1e-6),
    vocab_multiple=4,
    bos_token_id=1,
    eos_token_ids=(2, 3),
)


UNKNOWN: Any = "swish"
UNKNOWN_PLACE: Any = "sideways"
SIZES: dict[str, Any] = {
    "vocab_size": 10,
    "n_positions": 8,
    "hidden_size": 8,
    "n_layers": 2,
    "n_heads": 2,
    "ffn_size": 16,
}


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (
            lambda: Attention(n_heads=4, n_kv_heads=3, head_size=8),
            "n_heads 4 is not a multiple of n_kv_heads 3",
        ),
        (lambda: Scores(window=0), "window is 0"),
        (lambda: Scores(soft_cap=-1.0), "attention_soft_cap is -1.0"),
        (lambda: Rotary(size=7), "rotary_size is 7.*pairs"),
        (
            lambda: replace(ATTENTION, rotary=Rotary(size=6)),
            "rotary_size is 6; it must be at most the head_size 4",
        ),
        (lambda: Scaling(kind="llama3"), "llama3 needs original_positions"),
        (
            lambda: Rotary(size=4, scaling=Scaling(kind="longrope", original_positions=8)),
            "short_factors are 0; longrope needs one for each of the 2 pairs",
        ),
        (lambda: QKNorm(norm=Norm()), "qk-norm is 'layer_norm'"),
        (lambda: Attention(n_heads=0, n_kv_heads=0, head_size=8), "n_heads is 0"),
        (lambda: Attention(n_heads=True, n_kv_heads=1, head_size=8), "n_heads is True"),
        (lambda: FeedForward(size=1 << 21), "ffn_size is 2097152"),
        (lambda: FeedForward(size=8, activation=UNKNOWN), "activation is 'swish'.*relu, silu"),
        (lambda: Norm(kind="rms_norm_plus_one"), "rms_norm_plus_one.*layer_norm, rms_norm"),  # pyright: ignore[reportArgumentType]
        (lambda: Norm(eps=0.0), "norm_eps is 0.0"),
        (lambda: replace(LAYER, residual=UNKNOWN_PLACE), "residual is 'sideways'.*pre, post"),
        (lambda: LearnedPositions(offset=-1), "position_offset is -1"),
        (lambda: Embedding(size=0), "embedding_size is 0"),
        (lambda: replace(MODEL, layers=()), "n_layers is 0"),
        (lambda: replace(MODEL, layers=(LAYER,) * 1025), "n_layers is 1025"),
        (
            lambda: replace(
                MODEL, layers=(LAYER, replace(LAYER, attention=replace(ATTENTION, n_heads=1, n_kv_heads=1)))
            ),
            "layer 1 has 1 heads of 4 elements, layer 0 2",
        ),
        (lambda: replace(MODEL, eos_token_ids=(10,)), "special token id is 10"),
        (lambda: gpt_config(**{**SIZES, "n_layers": 10**9}), "n_layers is 1000000000"),
        (lambda: gpt_config(**{**SIZES, "n_heads": 3}), "hidden_size 8 is not a multiple of n_heads 3"),
    ],
)
def test_unsupported_features_are_refused(made: Callable[[], object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        made()


@pytest.mark.parametrize("config", [MODEL, *PRESETS.values()])
def test_json_has_every_field(config: ModelConfig) -> None:
    assert config_from_json(json.loads(json.dumps(config_to_json(config))), plain_error) == config


def test_layers_that_are_alike_are_one_entry() -> None:
    assert [layer["count"] for layer in config_to_json(MODEL)["layers"]] == [3, 1, 1]
    assert [layer["count"] for layer in config_to_json(PRESETS["gpt3-341b"])["layers"]] == [120]


def test_fields_with_a_default_may_be_omitted() -> None:
    layer = {"attention": {"n_heads": 2, "n_kv_heads": 2, "head_size": 4}, "feed_forward": {"size": 16}}
    values = {"vocab_size": 10, "n_positions": 8, "hidden_size": 8, "embedding": {"size": 8}}
    expected = gpt_config(**{**SIZES, "n_layers": 1})
    assert config_from_json({**values, "layers": [layer]}, plain_error) == expected


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.pop("vocab_size"), "model.vocab_size: expected a whole number, found None"),
        (lambda m: m.update(vocab_size=10.0), "model.vocab_size: expected a whole number, found 10.0"),
        (lambda m: m.update(hidden_size=True), "model.hidden_size: expected a whole number, found True"),
        (lambda m: m.update(layers=[]), r"model.layers: expected a list of layers, found \[\]"),
        (lambda m: m.update(layers=[3]), r"model.layers\[0\]: expected an object, found 3"),
        (lambda m: m["layers"][0].update(count=0), "n_layers is 0"),
        (lambda m: m["layers"][0].update(count=10**9), "n_layers is 1000000000"),
        (lambda m: m["layers"][1].update(count=1023), "n_layers is 1026"),
        (
            lambda m: m["layers"][1].update(experts=8),
            r"layers\[1\].experts: expected one of attention, ",
        ),
        (lambda m: m["layers"][1]["norm"].update(eps="x"), r"layers\[1\].norm.eps: expected a number, found"),
        (
            lambda m: m["layers"][0]["feed_forward"].update(bias=1),
            "bias: expected true or false, found 1",
        ),
        (lambda m: m["layers"][0]["feed_forward"].update(gated=1), "gated: expected true or false, found 1"),
        (
            lambda m: m.update(layers=[m["layers"][0] | {"attention": None}]),
            "a model without any attention layer",
        ),
        (lambda m: m["layers"][0].update(attention=3), "attention: expected an object or null, found 3"),
        (lambda m: m.update(positions=[]), "model.positions: expected an object or null"),
        (lambda m: m.update(eos_token_ids=[1.5]), "model.eos_token_ids: expected a whole number"),
        (lambda m: m.update(eos_token_ids=3), "model.eos_token_ids: expected a list"),
        (lambda m: m.update(bos_token_id="x"), "model.bos_token_id: expected a whole number or null"),
    ],
)
def test_wrong_json_is_refused_by_name(change: Callable[[Any], object], why: str) -> None:
    values = json.loads(json.dumps(config_to_json(MODEL)))
    change(values)
    with pytest.raises(ConfigError, match=why):
        config_from_json(values, plain_error)
