"""Checkpoints of experts: a tensor for each or one for all, on one device or several, there and back."""

import json
import re
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from orca_jax.checkpoint.convert import convert_checkpoint
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.errors import TensorMismatch
from orca_jax.sharding.device_group import DeviceGroup
from orca_jax.sharding.partition import StagePart
from tests.device.checkpoint.tiny_checkpoint import Tensors, write_checkpoint
from tests.device.model.golden import DIRECTORY

NAMES = ("mixtral-grouped", "qwen2-moe-dense-first-renormalised", "olmoe-grouped")
_EXPERT = re.compile(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_PART = {"w1": "gate_up", "w3": "gate_up", "w2": "down", "gate_proj": "gate_up", "up_proj": "gate_up"}


def stored(name: str) -> Tensors:
    return load_file(DIRECTORY / name / "model.safetensors")


def fused(tensors: Tensors) -> Tensors:
    """Experts in one tensor, as transformers 5 saves them with save_original_format=False."""
    found: Tensors = {}
    parts: dict[str, dict[int, dict[str, np.ndarray]]] = defaultdict(lambda: defaultdict(dict))
    for name, value in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            found[name.replace("block_sparse_moe", "mlp")] = value
        else:
            layer, expert, part = match.groups()
            parts[f"{layer}.mlp.experts.{_PART.get(part, 'down')}_proj"][int(expert)][part] = value
    order = ("w1", "w3", "w2", "gate_proj", "up_proj", "down_proj")
    for name, experts in parts.items():
        one_by_one = [experts[i] for i in range(len(experts))]
        found[name] = np.stack(
            [np.concatenate([own[part] for part in order if part in own]) for own in one_by_one]
        )
    return found


def config_of(name: str) -> dict[str, object]:
    return json.loads((DIRECTORY / name / "config.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_one_tensor_for_all_experts(tmp_path: Path, name: str) -> None:
    expected = load_checkpoint(DIRECTORY / name, dtype=jnp.float32).parameters
    tensors = fused(stored(name))
    assert sum("experts" in key for key in tensors) == 2 * sum(".gate.weight" in key for key in tensors)
    directory = write_checkpoint(tmp_path, config_of(name), tensors)
    given = load_checkpoint(directory, dtype=jnp.float32).parameters
    assert set(given) == set(expected)
    for key, value in expected.items():
        assert np.array_equal(given[key], value), key


def test_one_tensor_of_another_number_of_experts(tmp_path: Path) -> None:
    tensors = fused(stored("mixtral-grouped"))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    for wrong in (tensors[name][1:], tensors[name].reshape(-1, 24), tensors[name].swapaxes(1, 2)):
        directory = write_checkpoint(tmp_path, config_of("mixtral-grouped"), tensors | {name: wrong})
        with pytest.raises(TensorMismatch, match=re.escape(f"'{name}': expected shape [8, 40, 24]")):
            load_checkpoint(directory, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("name", "n_devices", "each"),
    [
        ("mixtral-grouped", 2, (4, 2, 20, 24)),  # of 8 experts of 20 elements
        ("mixtral-grouped", 4, (2, 2, 20, 24)),
        ("mixtral-grouped", 5, (8, 2, 4, 24)),
        ("qwen2-moe-dense-first-renormalised", 3, (3, 2, 12, 30)),  # of 9 of 12
        ("olmoe-grouped", 4, (7, 2, 4, 36)),  # of 7 of 16
        ("gpt-oss-yarn", 2, (7, 2, 11, 28)),  # of 7 of 22
        ("gpt-oss-multi-query-tied", 2, (2, 2, 26, 20)),  # of 4 of 26
    ],
)
def test_each_device_gets_its_experts_or_its_part_of_each(
    name: str, n_devices: int, each: tuple[int, ...]
) -> None:
    """All devices' shards together are the checkpoint's weights."""
    whole = load_checkpoint(DIRECTORY / name, dtype=jnp.float32)
    group = DeviceGroup(tuple(jax.devices()[:n_devices]))
    part = StagePart(range(whole.config.n_layers), group, first=True, last=True)
    only = {key: place for key, place in part.placement(whole.config).items() if ".experts." in key}
    (given,) = load_checkpoint(DIRECTORY / name, dtype=jnp.float32, placements=[only]).stages
    up = given["layers.1.experts.up.weight"]
    assert {shard.data.shape for shard in up.addressable_shards} == {each}
    for key, value in given.items():
        assert np.array_equal(value, whole.parameters[key]), key


@pytest.mark.parametrize("name", [*NAMES, "gpt-oss-yarn"])
def test_there_and_back(tmp_path: Path, name: str) -> None:
    assert convert_checkpoint(DIRECTORY / name, tmp_path / "orbax") == "orbax"
    assert convert_checkpoint(tmp_path / "orbax", tmp_path / "back") == "safetensors"
    original, back = stored(name), load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(original)
    assert all(np.array_equal(back[key], original[key]) for key in original)
