"""The cost and the memory of latent attention, worked by hand."""

from dataclasses import replace

import numpy as np
import pytest

from orca_jax.config import Attention, Sizes
from orca_jax.families import attention_config
from orca_jax.families.attention_config import Latent, latent_attention
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.parameters import parameter_table, stage_bytes
from orca_jax.families.presets import PRESETS
from orca_jax.families.rotary import Rotary
from orca_jax.families.weight_form import EXACT
from orca_jax.iteration.shape import EngineShape
from orca_jax.planning.cost_model import (
    IterationShape,
    Operation,
    operations,
    parameter_count,
)
from orca_jax.planning.known_devices import KnownDevice, cpu_device
from orca_jax.planning.plan import PlanTarget, iteration_floor
from orca_jax.planning.stage_memory import slot_bytes, temporary_bytes

# Two heads: queries of 3 + 2 elements by way of 5, values of 4, and 6 + 2 elements of a token in the cache.
LATENT = Latent(rank=6, rotary_size=2, plain_size=3, value_size=4, query_rank=5)
LAYER = Layer(
    attention=latent_attention(LATENT, n_heads=2, rotary=Rotary(size=2), qkv_bias=False, out_bias=False),
    feed_forward=FeedForward(size=10, gated=True, bias=False),
    norm=Norm(kind="rms_norm"),
)
MODEL = ModelConfig(
    vocab_size=10,
    n_positions=8,
    hidden_size=4,
    layers=(LAYER,) * 2,
    embedding=Embedding(size=4),
    positions=None,
)


def layers(shape: IterationShape, n_shards: int = 1) -> tuple[list[Operation], list[Operation]]:
    """The operations of the first layer and of the last: q_a, q_b, kv_a, kv_b, attention, out, up, down."""
    model = MODEL.for_devices(n_shards)
    found = operations(model, shape, weight_bytes=2, kv_bytes=2, n_shards=n_shards)
    assert [op.kind for op in found[1:9]] == [*["linear"] * 4, "attention", *["linear"] * 3]
    return found[1:9], found[9:17]


def test_the_products_and_the_attention_of_a_layer() -> None:
    # Requests of 3 input tokens after 2, and of 1 after 4: 4 tokens, of which 3 + 4 + 5 + 5 keys are seen.
    shape = IterationShape([3, 1], [5, 5])
    (q_a, q_b, kv_a, kv_b, attention, out, *_), last = layers(shape)
    for op, n_in, n_out in ((q_a, 4, 5), (q_b, 5, 10), (kv_a, 4, 8), (kv_b, 6, 14), (out, 8, 4)):
        assert (op.n_bytes, op.n_flops) == (2 * (n_in * n_out + 4 * (n_in + n_out)), 2 * 4 * n_in * n_out)
    # Each head meets 8 elements of a key, and sums 6 of them; a token is 8 elements in the cache, once.
    assert attention.n_flops == 2 * 2 * (8 + 6) * 17
    assert attention.n_bytes == 2 * (8 * (4 + 10) + 4 * 2 * (8 + 6))
    # In the last layer only what the cache keeps is of all tokens.
    n_tokens = [2, 2, 4, 2, None, 2, 2, 2]
    for n, op, other in zip(n_tokens, last, layers(shape)[0], strict=True):
        if n is not None:
            assert op.n_flops == other.n_flops * n / 4
    assert last[4].n_flops == 2 * 2 * (8 + 6) * 10


def test_over_two_devices_heads_are_shared_and_the_cache_is_on_both() -> None:
    (q_a, q_b, kv_a, kv_b, attention, out, *_), _ = layers(IterationShape([1], [5]), 2)
    products = [(q_a, 4, 5), (q_b, 5, 5), (kv_a, 4, 8), (kv_b, 6, 7), (out, 4, 4)]
    assert [op.n_flops for op, *_ in products] == [2 * n_in * n_out for _, n_in, n_out in products]
    assert attention.n_bytes == 2 * (8 * (1 + 5) + (8 + 6))
    assert attention.n_flops == 2 * (8 + 6) * 5


def test_a_row_of_many_tokens_makes_its_keys_and_values_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_config, "FEWEST_PLAIN", 2)
    # Of 5 keys 4 new tokens see 14 in all, and save 5 products each: more than 1 older token's 6 * 7.
    assert LATENT.is_plain(4, 5) and not LATENT.is_plain(3, 5)
    shape = IterationShape([4, 1], [5, 5])
    found = operations(MODEL, shape, weight_bytes=2, kv_bytes=2, in_both_forms=True)
    absorbed = operations(MODEL, shape, weight_bytes=2, kv_bytes=2)
    kv_b, attention = found[4], found[5]
    assert kv_b.n_flops == 2 * 6 * 14 * (5 + 1)  # of all tokens of the one, of the new token of the other
    assert kv_b.n_bytes == 2 * (6 * 14 + (5 + 1) * (6 + 14))
    assert attention.n_flops == 2 * 2 * ((5 + 4) * 14 + (8 + 6) * 5)
    assert attention.n_bytes == 2 * (8 * (5 + 10) + 2 * ((5 + 4) * 4 + (8 + 6) * 1))
    # Other operations are the same, and so are all of the last layer, where each row has one token.
    assert [i for i, (one, other) in enumerate(zip(found, absorbed, strict=True)) if one != other] == [4, 5]
    # Sums do not tell which rows these are.
    assert operations(MODEL, shape.sums(), weight_bytes=2, kv_bytes=2, in_both_forms=True) == operations(
        MODEL, shape.sums(), weight_bytes=2, kv_bytes=2
    )


