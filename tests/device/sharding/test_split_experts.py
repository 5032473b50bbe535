"""Experts split over devices: the same tokens, one all-reduce after them, and each device's work."""

from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.compiled.collectives import collectives
from orca_jax.aot.compiled_stage import compile_stage
from orca_jax.config import ParallelConfig
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import EXPERT_SHARE, parameter_table
from orca_jax.sharding.partition import split_model
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import harness
from tests.device.model.drawn_weights import drawn
from tests.device.model.mixture_models import SERVING, mixture_model, requests

MODELS = {
    "whole experts": mixture_model(hidden=32, size=48, top_k=2, shared=16),
    "parts of experts": mixture_model(hidden=32, size=8 * EXPERT_SHARE, top_k=2, number=3),
    "parts where experts do not divide": mixture_model(hidden=32, size=48, top_k=2, number=5, shared=16),
}


@cache
def parameters(name: str) -> dict[str, jax.Array]:
    return drawn(MODELS[name], 6)


@pytest.mark.matrix(but=["parts of experts-1-4"])
@pytest.mark.parametrize(
    ("name", "n_stages", "tensor"),
    [
        pytest.param("whole experts", 1, 2, marks=pytest.mark.long),
        pytest.param("whole experts", 1, 8, marks=pytest.mark.long),
        ("whole experts", 2, 4),
        ("parts of experts", 1, 4),
        pytest.param("parts of experts", 1, 8, marks=pytest.mark.long),
        pytest.param("parts of experts", 2, 2, marks=pytest.mark.long),
        ("parts where experts do not divide", 1, 4),
    ],
)
def test_the_tokens_are_the_references(name: str, n_stages: int, tensor: int) -> None:
    model = MODELS[name].for_devices(tensor)
    kept = parameters(name) if model.attention.kv_repeats == 1 else drawn(model, 6)
    padded = dict(kept)
    for key, parameter in parameter_table(model).items():
        more = [(0, new - old) for new, old in zip(parameter.shape, padded[key].shape, strict=True)]
        padded[key] = jnp.pad(padded[key], more)  # rows of the vocabulary
    parallel = ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor)
    engine = harness(model, padded, SERVING, buckets=(48,), parts=split_model(model, jax.devices(), parallel))
    asked = requests()
    engine.run(asked, arrivals=[0, 0, 1, 2, 5, 6])
    reference = GreedyReference(model, padded)
    assert sum(reference.sure(request) for request in asked) > 0.8 * sum(len(r.output_ids) for r in asked)


def found(model: ModelConfig, tensor: int) -> Counter[str]:
    """The collectives of a compiled forward program, by kind."""
    model = model.for_devices(tensor)
    (part,) = split_model(model, jax.devices(), ParallelConfig(tensor_parallel=tensor))
    text = compile_stage(model, part, 8, max_bs=8, n_blocks=16).program.as_text()
    assert text is not None
    return Counter(each.kind for each in collectives(text))


@pytest.mark.parametrize("whole", [True, False], ids=["whole experts", "parts of experts"])
def test_a_layer_has_two_sums_and_nothing_else(whole: bool) -> None:
    size, shared = (48, 16) if whole else (4 * EXPERT_SHARE, None)
    one, two = (
        found(mixture_model(hidden=32, size=size, top_k=2, shared=shared, n_layers=n), 4) for n in (1, 2)
    )
    assert two - one == {"all-reduce": 2} and not one - two


def test_each_device_holds_its_share() -> None:
    for name, expected in (("whole experts", (2, 2, 48, 32)), ("parts of experts", (3, 2, 256, 32))):
        model = MODELS[name]
        (part,) = split_model(model, jax.devices(), ParallelConfig(tensor_parallel=4))
        up = "layers.0.experts.up.weight"
        array = jax.device_put(np.zeros(parameter_table(model)[up].shape), part.placement(model)[up])
        assert {shard.data.shape for shard in array.addressable_shards} == {expected}
