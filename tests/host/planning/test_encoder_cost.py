"""The cost of an encoder and of cross attention: worked by hand, and in plans."""

import math
from dataclasses import replace

import pytest

from orca_jax.config import ParallelConfig, Sizes
from orca_jax.errors import ConfigError
from orca_jax.families.model_config import Encoder
from orca_jax.families.parameters import parameter_table, stage_bytes
from orca_jax.families.presets import PRESETS
from orca_jax.planning.cost_model import (
    IterationShape,
    Operation,
    encoder_operations,
    encoder_shared_bytes,
    operations,
)
from orca_jax.planning.known_devices import GPUS
from orca_jax.planning.plan import PlanTarget, iteration_floor, make_plan
from orca_jax.planning.stage_memory import slot_bytes
from tests.gpt_config import gpt_config

# H = 4, F = 16, V = 10; one layer each.
DECODER = gpt_config(vocab_size=10, n_positions=8, hidden_size=4, n_layers=1, n_heads=2, ffn_size=16)
LAYER, WHOLE = DECODER.layers[0], replace(DECODER.attention, causal=False)
SMALL = replace(
    DECODER,
    layers=(replace(LAYER, cross=WHOLE),),
    encoder=Encoder(layers=(replace(LAYER, attention=WHOLE),), n_positions=8),
    decoder_start_token_id=0,
)


def linear(n_tokens: int, n_in: int, n_out: int) -> Operation:
    n_bytes = 4 * (n_in * n_out + n_out + n_tokens * (n_in + n_out))
    return Operation("linear", n_bytes, 2 * n_tokens * n_in * n_out)


def test_an_encoder_worked_by_hand() -> None:
    # Inputs of 3 and 2 tokens, with 4 bytes an element of weights and 2 of keys and values.
    kv = 2 * 4 * 2
    assert encoder_operations(SMALL, [3, 2], weight_bytes=4, kv_bytes=2) == [
        Operation("embed", 4 * 5 * (4 + 4), 0),  # a row of one table; SMALL's encoder adds no positions
        linear(5, 4, 12),
        Operation("attention", (5 + 5) * kv + 2 * 5 * 4 * 4, 4 * 4 * (3 * 3 + 2 * 2)),
        linear(5, 4, 4),
        linear(5, 4, 16),
        linear(5, 16, 4),
        linear(5, 4, 8),  # what cross attention reads, ...
        Operation("attention", 5 * kv, 0),  # ... and writing it
    ]
    # Summed up over devices after the embedding, `out` and `down`.
    assert encoder_shared_bytes(SMALL, 5, weight_bytes=4, n_shards=2) == 3 * 4 * 5 * 4


def test_cross_attention_worked_by_hand() -> None:
    # Two increments, with 3 and 1 tokens in the decoder, and inputs of 3 and 2 tokens.
    kv = 2 * 4 * 2
    assert operations(SMALL, IterationShape([1, 1], [3, 1], [3, 2]), weight_bytes=4, kv_bytes=2)[:-2] == [
        Operation("embed", 4 * 2 * (4 + 4 + 4), 2 * 4),
        linear(2, 4, 12),
        Operation("attention", (2 + 4) * kv + 2 * 2 * 4 * 4, 4 * 4 * 4),
        linear(2, 4, 4),
        linear(2, 4, 4),  # the queries
        Operation("attention", 5 * kv + 2 * 2 * 4 * 4, 4 * 4 * 5),
        linear(2, 4, 4),
        linear(2, 4, 16),
        linear(2, 16, 4),
    ]


def target(name: str, n_stages: int = 1, max_batch_size: int = 32) -> PlanTarget:
    return PlanTarget(
        config=PRESETS[name],
        device=GPUS["h200"],
        sizes=Sizes(max_batch_size=max_batch_size),
        dtype="bfloat16",
        context=512,
        parallel=ParallelConfig(pipeline_parallel=n_stages),
    )


@pytest.mark.parametrize("name", ["t5-small", "t5-11b", "bart-large"])
def test_the_stages_of_a_plan_share_all_weights_and_slots(name: str) -> None:
    planned = target(name, 2)
    model, stages = planned.model, planned.stages
    weights = [stage_bytes(model, layers, 1, 2) for layers in stages]
    table = 2 * model.padded_vocab_size * model.hidden_size * model.embedding.tied  # both have it
    n_elements = sum(math.prod(parameter.shape) for parameter in parameter_table(model).values())
    assert sum(weights) - table == 2 * n_elements
    assert weights[0] > weights[1]  # the first has the encoder
    # A slot has a key and a value in each layer of the decoder, be it an input's or the decoder's own.
    slots = [slot_bytes(model, layers, 1, 2) for layers in stages]
    assert sum(slots) == 2 * 2 * model.n_layers * model.attention.kv_width
    assert {room.attention for room in planned.rooms()} == {"static"}  # no GPU's kernel has it
    plan = make_plan(planned)
    assert plan.fits and plan.serving.n_slots >= 2 * 1024


def test_a_request_takes_slots_for_its_input_too() -> None:
    # At most two requests are admitted, of 2,048 tokens in the decoder and as many in the encoder.
    assert make_plan(target("t5-small", max_batch_size=1)).serving.n_slots == 2 * (2048 + 2048)
    with pytest.raises(ConfigError, match="context is 2000; it must be from 1 to the model's 1024 positions"):
        replace(target("bart-large"), context=2000)


def test_the_encoder_prefills_and_the_decoder_begins_with_one_token() -> None:
    planned = target("t5-11b")
    prefill = iteration_floor(planned, "prefill", 4)
    decode = iteration_floor(planned, "decode", 4)
    assert (prefill.n_tokens, decode.n_tokens) == (4 * 512, 4)
    # Nearly all arithmetic is the encoder's matrices, each element of which takes two operations a token.
    encoder = sum(
        math.prod(parameter.shape)
        for name, parameter in parameter_table(planned.model).items()
        if parameter.use == "linear" and (name.startswith("encoder.") or ".cross_kv." in name)
    )
    least = 2 * encoder * 4 * 512 / planned.device.rates("bfloat16").matrix_rate
    assert least < prefill.seconds < 1.5 * least + decode.seconds
    assert decode.bound == "bandwidth"