def test_which_rows_of_deepseek_v3_take_the_plain_form() -> None:
    own = PRESETS["deepseek-v3"].attention.latent
    assert own is not None
    rows = {(31, 31): False, (32, 32): True, (32, 35): True, (32, 36): False, (8192, 163_840): True}
    # Behind ever more tokens it is 512 * 256 / 768 = 170.7 new ones.
    rows |= {(170, 100_000): False, (171, 100_000): True, (1, 1): False, (1, 100_000): False}
    assert {row: own.is_plain(*row) for row in rows} == rows
    n, length = np.array([*rows], np.int32).T
    np.testing.assert_array_equal(own.is_plain(n, length), [*rows.values()])


def test_a_prompt_on_a_cpu_is_planned_in_the_plain_form() -> None:
    cpu = cpu_device(memory=64 << 30, bandwidth=1e12, matrix_rate=1e9)  # operations decide
    large = replace(LATENT, rank=60)
    own = latent_attention(large, n_heads=2, rotary=Rotary(size=2))
    model = replace(MODEL, layers=(replace(LAYER, attention=own),) * 2, n_positions=64)

    def seconds(device: KnownDevice) -> float:
        target = PlanTarget(config=model, device=device, sizes=Sizes(), dtype="float32", context=64)
        return iteration_floor(target, "prefill", 1).seconds

    elsewhere = replace(cpu, name="h200")
    n_seen = 64 * 65 // 2
    saved = 2 * 2 * ((62 + 60) - (5 + 4)) * n_seen  # in the first layer
    assert seconds(elsewhere) - seconds(cpu) == pytest.approx(saved / 1e9)


def test_a_slot_is_what_is_compressed() -> None:
    assert slot_bytes(MODEL, range(MODEL.n_layers), 1, 2) == 2 * 8 * 2
    for n in (1, 2):
        assert slot_bytes(MODEL.for_devices(n), range(2), n, 2) == 2 * 8 * 2
    model = PRESETS["deepseek-v3"]
    assert slot_bytes(model, range(model.n_layers), 1, 2) == 61 * 576 * 2
    assert slot_bytes(model.for_devices(8), range(61), 8, 2) == 61 * 576 * 2


def test_corrections_are_float32_in_any_model() -> None:
    experts = Experts(number=6, top_k=2, scores="sigmoid", correction_bias=True)
    sparse = LAYER.with_feed_forward(experts=experts)
    model = replace(MODEL, layers=(LAYER, sparse))
    exact = sum(one.shape[0] for one in parameter_table(model).values() if one.form == EXACT)
    assert exact == 6
    assert stage_bytes(model, range(2), 1, 2) == 2 * parameter_count(model) + 2 * exact


def test_deepseek_v3_computes_with_its_active_parameters() -> None:
    model = PRESETS["deepseek-v3"]
    one = sum(op.n_flops for op in operations(model, IterationShape([1], [1]), weight_bytes=1, kv_bytes=2))
    # 37 billion as published, of which the embedding, 0.93, is not computed with.
    assert one / 2 == pytest.approx(37.55e9 - 0.93e9, rel=0.01)


def test_a_token_has_queries_of_all_heads_as_they_meet_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = EngineShape(
        n_blocks=4, n_rows=3, max_rows=2, max_tokens=8, block_size=8, max_blocks=1, vocab_size=10
    )

    def of_20_heads(attention: Attention, shape: EngineShape = shape) -> int:
        bytes_of: list[int] = []
        for n_heads in (20, 40):
            own = latent_attention(LATENT, n_heads=n_heads, rotary=Rotary(size=2), out_bias=False)
            model = replace(MODEL, layers=(replace(LAYER, attention=own),) * 2, n_positions=4)
            bytes_of.append(temporary_bytes(model, range(1), 1, shape, itemsize=2, attention=attention))
        return bytes_of[1] - bytes_of[0]

    # Their queries twice, [8], and what they attend to, [6], with its zeros, for each of 8 tokens.
    absorbed = 8 * 2 * 20 * (2 * 8 + 2 * 6)
    assert of_20_heads("follow_lengths") == of_20_heads("native") == absorbed
    # In the plain form their own queries, [5], twice, and results, [4]; that is of programs for prompts.
    monkeypatch.setattr(attention_config, "FEWEST_PLAIN", 2)
    assert of_20_heads("follow_lengths") == 8 * 2 * 20 * (2 * 5 + 4 * 4)
    assert of_20_heads("native") == 8 * 2 * 20 * (2 * 5 + 2 * 4)
    assert of_20_heads("native", replace(shape, max_rows=8)) == absorbed
    assert of_20_heads("native", replace(shape, deterministic=True)) == absorbed
