"""Expert parallelism by token exchange: the reference's tokens, and the collectives of a layer."""

from collections import Counter
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

from bench.compiled.collectives import counts
from orca_jax.aot.compiled_stage import compile_stage
from orca_jax.config import ParallelConfig, Sizes
from orca_jax.errors import ConfigError
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import EXPERT_SHARE, parameter_table
from orca_jax.families.presets import PRESETS
from orca_jax.iteration.shape import bucket_sizes
from orca_jax.planning.known_devices import GPUS
from orca_jax.planning.plan import PlanTarget
from orca_jax.sharding.device_group import DeviceGroup
from orca_jax.sharding.partition import split_model
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import harness
from tests.device.model.drawn_weights import drawn
from tests.device.model.mixture_models import SERVING, mixture_model, requests
from tests.device.model.test_mixture import to_experts

WHOLE = mixture_model(hidden=32, size=48, top_k=2)


def drawn_for(model: ModelConfig) -> dict[str, jax.Array]:
    """Random weights; the padding of a model for several devices is zeros."""
    values = drawn(model, 6)
    for key, parameter in parameter_table(model).items():
        more = [(0, new - old) for new, old in zip(parameter.shape, values[key].shape, strict=True)]
        values[key] = jnp.pad(values[key], more)
    return values


@pytest.mark.parametrize(
    ("n_stages", "tensor", "wanted"),
    [
        pytest.param(1, 2, None, marks=pytest.mark.long),
        pytest.param(1, 8, None, marks=pytest.mark.long),
        pytest.param(2, 4, None, marks=pytest.mark.long),
        (1, 4, [2, 3]),  # all to the second device
        pytest.param(1, 4, [0, 7], marks=pytest.mark.long),
    ],
)
def test_the_tokens_are_the_references(n_stages: int, tensor: int, wanted: list[int] | None) -> None:
    model = WHOLE.for_devices(tensor)
    values = drawn_for(model)
    if wanted is not None:
        values = to_experts(values, wanted)
    parts = split_model(model, jax.devices(), exchanging(tensor, n_stages))
    # 45 tokens, and in the last layer 4: multiples of no number of devices, or of few.
    engine = harness(model, values, SERVING, buckets=(45,), parts=parts)
    asked = requests()
    engine.run(asked, arrivals=[0, 0, 1, 2, 5, 6])
    reference = GreedyReference(model, values)
    assert sum(reference.sure(request) for request in asked) > 0.8 * sum(len(r.output_ids) for r in asked)


def exchanging(tensor: int, n_stages: int = 1) -> ParallelConfig:
    return ParallelConfig(tensor_parallel=tensor, pipeline_parallel=n_stages, expert_exchange="exchange")


def found(model: ModelConfig) -> Counter[str]:
    """The collectives of a forward program compiled for four devices, by kind."""
    model = model.for_devices(4)
    (part,) = split_model(model, jax.devices(), exchanging(4))
    text = compile_stage(model, part, 8, max_bs=8, n_blocks=16).program.as_text()
    assert text is not None
    return counts(text)


# A reduce-scatter after attention, all routings, tokens there and back, and all tokens for the next layer.
EXCHANGE = {"reduce-scatter": 1, "all-gather": 2, "all-to-all": 2}


def test_the_collectives_of_a_layer() -> None:
    """Gathering, a CPU's default, is tested in test_split_experts.py."""
    one, two = (found(mixture_model(hidden=32, size=48, top_k=2, n_layers=n)) for n in (1, 2))
    assert two - one == EXCHANGE and not one - two


@pytest.mark.parametrize(
    ("model", "tensor"),
    [
        (WHOLE, 1),
        (mixture_model(hidden=32, size=48, top_k=2, shared=16), 4),  # which needs all tokens on each device,
        (mixture_model(hidden=32, size=4 * EXPERT_SHARE, top_k=2), 4),  # and so does a part of an expert
    ],
)
def test_an_exchange_that_cannot_be_is_refused(model: ModelConfig, tensor: int) -> None:
    with pytest.raises(ConfigError, match=f"with tensor_parallel {tensor} no layer of this model can"):
        split_model(model, jax.devices(), exchanging(tensor))


@dataclass(frozen=True)
class Gpu:
    """A GPU as JAX names it."""

    device_kind: str
    platform: str = "gpu"


@pytest.mark.parametrize("kind", ["NVIDIA L40S", "NVIDIA H200", "an unknown one"])
def test_the_engine_and_the_plan_ask_the_same_rule(kind: str) -> None:
    model, name = PRESETS["qwen3-30b-a3b"], kind.split()[-1].lower()
    wanted = DeviceGroup((Gpu(kind),) * 16).token_exchange.wanted
    buckets = [size for size in bucket_sizes(16384, coarse=True) if size > 1]
    engine = {size: wanted(model.layers[0], 2 * model.hidden_size, size) for size in buckets}
    assert any(engine.values()) == (name == "l40s")
    if name in GPUS:
        target = PlanTarget(
            config=model,
            device=GPUS[name],
            sizes=Sizes(max_batch_tokens=buckets[-1]),
            dtype="bfloat16",
            context=1,
            parallel=ParallelConfig(tensor_parallel=16),
        )
        plan = {size: target.exchanges(model.layers[0], size - 1, last=False) for size in buckets}
        assert plan == engine
