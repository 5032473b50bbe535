"""Loads checkpoints onto meshes of eight virtual devices, with random placements.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.device.checkpoint.placed_shards DIRECTORY
"""

import sys
from pathlib import Path

import jax
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from orca_jax.checkpoint import orbax_store, safetensors_reader
from orca_jax.checkpoint.convert import convert_checkpoint
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.families.parameters import parameter_shapes
from tests.device.checkpoint.tiny_checkpoint import GPT2, OPT, gpt2_tensors, opt_tensors, write_checkpoint

N_DEVICES = 8


@st.composite
def specs(draw: st.DrawFn, shape: tuple[int, ...], axis_sizes: dict[str, int]) -> PartitionSpec:
    """Any axes of the mesh along any axes of the array that they divide."""
    left = dict(axis_sizes)
    spec: list[str | tuple[str, ...] | None] = []
    for size in shape:
        fits = [None, *(name for name, n in left.items() if size % n == 0)]
        both = ("a", "b") if set(left) == {"a", "b"} and size % (left["a"] * left["b"]) == 0 else None
        chosen = draw(st.sampled_from([*fits, both] if both else fits))
        for name in (chosen,) if isinstance(chosen, str) else chosen or ():
            del left[name]
        spec.append(chosen)
    return PartitionSpec(*spec)


@settings(
    max_examples=8,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def check(directory: Path, data: st.DataObject) -> None:
    """Load one random model onto random stages in both formats; every shard is its slice of the whole."""
    heads = 4
    width = heads * data.draw(st.sampled_from([2, 3]))
    if data.draw(st.booleans()):
        config = {**GPT2, "n_embd": width, "n_head": heads, "n_inner": 8}
        tensors = gpt2_tensors(config)
    else:
        config = {**OPT, "hidden_size": width, "num_attention_heads": heads, "ffn_dim": 8}
        tensors = opt_tensors(config)
    place = write_checkpoint(
        directory / str(len([*directory.iterdir()])), config, tensors, n_files=data.draw(st.integers(1, 3))
    )
    orbax = place.with_name(place.name + "-orbax")
    safetensors_reader._CHUNK_BYTES = data.draw(st.sampled_from([40, 1 << 24]))
    orbax_store._CHUNK_BYTES = data.draw(st.sampled_from([200, 1 << 24]))
    convert_checkpoint(place, orbax)

    whole = load_checkpoint(place, dtype=np.float32, vocab_multiple=8)
    shapes = parameter_shapes(whole.config)
    placements: list[dict[str, jax.sharding.Sharding]] = []
    for _ in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (1, 8)]))
        first = data.draw(st.integers(0, N_DEVICES - shape[0] * shape[1]))
        devices = np.array(jax.devices()[first : first + shape[0] * shape[1]])
        mesh = Mesh(devices.reshape(shape), ("a", "b"))
        names = data.draw(st.sets(st.sampled_from(sorted(shapes))))
        placements.append(
            {
                name: NamedSharding(mesh, data.draw(specs(shapes[name], dict(mesh.shape))))
                if data.draw(st.booleans())
                else SingleDeviceSharding(devices[0])
                for name in sorted(names)
            }
        )
    for source in (place, orbax):
        progress: list[tuple[int, int]] = []
        loaded = load_checkpoint(
            source,
            dtype=np.float32,
            vocab_multiple=8,
            placements=placements,
            on_bytes=lambda done, total, progress=progress: progress.append((done, total)),
        )
        assert len(loaded.stages) == len(placements)
        for placement, stage in zip(placements, loaded.stages, strict=True):
            assert list(stage) == [name for name in shapes if name in placement]
            for name, value in stage.items():
                assert value.sharding == placement[name]
                expected = np.asarray(whole.parameters[name])
                for shard in value.addressable_shards:
                    np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
        assert len(progress) == len({name for placement in placements for name in placement})
        assert not progress or progress[-1][0] == progress[-1][1]


if __name__ == "__main__":
    assert len(jax.devices()) == N_DEVICES
    check(Path(sys.argv[1]))
