"""The cost and the memory of experts, worked by hand."""

from dataclasses import replace
from typing import Any

import pytest

from orca_jax.config import Attention as Path
from orca_jax.families.attention_config import Attention
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig
from orca_jax.families.parameters import stage_bytes
from orca_jax.families.presets import PRESETS
from orca_jax.iteration.shape import EngineShape
from orca_jax.planning.cost_model import (
    IterationShape,
    Operation,
    operations,
    parameter_count,
)
from orca_jax.planning.stage_memory import temporary_bytes

EXPERTS = Experts(number=4, top_k=2)
MODEL = ModelConfig(
    vocab_size=10,
    n_positions=8,
    hidden_size=4,
    layers=(
        Layer(
            attention=Attention(n_heads=2, n_kv_heads=2, head_size=2),
            feed_forward=FeedForward(size=6, gated=True, bias=False, experts=EXPERTS),
        ),
    )
    * 2,
    embedding=Embedding(size=4),
)


def feed_forward(model: ModelConfig, n_tokens: int, n_shards: int = 1) -> list[Operation]:
    """The operations of the first layer's experts, which follow its projection of attention."""
    shape = IterationShape([1] * n_tokens, [2] * n_tokens)
    found = operations(model, shape, weight_bytes=2, kv_bytes=2, n_shards=n_shards)
    assert [op.kind for op in found[:4]] == ["embed", "linear", "attention", "linear"]
    return found[4:7]


def test_a_batch_reads_the_experts_that_it_is_expected_to_hit() -> None:
    # Three tokens choose two of four: 3.5 are hit, and six rows computed, of 4 -> 2 * 6 and 6 -> 4.
    router, up, down = feed_forward(MODEL, 3)
    assert (router.n_bytes, router.n_flops) == (2 * (16 + 3 * 8), 2 * 3 * 16)
    assert (up.n_bytes, up.n_flops) == (2 * (3.5 * 48 + 6 * (4 + 12)), 2 * 6 * 48)
    assert (down.n_bytes, down.n_flops) == (2 * (3.5 * 24 + 6 * (6 + 4)), 2 * 6 * 24)


def test_a_device_reads_its_share_whether_experts_are_whole_or_cut() -> None:
    whole = feed_forward(MODEL, 3, n_shards=2)[1]
    # Two experts of the four, and three of the six rows.
    assert (whole.n_bytes, whole.n_flops) == (2 * (1.75 * 48 + 3 * (4 + 12)), 2 * 3 * 48)
    layer = MODEL.layers[0]
    odd = replace(MODEL.feed_forward, experts=Experts(number=3, top_k=2))
    cut = feed_forward(replace(MODEL, layers=(replace(layer, feed_forward=odd),) * 2), 1, n_shards=2)[1]
    # Half of each of the two experts that one token hits.
    assert (cut.n_bytes, cut.n_flops) == (pytest.approx(2 * (2 * 24 + 2 * (4 + 6))), 2 * 2 * 24)


def test_a_mixture_reads_few_weights_for_one_token_and_all_for_many() -> None:
    model = PRESETS["qwen3-30b-a3b"]

    def read(n_tokens: int) -> float:
        shape = IterationShape([1] * n_tokens, [1] * n_tokens)
        return sum(op.n_bytes for op in operations(model, shape, weight_bytes=2, kv_bytes=2))

    weights = stage_bytes(model, range(model.n_layers), 1, 2)
    assert parameter_count(model) == 30_532_122_624
    # "A3B": 3.3 billion are active, of which the embedding is a table that is not read whole.
    assert read(1) / weights == pytest.approx(3.04 / 30.5, rel=0.03)
    assert 0.95 < read(64) / weights < 1.05


@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_packed_experts_have_the_published_size(name: str, gib: float) -> None:
    """The checkpoint's size, as the model card says; unpacked, each number takes two bytes."""
    packed = PRESETS[f"{name}-mxfp4"]
    assert parameter_count(packed) == parameter_count(PRESETS[name])
    assert stage_bytes(packed, range(packed.n_layers), 1, 2) / (1 << 30) == pytest.approx(gib, abs=0.05)
    assert stage_bytes(PRESETS[name], range(PRESETS[name].n_layers), 1, 2) == 2 * parameter_count(
        PRESETS[name]
    )


def test_packed_experts_are_read_packed_and_their_unpacked_copy_is_counted() -> None:
    plain, packed = PRESETS["gpt-oss-20b"], PRESETS["gpt-oss-20b-mxfp4"]
    one, other = (feed_forward(model, 100)[1] for model in (plain, packed))
    per_expert = 2 * 2880 * 2880 + 2 * 2880
    hit = 32 * (1 - (1 - 4 / 32) ** 100)
    assert one.n_bytes - other.n_bytes == pytest.approx(hit * per_expert * (2 - 17 / 32))
    assert one.n_flops == other.n_flops
    shape = EngineShape(
        n_blocks=4, n_rows=3, max_rows=2, max_tokens=8, block_size=8, max_blocks=1, vocab_size=10
    )
    arguments: Any = {"shape": shape, "itemsize": 2}
    of_paths: dict[Path, int] = {"cudnn": 32, "native": 1}
    for attention, n_experts in of_paths.items():
        needed = temporary_bytes(packed, range(1), 1, attention=attention, **arguments)
        assert needed == pytest.approx(n_experts * 2 * 2880 * 2880 * 2, rel=0.05)
        assert temporary_bytes(plain, range(1), 1, attention=attention, **arguments) < 2_000_000


def test_an_iteration_computes_with_the_active_parameters() -> None:
    model = PRESETS["mixtral-8x7b"]
    one = sum(op.n_flops for op in operations(model, IterationShape([1], [1]), weight_bytes=2, kv_bytes=2))
    active = 12.9e9  # as published
    assert one / 2 == pytest.approx(active, rel=0.02)


def test_a_token_has_a_row_for_each_of_its_experts() -> None:
    shape = EngineShape(
        n_blocks=4, n_rows=3, max_rows=2, max_tokens=8, block_size=8, max_blocks=1, vocab_size=10
    )

    def needed(top_k: int) -> int:
        own = replace(MODEL.feed_forward, experts=Experts(number=4, top_k=top_k))
        layers = tuple(replace(layer, feed_forward=own) for layer in MODEL.layers)
        model = replace(MODEL, layers=layers, n_positions=4)
        return temporary_bytes(model, range(1), 1, shape, itemsize=2, attention="kernel")

    # Up [2 F], and the larger of its activation [F] and its input or result [H], for each of 8 tokens.
    assert needed(3) - needed(2) == 8 * 2 * (12 + 6)
