"""Stages: the same tokens however the model is split, and errors where it cannot be (ORCA 4.1)."""

import re
from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.config import ParallelConfig, ServingConfig
from orca_jax.errors import ConfigError
from orca_jax.families.parameters import parameter_shapes
from orca_jax.model.transformer import init_parameters
from orca_jax.planning.stage_layers import split_summary, stage_layers
from orca_jax.request.request import Request
from orca_jax.sharding.partition import one_stage, split_model
from orca_jax.sharding.random_parameters import random_parameters
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import greedy_request, harness
from tests.gpt_config import changed_config, gpt_config

TIED = gpt_config(
    vocab_size=205, n_positions=64, hidden_size=32, n_layers=5, n_heads=4, ffn_size=64, vocab_multiple=4
)
OTHER = "post-norm, projected, no bias, own head"
MODELS = {
    "tied": TIED,
    OTHER: changed_config(
        TIED,
        vocab_size=199,
        norm="post",
        final_norm=False,
        embedding_size=16,
        use_bias=False,
        tie_embeddings=False,
        position_offset=2,
        activation="relu",
    ),
}
SERVING = ServingConfig(max_batch_size=3, n_slots=256, max_batch_tokens=64, block_size=8)


@cache
def parameters(name: str) -> dict[str, jax.Array]:
    """Random weights, spread so that greedy tokens vary."""
    p = init_parameters(MODELS[name], jax.random.key(3), jnp.dtype("float32"))
    return {key: value * (1 if value.ndim == 1 else 12) for key, value in p.items()}


@cache
def greedy_reference(name: str) -> GreedyReference:
    return GreedyReference(MODELS[name], parameters(name))


def requests() -> tuple[list[Request], list[int]]:
    """Twelve requests, which arrive while others run and leave."""
    rng = np.random.default_rng(11)
    drawn = [(int(rng.integers(1, 40)), int(rng.integers(1, 20))) for _ in range(12)]
    arrivals = rng.integers(0, 30, len(drawn)).tolist()
    return [
        greedy_request(str(i), rng.integers(0, 199, n_input).tolist(), n_output)
        for i, (n_input, n_output) in enumerate(drawn)
    ], arrivals


SPLITS: list[Any] = [(OTHER, 2, 2)]  # test_sinks.py and others have more
MORE = [*(("tied", *split) for split in product((1, 2, 4), repeat=2)), (OTHER, 4, 1), (OTHER, 1, 4)]
SPLITS += [pytest.param(*split, marks=pytest.mark.long) for split in MORE if split not in SPLITS]


@pytest.mark.parametrize(("name", "n_stages", "tensor"), SPLITS)
def test_the_tokens_are_the_reference_s(name: str, n_stages: int, tensor: int) -> None:
    model = MODELS[name]
    parts = split_model(
        model, jax.devices(), ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor)
    )
    engine = harness(model, parameters(name), SERVING, buckets=(8, 64), parts=parts)
    asked, arrivals = requests()
    engine.run(asked, arrivals)
    n_sure = sum(greedy_reference(name).sure(request) for request in asked)
    assert n_sure > 0.9 * sum(len(request.output_ids) for request in asked)


def test_layers_are_split_evenly_and_in_order() -> None:
    assert stage_layers(40, 4) == [range(0, 10), range(10, 20), range(20, 30), range(30, 40)]
    assert stage_layers(5, 4) == [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    for n_layers, n_stages in product(range(1, 30), range(1, 30)):
        if n_stages <= n_layers:
            stages = stage_layers(n_layers, n_stages)
            assert [i for stage in stages for i in stage] == list(range(n_layers))
            assert {len(stage) for stage in stages} <= {n_layers // n_stages, -(-n_layers // n_stages)}


def test_the_description_of_the_stages() -> None:
    assert split_summary(5, ParallelConfig(pipeline_parallel=1, tensor_parallel=1)) == "1 stage on 1 device"
    assert (
        split_summary(5, ParallelConfig(pipeline_parallel=4, tensor_parallel=2))
        == "4 stages of 2, 1, 1, 1 layers, 2 devices each"
    )
    assert (
        split_summary(8, ParallelConfig(pipeline_parallel=2, tensor_parallel=1))
        == "2 stages of 4 layers, 1 device each"
    )


def test_one_stage_equals_a_split_over_the_first_devices() -> None:
    devices, model = jax.devices(), MODELS["tied"]
    parts = split_model(model, devices, ParallelConfig(pipeline_parallel=4, tensor_parallel=2))
    for stage, part in enumerate(parts):
        own = one_stage(model, devices, ParallelConfig(pipeline_parallel=4, tensor_parallel=2), stage)
        assert (own.layers, own.first, own.last) == (part.layers, part.first, part.last)
        assert own.group.devices == tuple(devices[:2])
    with pytest.raises(ConfigError, match="tensor_parallel 4 needs 4 devices"):
        one_stage(model, devices[:2], ParallelConfig(pipeline_parallel=2, tensor_parallel=4), 0)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pipeline_parallel": 4, "tensor_parallel": 8}, "needs 32 devices; JAX has 16"),
        ({"tensor_parallel": 3}, "n_heads 8 is not a multiple of it; 1, 2, 4, 8 split it evenly"),
        ({"tensor_parallel": 16}, "n_heads 8 is not a multiple"),
        ({"pipeline_parallel": 9}, "n_layers is 8; each stage needs at least one layer"),
        ({"pipeline_parallel": 0}, "pipeline_parallel is 0; it must be a whole number from 1"),
        ({"tensor_parallel": "two"}, "tensor_parallel is 'two'"),
        ({"tensor_parallel": True}, "tensor_parallel is True"),
    ],
)
def test_an_impossible_split_is_refused(sizes: dict[str, Any], message: str) -> None:
    model = gpt_config(vocab_size=205, n_positions=64, hidden_size=64, n_layers=8, n_heads=8, ffn_size=128)
    with pytest.raises(ConfigError, match=re.escape(message)):
        split_model(model, jax.devices(), ParallelConfig(**sizes))


@pytest.mark.parametrize("name", MODELS)
def test_each_stage_has_its_parameters_and_no_others(name: str) -> None:
    model = MODELS[name]
    parts = split_model(model, jax.devices(), ParallelConfig(pipeline_parallel=2, tensor_parallel=4))
    placements = [part.placement(model) for part in parts]
    shapes = parameter_shapes(model)
    assert set().union(*placements) == set(shapes)
    both = set(placements[0]) & set(placements[1])
    assert both == ({"token_embedding"} if model.embedding.tied else set())
    # What is split is split evenly, and large things are.
    for part, placement in zip(parts, placements, strict=True):
        held = {key: sharding.shard_shape(shapes[key]) for key, sharding in placement.items()}
        for key, shape in held.items():
            split = np.prod(shapes[key]) / np.prod(shape)
            assert split == (4 if "weight" in key or key == "token_embedding" else split)
            assert placement[key].device_set == set(part.group.devices)


def test_random_weights_do_not_depend_on_the_split() -> None:
    model = MODELS["tied"]
    whole = init_parameters(model, jax.random.key(7), jnp.dtype("float32"))
    parts = split_model(model, jax.devices(), ParallelConfig(pipeline_parallel=2, tensor_parallel=4))
    for part in parts:
        for key, value in random_parameters(model, 7, jnp.dtype("float32"), part.placement(model)).items():
            np.testing.assert_allclose(np.asarray(value), np.asarray(whole[key]), rtol=1e-6)
