"""The predicted capacity against `orca plan`'s own floors, and against a floor worked out by hand."""

import math
from typing import Any

import pytest

from orca_jax.config import ParallelConfig, ServingConfig
from orca_jax.families.presets import PRESETS
from orca_jax.planning.known_devices import GPUS, cpu_device, gpu_like
from orca_jax.planning.plan import Capacity, PlanTarget, Sizes, iteration_floor, predicted_capacity
from tests.gpt_config import gpt_config

MODEL = PRESETS["gpt3-13b"]
H100 = GPUS["h100"]


def capacity(budget: float | None = None, **options: Any) -> Capacity:
    sizes = {"max_batch_size": 64, "n_slots": 1 << 20, "max_batch_tokens": 2048} | options.pop("sizes", {})
    serving = ServingConfig(**sizes)
    parallel = options.pop("parallel", ParallelConfig())
    return predicted_capacity(
        MODEL, serving, H100, dtype="bfloat16", parallel=parallel, latency_budget=budget, **options
    )


def floor(batch_size: int, context: int) -> float:
    target = PlanTarget(config=MODEL, device=H100, sizes=Sizes(), dtype="bfloat16", context=context)
    return iteration_floor(target, "decode", batch_size).seconds


def test_a_floor_worked_out_by_hand() -> None:
    """With a tiny context and a huge matrix rate, an iteration takes the time to read the weights."""
    model = gpt_config(
        vocab_size=1 << 16,
        n_positions=8,
        hidden_size=64,
        n_layers=1,
        n_heads=1,
        ffn_size=64,
        eos_token_ids=(0,),
    )
    device = cpu_device(memory=1 << 34, bandwidth=1e9, matrix_rate=1e18)
    serving = ServingConfig(max_batch_size=4, n_slots=1024, block_size=8)
    found = predicted_capacity(model, serving, device, dtype="float32", parallel=ParallelConfig(), context=1)
    # The output layer, which is nearly all of this model, and 4 rows of logits, written and read.
    n_bytes = 4 * (1 << 16) * 64 + 2 * 4 * 4 * (1 << 16)
    assert found.seconds == pytest.approx(n_bytes / 1e9, rel=0.02)
    assert found.tokens_per_second == pytest.approx(4 / found.seconds)


@pytest.mark.parametrize("context", [1, 200, 1024])
def test_within_a_budget_it_is_the_largest_batch_at_whose_floor_tokens_come_in_time(context: int) -> None:
    budget = (floor(20, context) + floor(21, context)) / 2
    found = capacity(budget, context=context)
    assert (found.batch_size, found.context) == (20, context)
    assert found.seconds == floor(20, context) <= budget < floor(21, context)
    assert found.tokens_per_second == pytest.approx(20 / found.seconds)


def test_the_batch_and_the_slots_bound_it() -> None:
    assert capacity(None, context=100).batch_size == 64
    assert capacity(math.inf, context=100).batch_size == 64
    # 100 tokens are 7 blocks of 16: 2,000 slots are enough for 17 requests.
    assert capacity(None, context=100, sizes={"n_slots": 2000}).batch_size == 17
    # Two stages work on two batches.
    both = ParallelConfig(pipeline_parallel=2)
    halves = capacity(None, context=100, sizes={"n_slots": 2000}, parallel=both)
    assert halves.batch_size == 8
    assert halves.tokens_per_second > 8 / halves.seconds, "a batch leaves each stage while another enters"


def test_what_even_one_request_exceeds_is_no_capacity() -> None:
    assert capacity(1e-9, context=100) == Capacity(
        context=100, batch_size=0, seconds=0.0, tokens_per_second=0.0
    )
    assert capacity(None, context=1024, sizes={"n_slots": 512}).batch_size == 0


def test_the_default_context_is_half_the_positions_up_to_a_bound() -> None:
    assert capacity().context == min(1024, MODEL.n_positions // 2)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", None),
        ("cpu", None),
    ],
)
def test_a_gpu_is_known_by_what_jax_calls_it(device: str, name: str | None) -> None:
    assert gpu_like(device) == (None if name is None else GPUS[name])
