"""Planned memory against what engines allocate: on CPU devices, and by shape for presets."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from orca_jax.config import ParallelConfig, ServingConfig, Sizes
from orca_jax.errors import ConfigError
from orca_jax.execution import capacity
from orca_jax.execution.capacity import check_slots, stage_room
from orca_jax.execution.worker import Worker
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import stage_bytes, stage_parameters
from orca_jax.families.presets import PRESETS
from orca_jax.launch.local_engine import build_engine
from orca_jax.model.transformer import init_parameters
from orca_jax.planning.sizes import engine_shape, serving_config
from orca_jax.planning.stage_layers import stage_layers
from orca_jax.planning.stage_memory import StageRoom
from orca_jax.sharding.device_group import TENSOR
from orca_jax.sharding.partition import StagePart, split_model
from orca_jax.sharding.specs import held_specs
from tests.gpt_config import changed_config, gpt_config

TIED = gpt_config(vocab_size=51, n_positions=48, hidden_size=16, n_layers=3, n_heads=2, ffn_size=32)
UNTIED = changed_config(TIED, tie_embeddings=False, position_offset=2, final_norm=False, vocab_multiple=8)
PROJECTED = changed_config(TIED, embedding_size=8, use_bias=False)
SERVING = ServingConfig(max_batch_size=3, n_slots=96, max_batch_tokens=64, block_size=8)


def bytes_on(device: Any, arrays: object) -> int:
    """Bytes of a tree of arrays on one device."""
    leaves = jax.tree.leaves(arrays)
    return sum(
        shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards if shard.device == device
    )


@pytest.mark.parametrize(
    "model",
    [
        *(TIED, UNTIED, PROJECTED, TIED.with_kv_code("int8"), UNTIED.with_kv_code("fp8")),
        replace(TIED, kept_states=(1, 3)),
    ],
    ids=["tied", "untied", "projected", "int8 cache", "fp8 cache", "states for a head"],
)
@pytest.mark.parametrize(("n_stages", "tensor"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_an_engine_allocates_the_planned_memory(model: ModelConfig, n_stages: int, tensor: int) -> None:
    model = model.for_devices(tensor)
    parts = split_model(
        model, jax.devices("cpu"), ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor)
    )
    drawn = init_parameters(model, jax.random.key(0), jnp.dtype(jnp.float32))
    placed = [
        {name: jax.device_put(drawn[name], place) for name, place in part.placement(model).items()}
        for part in parts
    ]
    shape = engine_shape(model, SERVING, n_workers=n_stages)
    workers = [Worker(model, own, shape, part) for part, own in zip(parts, placed, strict=True)]
    build_engine(model, [], SERVING, parts, workers=workers)
    for worker, part in zip(workers, parts, strict=True):
        room = StageRoom(
            layers=part.layers, n_devices=tensor, itemsize=4, attention="follow_lengths", free=None
        )
        memory = room.memory(model, shape)
        for device in part.group.devices:
            assert bytes_on(device, worker.stage.weights) == memory.weights
            assert bytes_on(device, worker._caches) == memory.slot * SERVING.n_slots
            chooser = worker.chooser
            kept = worker.last_token if chooser is None else (worker.last_token, chooser._tables)
            assert bytes_on(device, kept) == memory.tables


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("n_stages", "tensor"), [(1, 1), (1, 2), (2, 2), (1, 8), (2, 8), (4, 8)])
def test_the_weights_of_every_preset_are_split_as_planned(name: str, n_stages: int, tensor: int) -> None:
    if PRESETS[name].n_heads % tensor:
        pytest.skip(f"{PRESETS[name].n_heads} heads do not split over {tensor}")
    kv_heads = {attention.n_kv_heads for attention in PRESETS[name].attentions}
    if len(kv_heads) > 1 and any(number % tensor for number in kv_heads):
        with pytest.raises(ConfigError, match="where layers differ, it must divide each"):
            PRESETS[name].for_devices(tensor)
        return
    model = PRESETS[name].for_devices(tensor)
    mesh = AbstractMesh((tensor,), (TENSOR,))
    for layers in stage_layers(model.n_layers, n_stages):
        n_bytes = 0
        for own in stage_parameters(model, layers).values():
            arrays, specs = own.held_arrays(jnp.bfloat16).values(), jax.tree.leaves(held_specs(own, tensor))
            for array, one in zip(arrays, specs, strict=True):
                local = NamedSharding(mesh, one).shard_shape(array.shape)
                n_bytes += math.prod(local) * array.dtype.itemsize
        assert n_bytes == stage_bytes(model, layers, tensor, 2)


class Gpu:
    """A GPU whose allocator reports its memory."""

    platform, device_kind, compute_capability, core_count = "gpu", "A GPU", "9.0", 132

    def __init__(self, stats: Mapping[str, int] | None) -> None:
        self.memory_stats = lambda: stats


def gpu_part(stats: Mapping[str, int] | None) -> StagePart:
    class Group:
        devices = (Gpu(stats),)

        def __len__(self) -> int:
            return 1

    part = split_model(PRESETS["gpt3-13b"], jax.devices("cpu")[:1])[0]
    return StagePart(part.layers, Group(), first=True, last=True)  # pyright: ignore[reportArgumentType]


def free(monkeypatch: pytest.MonkeyPatch, reported: float | None, held: str = "") -> int | None:
    """Free memory of a GPU that reserves 90 of 100 GB and uses 26; `held` is the memory fraction."""
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", held)
    part = gpu_part({"bytes_limit": int(90e9), "bytes_in_use": int(26e9)})
    room = stage_room(PRESETS["gpt3-13b"], jnp.dtype("bfloat16"), part, n_devices=1, memory_fraction=reported)
    assert room.modest is None and room.attention == "kernel"
    return room.free


def test_an_engine_may_use_all_memory_that_jax_reserves_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free(monkeypatch, None, "0.9") == free(monkeypatch, 0.9, "0.9") == 64e9
    assert free(monkeypatch, 0.45, "0.9") == pytest.approx(45e9 - 26e9)
    assert free(monkeypatch, 0.1, "0.9") == 0
    assert free(monkeypatch, 0.375) == pytest.approx(45e9 - 26e9), "JAX holds 0.75 by default"
    with pytest.raises(ConfigError, match=r"memory_fraction is 0\.9, and JAX holds 0\.75 of a GPU's memory"):
        free(monkeypatch, 0.9)


def test_n_slots_fill_a_gpu() -> None:
    model = PRESETS["gpt3-13b"]
    part = gpu_part({"bytes_limit": 60_000_000_000, "bytes_in_use": 25_707_253_760})
    room = stage_room(model, jnp.dtype("bfloat16"), part, n_devices=1)
    serving = serving_config(model, Sizes(), [room])
    shape = engine_shape(model, serving, n_workers=1)
    memory = room.memory(model, shape)
    left = 60_000_000_000 - memory.fixed
    assert serving.n_slots == left // (2 * 40 * 5120 * 2)
    check_slots(model, room, shape, n_devices=1)
    more = replace(shape, n_blocks=shape.n_blocks + 1)
    with pytest.raises(
        ConfigError, match=rf"n_slots = {more.n_slots} take 34\.1 GB; the device has 34\.1 GB"
    ):
        check_slots(model, room, more, n_devices=1)


def test_n_slots_are_the_same_before_the_weights_are_loaded() -> None:
    model = PRESETS["gpt3-13b"]
    weights = 25_707_253_760
    result = {
        stage_room(
            *(model, jnp.dtype("bfloat16"), gpu_part({"bytes_limit": 1 << 36, "bytes_in_use": in_use})),
            n_devices=1,
        ).free
        for in_use in (0, weights // 2, weights, weights + (1 << 20))
    }
    assert result == {(1 << 36) - weights}


def test_a_device_without_memory_statistics_gets_a_modest_cache() -> None:
    for stats in (None, {}):
        room = stage_room(PRESETS["gpt3-13b"], jnp.dtype("bfloat16"), gpu_part(stats), n_devices=1)
        assert (room.free, room.modest) == (None, capacity.MODEST_KV_BYTES)


def test_a_cpus_memory_is_shared_by_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 4096}[name])
    part = split_model(TIED, jax.devices("cpu"), ParallelConfig(tensor_parallel=2))[0]
    weights = stage_bytes(TIED.for_devices(2), range(3), 2, 4)

    def room(reported: float | None) -> Any:
        model = TIED.for_devices(2)
        return stage_room(model, jnp.dtype("float32"), part, n_devices=2, memory_fraction=reported)

    assert (room(None).free, room(None).modest) == ((2 << 30) - weights, 1 << 30)
    assert (room(0.5).free, room(0.5).modest) == ((1 << 30) - weights, None)
