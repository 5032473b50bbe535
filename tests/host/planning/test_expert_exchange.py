"""The choice to exchange tokens between experts: bytes and seconds worked by hand, and in plans."""

from dataclasses import replace
from typing import Any

import pytest

from orca_jax.config import ExpertExchange, ParallelConfig, Sizes
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.families.presets import PRESETS
from orca_jax.planning.cost_model import IterationShape
from orca_jax.planning.device_traffic import (
    chooses_device,
    exchanged_bytes,
    gathered_bytes,
    shared_bytes,
)
from orca_jax.planning.expert_exchange import ExchangeRule, exchange_seconds
from orca_jax.planning.known_devices import GPUS, cpu_device
from orca_jax.planning.plan import PlanTarget, iteration_floor

QWEN = PRESETS["qwen3-30b-a3b"]
LAYER = QWEN.layers[0]
WIDTH = 2 * QWEN.hidden_size  # bytes of a token's hidden state, 4,096


def test_how_often_a_token_goes_to_a_device() -> None:
    # Of 8 experts on 4 devices a token that takes 2 misses one device with 6/8 x 5/7.
    assert chooses_device(Experts(number=8, top_k=2), 4) == pytest.approx(1 - 6 / 8 * 5 / 7)
    assert chooses_device(Experts(number=8, top_k=1), 8) == pytest.approx(1 / 8)
    assert chooses_device(Experts(number=8, top_k=8), 4) == 1
    assert chooses_device(Experts(number=8, top_k=3), 1) == 1


def test_the_bytes_worked_by_hand() -> None:
    # 16 tokens of 100 bytes over 4 devices: two all-reduces, each of 2 x 3/4 of 1,600.
    assert gathered_bytes(100, 16, 4) == 4800
    # A device sends 3/4 of what all tokens are, in a reduce-scatter and an all-gather of 100 bytes a token,
    # and in one of two experts' numbers and weights; each of its 4 tokens to 3 others with 13/28, and back.
    rings, exchanged = exchanged_bytes(Experts(number=8, top_k=2), 100, 16, 4)
    assert rings == 12 * (200 + 2 * 8)
    assert exchanged == pytest.approx(2 * 4 * 3 * 100 * 13 / 28)
    assert gathered_bytes(100, 16, 1) == 0 and exchanged_bytes(Experts(number=8, top_k=2), 100, 16, 1) == (
        0,
        0,
    )


def test_the_seconds_worked_by_hand() -> None:
    # 16 L40S on two machines: rings at PCIe's 32 GB/s, point to point 25 GB/s, 12 us for each of 15 others.
    gathered, exchanged = exchange_seconds(GPUS["l40s"], LAYER, WIDTH, 4096, 16)
    sent = 15 / 16 * 4096
    assert gathered == pytest.approx(sent * 4 * 4096 / 32e9)
    goes = 1 - 120 * 119 * 118 * 117 * 116 * 115 * 114 * 113 / (128 * 127 * 126 * 125 * 124 * 123 * 122 * 121)
    rings = sent * (2 * 4096 + 64) / 32e9
    assert exchanged == pytest.approx(rings + sent * 2 * goes * 4096 / 25e9 + 2 * 15 * 12e-6)
    # Eight H200 on one machine: NVLink's 450 GB/s, of which the ragged exchange was seen to use 16.42 GiB/s.
    gathered, exchanged = exchange_seconds(GPUS["h200"], LAYER, WIDTH, 4096, 8)
    assert gathered == pytest.approx(7 / 8 * 4096 * 4 * 4096 / 450e9)
    assert exchanged > 7 / 8 * 4096 * 2 * 0.6 * 4096 / 17.7e9


@pytest.mark.parametrize(
    ("device", "n_devices", "ring_rate"),
    [
        ("h200", 8, 450e9),
        ("h200", 16, 400e9),
        ("a100-80gb", 16, 200e9),
        ("l40s", 8, 32e9),
        ("l40s", 16, 32e9),
    ],
)
def test_rings_use_every_network_link(device: str, n_devices: int, ring_rate: float) -> None:
    assert GPUS[device].ring_rate(n_devices) == ring_rate


