"""The default of `prefill_tokens`, with which a full batch of decodes takes twice its time alone."""

from dataclasses import replace

import pytest

from orca_jax.config import ServingConfig, Sizes
from orca_jax.families.presets import PRESETS
from orca_jax.planning.cost_model import Device, IterationShape, floor, operations
from orca_jax.planning.known_devices import GPUS
from orca_jax.planning.sizes import (
    LEAST,
    ON_A_CPU,
    SLOWDOWN,
    default_prefill_tokens,
    nominal_rates,
    serving_config,
)
from orca_jax.planning.stage_memory import StageRoom

LLAMA = PRESETS["llama-3.1-8b"]
SERVING = ServingConfig(max_batch_size=128, n_slots=1 << 19, max_batch_tokens=1 << 17)


def room(layers: range, *, itemsize: int = 2, n_devices: int = 1) -> StageRoom:
    return StageRoom(
        layers=layers, n_devices=n_devices, itemsize=itemsize, attention="kernel", free=100 << 30
    )


WHOLE = [room(range(LLAMA.n_layers))]


def seconds(n_tokens: int) -> float:
    prompt = [n_tokens] if n_tokens else []
    shape = IterationShape([1] * 128 + prompt, [128] * 128 + [8192 + n for n in prompt])
    return floor(operations(LLAMA, shape, weight_bytes=2, kv_bytes=2), GPUS["h200"].rates("bfloat16"))


def test_one_token_more_would_take_more_than_twice_the_decodes_alone() -> None:
    n_tokens = default_prefill_tokens(SERVING, LLAMA, WHOLE, GPUS["h200"].rates("bfloat16"))
    assert seconds(n_tokens) <= SLOWDOWN * seconds(0) < seconds(n_tokens + 1)


def test_stages_take_the_sum_of_their_times() -> None:
    stages = [room(range(0, 20)), room(range(20, 32))]
    rates = GPUS["h200"].rates("bfloat16")
    whole = default_prefill_tokens(SERVING, LLAMA, WHOLE, rates)
    assert default_prefill_tokens(SERVING, LLAMA, stages, rates) == whole


@pytest.mark.parametrize(
    ("rates", "max_batch_tokens", "expected"),
    [
        (Device(bandwidth=1e12, matrix_rate=1e9), 1 << 17, LEAST),  # arithmetic is all that takes time
        (Device(bandwidth=1e9, matrix_rate=1e18), 1024, 1024),  # arithmetic takes none
        (Device(bandwidth=1e12, matrix_rate=1e9), 32, 32),
    ],
)
def test_the_result_is_within_its_limits(rates: Device, max_batch_tokens: int, expected: int) -> None:
    serving = replace(SERVING, max_batch_size=8, max_batch_tokens=max_batch_tokens)
    assert default_prefill_tokens(serving, LLAMA, WHOLE, rates) == expected


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("h200", "h200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA B200", "b200"),
        ("Tesla T4", "h100"),  # unknown
    ],
)
def test_a_device_is_known_by_its_name(name: str, gpu: str) -> None:
    assert nominal_rates(name, 2) == GPUS[gpu].rates("bfloat16")
    assert nominal_rates(name, 4) == GPUS[gpu].rates("float32")


def test_an_engine_gets_the_default_unless_it_is_given_or_prompts_are_whole() -> None:
    def chosen(sizes: Sizes, device: str | None = "cpu") -> int | None:
        return serving_config(LLAMA, sizes, WHOLE, device=device).scheduling.prefill_tokens

    assert LEAST < (chosen(Sizes(), "NVIDIA H200") or 0) < 2048
    assert chosen(Sizes()) == ON_A_CPU
    assert chosen(Sizes(max_batch_tokens=100)) == 100
    assert chosen(Sizes(prefill_tokens=7)) == 7
    assert chosen(Sizes(), None) is None
    assert chosen(Sizes(chunked_prefill=False)) is None
    assert chosen(Sizes(policy="orca")) is None
    assert chosen(Sizes(deterministic=True)) is None
