"""Recurrent layers over devices: each has its heads' weights and states, tokens are the reference's."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.config import ParallelConfig, ServingConfig
from orca_jax.execution.worker import Worker
from orca_jax.families.attention_config import Attention
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.parameters import share_rows
from orca_jax.families.recurrence_config import GatedDeltaNet, Mamba2, Recurrence, ShortConvolution
from orca_jax.families.rotary import Rotary
from orca_jax.model import reference
from orca_jax.model.kv_cache import state_in
from orca_jax.planning.sizes import engine_shape
from orca_jax.planning.stage_memory import StageRoom
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.sharding.partition import split_model
from orca_jax.sharding.random_parameters import random_parameters
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import greedy_request, harness, place
from tests.device.model.drawn_weights import drawn

NORM = Norm(kind="rms_norm", eps=1e-5)
SERVING = ServingConfig(max_batch_size=4, n_slots=4 * 48, max_batch_tokens=48, block_size=16)


def hybrid(*mixers: Recurrence, beside: bool = False) -> ModelConfig:
    """Layers with these mixers, then one that attends."""
    attention = Attention(
        n_heads=4, n_kv_heads=2, head_size=8, qkv_bias=False, out_bias=False, rotary=Rotary(size=8)
    )
    feed_forward = FeedForward(size=24, activation="silu", gated=True, bias=False)
    attending = Layer(attention=attention, feed_forward=feed_forward, norm=NORM)
    mixing = [replace(attending, attention=attention if beside else None, recurrence=one) for one in mixers]
    return ModelConfig(
        vocab_size=53,
        n_positions=40,
        hidden_size=20,
        layers=(*mixing, attending),
        embedding=Embedding(size=20),
        positions=None,
        final_norm=NORM,
    )


def delta(*, by_key_head: bool) -> GatedDeltaNet:
    return GatedDeltaNet(
        n_key_heads=4, n_value_heads=8, key_size=6, value_size=5, width=4, by_key_head=by_key_head
    )


def mamba(n_groups: int, **other: Any) -> Mamba2:
    return Mamba2(n_heads=8, head_size=5, n_groups=n_groups, state_size=7, width=3, **other)


MULTIPLIERS = (0.9, 1.1, 0.8, 1.2, 0.7)
MODELS = {
    "convolutions": hybrid(
        ShortConvolution(channels=20, width=3), ShortConvolution(channels=20, width=4, bias=True)
    ),
    "delta": hybrid(delta(by_key_head=True), delta(by_key_head=False)),
    "mamba": hybrid(mamba(4), mamba(2, bias=True, norm_first=True)),
    "one group": hybrid(mamba(1), mamba(1, norm=None, multipliers=MULTIPLIERS), beside=True),
}


def as_held(model: ModelConfig, stored: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Weights in a checkpoint's order as the devices hold them; test_share_rows.py has the rows."""
    rows = {name: share_rows(model, name) for name in stored}
    held = {
        name: stored[name] if (order := rows[name]) is None else stored[name][np.array(order)]
        for name in stored
    }
    more = model.padded_vocab_size - model.vocab_size
    return {
        name: jnp.pad(value, ((0, more), (0, 0))) if name == "token_embedding" else value
        for name, value in held.items()
    }


@pytest.mark.parametrize(("n_stages", "tensor"), [(1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_and_log_probabilities_are_the_references(name: str, n_stages: int, tensor: int) -> None:
    stored = replace(MODELS[name], vocab_multiple=1)
    if tensor == 4:
        # Four devices have two copies of each K/V head, which test_split_families.py sees.
        stored = stored._with_layers(
            lambda layer: replace(layer, attention=layer.attention and replace(layer.attention, n_kv_heads=4))
        )
    model, parameters = stored.for_devices(tensor), drawn(stored, 3)
    split = ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor)
    parts = split_model(model, jax.devices(), split)
    prompts = [[(7 * i + n) % 53 for i in range(n)] for n in (1, 30, 9, 21)]
    asked = [greedy_request(str(len(prompt)), prompt, 6) for prompt in prompts]
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, prompt_logprobs=0)
    prompt = [11 * i % 53 for i in range(25)]
    scored = Request("scored", tuple(prompt), len(prompt) + 4, sampling, seed=0)
    engine = harness(model, as_held(model, parameters), SERVING, buckets=(4, 48), parts=parts)
    engine.run([*asked, scored], [0, 0, 3, 4, 5])
    found = GreedyReference(stored, parameters)
    assert sum(found.sure(request) for request in [*asked, scored]) > 20
    wanted = np.asarray(jax.nn.log_softmax(reference.forward(stored, parameters, jnp.array(prompt))))
    assert scored.prompt_logprobs is not None
    np.testing.assert_allclose(
        [record.logprob for record in scored.prompt_logprobs],
        wanted[np.arange(24), prompt[1:]],
        rtol=0,
        atol=1e-4,
    )


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("convolutions", [{"conv": (1, 2, 10)}, {"conv": (1, 3, 10)}]),
        ("delta", [{"conv": (1, 3, 44), "heads": (4, 6, 5)}] * 2),
        ("mamba", [{"conv": (1, 2, 48), "heads": (4, 7, 5)}, {"conv": (1, 2, 34), "heads": (4, 7, 5)}]),
        ("one group", [{"conv": (1, 2, 34), "heads": (4, 7, 5)}] * 2),
    ],
)
def test_each_device_has_its_heads_states_and_the_planned_bytes(name: str, shapes: list[Any]) -> None:
    """Gated DeltaNet has 2 x 4 x 6 + 8 x 5 = 88 channels; a group of Mamba-2 adds 7 of B and 7 of C."""
    model = MODELS[name].for_devices(2)
    (part,) = split_model(model, jax.devices(), ParallelConfig(tensor_parallel=2))
    parameters = as_held(model, drawn(MODELS[name], 3))
    shape = replace(engine_shape(model, SERVING, n_workers=1), n_rows=5, n_snapshots=3)
    worker = Worker(model, place(model, parameters, [part])[0], shape, part)
    memories = [state_in(memory) or {} for memory in worker._caches[:2]]
    for device in part.group.devices:
        held = [
            {
                key: shard.data.shape[1:]
                for key, array in state.items()
                for shard in array.addressable_shards
                if shard.device == device
            }
            for state in memories
        ]
        assert held == shapes
        n_bytes = sum(
            shard.data.nbytes
            for array in jax.tree.leaves(memories)
            for shard in array.addressable_shards
            if shard.device == device
        )
        room = StageRoom(layers=part.layers, n_devices=2, itemsize=4, attention="native", free=None)
        memory = room.memory(model, shape)
        assert n_bytes == memory.states + memory.snapshots == 8 * memory.states // 5


@pytest.mark.parametrize("name", MODELS)
def test_random_weights_do_not_depend_on_the_split(name: str) -> None:
    one, two = MODELS[name], MODELS[name].for_devices(2)
    dtype = jnp.dtype("float32")
    (alone,) = split_model(one, jax.devices())
    (part,) = split_model(two, jax.devices(), ParallelConfig(tensor_parallel=2))
    expected = as_held(two, dict(random_parameters(one, 3, dtype, alone.placement(one))))
    for key, value in random_parameters(two, 3, dtype, part.placement(two)).items():
        if key != "token_embedding":  # padded with random rows
            np.testing.assert_array_equal(value, expected[key], key)