def crossover(device: str, n_devices: int, layer: Layer = LAYER) -> int | None:
    """The fewest tokens for which an exchange is chosen; None if it is not up to a million."""
    rule = ExchangeRule(device=GPUS[device], n_devices=n_devices)
    below, enough = 0, 1 << 20
    if not rule(layer, WIDTH, enough):
        return None
    while enough - below > 1:
        middle = (below + enough) // 2
        below, enough = (below, middle) if rule(layer, WIDTH, middle) else (middle, enough)
    return enough


def with_experts(**changes: Any) -> Layer:
    return LAYER.with_feed_forward(experts=replace(experts_of(LAYER), **changes))


def experts_of(layer: Layer) -> Experts:
    assert layer.feed_forward is not None and layer.feed_forward.experts is not None
    return layer.feed_forward.experts


def test_from_how_many_tokens_on() -> None:
    """The table of docs/experts.md."""
    assert all(crossover(device, 8) is None for device in GPUS)
    assert [name for name in GPUS if crossover(name, 16) is not None] == ["l40s"]
    assert [name for name in GPUS if crossover(name, 32) is not None] == ["l40s"]
    assert (crossover("l40s", 16), crossover("l40s", 32)) == (3230, 4300)
    # With two experts a token goes to fewer devices: then it also pays on one machine, over PCIe.
    two = with_experts(top_k=2)
    assert crossover("l40s", 8, two) == 1314
    assert all(crossover(name, 8, two) is None for name in GPUS if name != "l40s")


def test_what_cannot_be_exchanged_is_not() -> None:
    def forced(layer: Layer, n_devices: int, asked: ExpertExchange = "exchange") -> bool:
        return ExchangeRule(device=None, n_devices=n_devices, asked=asked)(layer, WIDTH, 1)

    assert forced(LAYER, 8) and not forced(LAYER, 8, "gather") and not forced(LAYER, 8, "auto")
    assert not forced(LAYER, 1) and not forced(LAYER, 4)  # at 4 a device's share of an expert is wide enough
    assert not forced(with_experts(shared_size=64), 8)
    assert not forced(PRESETS["gpt2"].layers[0], 2)
    cpu = cpu_device(memory=1 << 34, bandwidth=3e10, matrix_rate=2e11)
    assert not ExchangeRule(device=cpu, n_devices=8)(LAYER, WIDTH, 1 << 20)


def target(asked: ExpertExchange, model: ModelConfig = QWEN) -> PlanTarget:
    return PlanTarget(
        config=model,
        device=GPUS["l40s"],
        sizes=Sizes(max_batch_size=32, max_batch_tokens=8192),
        dtype="bfloat16",
        context=1600,
        parallel=ParallelConfig(tensor_parallel=16, expert_exchange=asked),
    )


def test_a_plan_counts_what_the_engine_would_do() -> None:
    # 3,200 tokens are below the crossover at 3,230, but the engine pads them to 4,096.
    two = iteration_floor(target("auto"), "prefill", 2).seconds
    assert two < iteration_floor(target("gather"), "prefill", 2).seconds
    one = iteration_floor(target("auto"), "prefill", 1).seconds
    assert one == iteration_floor(target("gather"), "prefill", 1).seconds
    # All layers but the last, which has two tokens.
    moved = {
        asked: shared_bytes(
            QWEN,
            IterationShape([1600] * 2, [1600] * 2),
            weight_bytes=2,
            n_shards=16,
            exchanges=lambda layer, last, asked=asked: target(asked).exchanges(layer, 3200, last=last),
        )
        for asked in ("auto", "gather")
    }
    saved = gathered_bytes(WIDTH, 3200, 16) - sum(exchanged_bytes(experts_of(LAYER), WIDTH, 3200, 16))
    assert moved["gather"] - moved["auto"] == pytest.approx((QWEN.n_layers - 1) * saved)
