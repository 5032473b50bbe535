"""The parts of a model with an encoder: refusals, weights and stages, and T5's buckets."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.errors import ConfigError
from orca_jax.families.attention_config import Attention, RelativeBias, Scores
from orca_jax.families.config_json import config_from_json, config_to_json, plain_error
from orca_jax.families.model_config import (
    Embedding,
    Encoder,
    FeedForward,
    Layer,
    LearnedPositions,
    ModelConfig,
    Norm,
)
from orca_jax.families.parameters import (
    encoder_layers_of,
    in_layers,
    parameter_table,
    stage_elements,
    stage_parameters,
)
from orca_jax.families.rotary import Rotary

ATTENTION = Attention(n_heads=2, n_kv_heads=2, head_size=5, scores=Scores(scale=1.0, relative=RelativeBias()))
NOT_CAUSAL = replace(ATTENTION, causal=False)
CROSS = replace(NOT_CAUSAL, scores=Scores(scale=1.0))
ENCODING = Layer(attention=NOT_CAUSAL, feed_forward=FeedForward(size=7, gated=True))
DECODING = Layer(attention=ATTENTION, feed_forward=FeedForward(size=6), cross=CROSS)
ENCODER = Encoder(
    layers=(ENCODING, ENCODING, replace(ENCODING, feed_forward=FeedForward(size=9))),
    n_positions=12,
    positions=LearnedPositions(offset=2),
    embedding_norm=Norm(),
    final_norm=Norm(kind="rms_norm"),
)
MODEL = ModelConfig(
    vocab_size=11,
    n_positions=10,
    hidden_size=8,
    layers=(DECODING, DECODING),
    embedding=Embedding(size=8),
    encoder=ENCODER,
    decoder_start_token_id=0,
    forced_bos_token_id=1,
    forced_eos_token_id=2,
)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: RelativeBias(n_buckets=2), "relative_buckets is 2; it must be even, and at least 4"),
        (lambda: RelativeBias(n_buckets=31), "relative_buckets is 31"),
        (lambda: RelativeBias(n_buckets=32, max_distance=16), "more than half of the 32"),
        (lambda: Scores(relative=RelativeBias(), alibi=1.0), "relative bias with ALiBi"),
        (
            lambda: replace(NOT_CAUSAL, scores=Scores(window=3, chunked=True)),
            "chunks, ALiBi or sinks in attention that",
        ),
        (
            lambda: replace(NOT_CAUSAL, scores=Scores(sinks=True)),
            "chunks, ALiBi or sinks in attention that",
        ),
        (lambda: replace(ATTENTION, n_heads=4), "a relative bias with grouped heads"),
        (lambda: replace(DECODING, cross=ATTENTION), "cross attention that is causal"),
        (lambda: replace(DECODING, cross=NOT_CAUSAL), "cross attention that is causal, or knows positions"),
        (lambda: replace(DECODING, cross=replace(CROSS, rotary=Rotary(size=4))), "knows positions"),
        (lambda: replace(DECODING, residual="both"), "residual is 'both'; with cross attention"),
        (lambda: replace(ENCODER, layers=()), "n_layers is 0"),
        (
            lambda: replace(ENCODER, layers=(replace(DECODING, cross=None),)),
            "an encoder's layer that is causal",
        ),
        (lambda: replace(ENCODER, n_positions=0), "encoder_positions is 0"),
        (lambda: replace(MODEL, encoder=None), "cross attention without an encoder"),
        (
            lambda: replace(MODEL, layers=(DECODING, replace(DECODING, cross=None))),
            "or an encoder without it",
        ),
        (
            lambda: replace(MODEL, layers=(replace(DECODING, attention=ENCODING.attention),)),
            "a decoder's layer that is not causal",
        ),
        (
            lambda: replace(MODEL, layers=(DECODING, replace(DECODING, cross=replace(CROSS, head_size=4)))),
            "cross attention of layer 1 has 2 heads of 4 elements, layer 0 2 heads of 5",
        ),
        (
            lambda: replace(
                MODEL,
                encoder=replace(
                    ENCODER,
                    layers=(replace(ENCODING, attention=replace(NOT_CAUSAL, n_heads=1, n_kv_heads=1)),),
                ),
            ),
            "encoder layer 0 has 1 heads of 5 elements",
        ),
        (lambda: replace(MODEL, embedding=Embedding(size=4)), "an embedding_size of its own"),
        (lambda: replace(MODEL, decoder_start_token_id=None), "decoder_start_token_id is None"),
        (lambda: replace(MODEL, decoder_start_token_id=11), "special token id is 11"),
        (lambda: replace(MODEL, forced_bos_token_id=-1), "special token id is -1"),
        (lambda: replace(MODEL, forced_eos_token_id=11), "special token id is 11"),
    ],
)
def test_unsupported_options_are_refused(made: Callable[[], object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        made()


def test_json_has_the_encoder_with_its_layers_by_count() -> None:
    values = json.loads(json.dumps(config_to_json(MODEL)))
    assert [layer["count"] for layer in values["encoder"]["layers"]] == [2, 1]
    assert config_from_json(values, plain_error) == MODEL
    values["encoder"]["layers"][1]["count"] = 0
    with pytest.raises(ConfigError, match="n_layers is 0"):
        config_from_json(values, plain_error)
    values["encoder"]["layers"] = {}
    with pytest.raises(ConfigError, match=r"model.encoder.layers: expected a list of layers, found \{\}"):
        config_from_json(values, plain_error)


def test_repeated_heads_are_those_of_every_attention() -> None:
    model = MODEL.with_kv_heads(1)
    assert model == MODEL
    assert MODEL.for_devices(2).padded_vocab_size == 12
    with pytest.raises(ConfigError, match="2 heads cannot be split over 3 devices"):
        MODEL.for_devices(3)


def test_the_weights_of_a_small_model() -> None:
    shapes = {name: parameter.shape for name, parameter in parameter_table(MODEL).items()}
    by_layer: dict[str, set[Any]] = {}
    for name, shape in shapes.items():
        by_layer.setdefault(in_layers(name)[0], set()).add(shape)
    attention = {"qkv.weight": (3, 10, 8), "qkv.bias": (3, 10), "out.weight": (8, 10), "out.bias": (8,)}
    norms = {f"{name}.{leaf}": (8,) for name in ("attn_norm", "mlp_norm") for leaf in ("scale", "bias")}
    shared = {**attention, **norms, "relative_bias": (32, 2), "down.bias": (8,)}
    decoding = {
        **shared,
        **{"cross_norm.scale": (8,), "cross_norm.bias": (8,)},
        **{"cross_q.weight": (10, 8), "cross_q.bias": (10,)},
        **{"cross_kv.weight": (2, 10, 8), "cross_kv.bias": (2, 10)},
        **{"cross_out.weight": (8, 10), "cross_out.bias": (8,)},
        **{"up.weight": (6, 8), "up.bias": (6,), "down.weight": (8, 6)},
    }
    expected = {
        "token_embedding": {(11, 8)},
        "position_embedding": {(10, 8)},
        "encoder.position_embedding": {(14, 8)},
        "encoder.embedding_norm.scale": {(8,)},
        "encoder.embedding_norm.bias": {(8,)},
        "encoder.final_norm.scale": {(8,)},
        "final_norm.scale": {(8,)},
        "final_norm.bias": {(8,)},
        **{f"layers.{{i}}.{name}": {shape} for name, shape in decoding.items()},
        **{f"encoder.layers.{{i}}.{name}": {shape} for name, shape in shared.items()},
        "encoder.layers.{i}.up.weight": {(2, 7, 8), (9, 8)},
        "encoder.layers.{i}.up.bias": {(2, 7), (9,)},
        "encoder.layers.{i}.down.weight": {(8, 7), (8, 9)},
    }
    assert by_layer == expected
    assert in_layers("encoder.layers.12.up.bias") == ("encoder.layers.{i}.up.bias", "12")
    assert in_layers("encoder.final_norm.scale") == ("encoder.final_norm.scale", "")


def test_a_device_has_its_heads_and_feed_forward_units() -> None:
    table = parameter_table(MODEL.for_devices(2))
    assert {
        name: table[f"layers.0.{name}"].local_shape(2)
        for name in (
            "cross_q.weight",
            "cross_kv.weight",
            "cross_out.weight",
            "relative_bias",
            "cross_kv.bias",
        )
    } == {
        "cross_q.weight": (5, 8),
        "cross_kv.weight": (2, 5, 8),
        "cross_out.weight": (8, 5),
        "relative_bias": (32, 1),
        "cross_kv.bias": (2, 5),
    }
    assert table["layers.0.cross_kv.weight"].local_stacked_shape(2) == (10, 8)
    assert table["encoder.layers.2.up.weight"].local_shape(2) == (5, 8)
    assert table["layers.0.cross_out.weight"].takes_attention


@given(n_encoder=st.integers(1, 9), ends=st.lists(st.integers(1, 9), min_size=1, max_size=9, unique=True))
def test_the_first_stage_has_the_encoder(n_encoder: int, ends: list[int]) -> None:
    model = replace(
        MODEL,
        layers=(DECODING,) * max(ends),
        encoder=replace(ENCODER, layers=(ENCODING,) * n_encoder),
    )
    stops = sorted(ends)
    stages = [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
    assert encoder_layers_of(model, stages[0]) == range(n_encoder)
    assert not any(encoder_layers_of(model, stage) for stage in stages[1:])
    named = [name for stage in stages for name in stage_parameters(model, stage)]
    twice = {"token_embedding"} if len(stages) > 1 else set[str]()
    assert {name for name in named if named.count(name) > 1} == twice
    assert set(named) == set(parameter_table(model))
    elements = sum(stage_elements(model, stage, 1) for stage in stages)
    sizes = [parameter.shape for parameter in parameter_table(model).values()]
    assert elements == sum(_product(shape) for shape in sizes) + 11 * 8 * len(twice)


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def test_without_an_encoder_no_stage_has_a_share() -> None:
    decoder = replace(MODEL, encoder=None, layers=(replace(DECODING, cross=None),) * 2)
    assert encoder_layers_of(decoder, range(2)) == range(0)


def test_buckets_worked_by_hand() -> None:
    # Four buckets of one distance, then four whose borders are 4 * 4 ** (i / 4): 4, 5.7, 8, 11.3.
    behind = [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 7]
    causal = RelativeBias(n_buckets=8, max_distance=16).buckets(causal=True)
    assert causal.tolist() == behind[::-1] + [0] * 16
    # Both directions: two of one distance, then two whose border is 2 * 8 ** (1 / 2) = 5.7.
    away = [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]
    both = RelativeBias(n_buckets=8, max_distance=16).buckets(causal=False)
    assert both.tolist() == away[::-1] + [4 + bucket for bucket in away[1:]]


def test_borders_that_are_whole_numbers() -> None:
    """For 32 buckets to 128, both ways, 8 * 16 ** (i / 8) is whole at 16, 32, 64, where buckets begin."""
    both = RelativeBias().buckets(causal=False)
    assert [int(both[128 - distance]) for distance in (15, 16, 31, 32, 63, 64, 127, 128)] == [
        *(9, 10, 11, 12, 13, 14, 15, 15)
    ]
