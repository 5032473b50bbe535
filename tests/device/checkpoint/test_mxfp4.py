"""Experts in MXFP4, as gpt-oss is published, against transformers' reading of the same file."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from orca_jax.checkpoint import safetensors_reader
from orca_jax.checkpoint.convert import convert_checkpoint
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.checkpoint.safetensors_reader import StoredTensor
from orca_jax.errors import CheckpointError, TensorMismatch, UnsupportedModel
from orca_jax.families.parameters import parameter_table
from orca_jax.sharding.device_group import DeviceGroup
from orca_jax.sharding.partition import StagePart
from tests.device.checkpoint.dense_parts import dense_parts
from tests.device.checkpoint.tiny_checkpoint import Tensors, write_checkpoint
from tests.device.model.golden import DIRECTORY

PACKED = DIRECTORY / "gpt-oss-mxfp4"
CONFIG: dict[str, Any] = json.loads((PACKED / "config.json").read_text())
UP, DOWN = "layers.0.experts.up.weight", "layers.0.experts.down.weight"
BLOCKS, SCALES = (f"model.layers.0.mlp.experts.down_proj_{part}" for part in ("blocks", "scales"))


def tensors() -> Tensors:
    return load_file(PACKED / "model.safetensors")


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files be read a few rows at a time."""
    monkeypatch.setattr(safetensors_reader, "_CHUNK_BYTES", 100)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_numbers_are_transformers_s(dtype: Any, pieces: None) -> None:
    given = load_checkpoint(PACKED, dtype=dtype).parameters
    with np.load(PACKED / "unpacked.npz") as theirs:
        gate_up, down = theirs["gate_up_proj"], theirs["down_proj"]  # [X, H, 2 F], [X, F, H]
    expected = np.stack([gate_up[..., 0::2], gate_up[..., 1::2]], axis=1).swapaxes(2, 3)
    assert given[UP].dtype == dtype and given[UP].shape == (3, 2, 64, 32)
    assert np.array_equal(given[UP].astype(jnp.float32), expected)
    assert np.array_equal(given[DOWN].astype(jnp.float32), down.swapaxes(1, 2))


@pytest.mark.parametrize(
    ("n_devices", "up", "down"),
    [(2, (3, 2, 32, 32), (3, 32, 32)), (3, (1, 2, 64, 32), (1, 32, 64)), (4, (3, 2, 16, 32), (3, 32, 16))],
)
def test_each_device_gets_its_part(
    n_devices: int, up: tuple[int, ...], down: tuple[int, ...], pieces: None
) -> None:
    whole = load_checkpoint(PACKED, dtype=jnp.float32)
    part = StagePart(range(2), DeviceGroup(tuple(jax.devices()[:n_devices])), first=True, last=True)
    only = {key: place for key, place in part.placement(whole.config).items() if ".experts." in key}
    (given,) = load_checkpoint(PACKED, dtype=jnp.float32, placements=[only]).stages
    for name, shape in ((UP, up), (DOWN, down)):
        assert {shard.data.shape for shard in given[name].addressable_shards} == {shape}
    for key, value in given.items():
        assert np.array_equal(value, whole.parameters[key]), key


@pytest.mark.parametrize(
    ("name", "box", "of_blocks", "of_scales"),
    [
        (UP, ((0, 3), (0, 2), (0, 64), (0, 32)), 3 * 128 * 16, 3 * 128),
        (UP, ((1, 2), (0, 2), (0, 64), (0, 32)), 128 * 16, 128),
        (UP, ((0, 3), (0, 2), (16, 32), (0, 32)), 3 * 32 * 16, 3 * 32),
        (DOWN, ((0, 3), (0, 32), (32, 64)), 3 * 32 * 16, 3 * 32),
        (DOWN, ((2, 3), (0, 32), (16, 32)), 32 * 16, 32),  # of half a block all is read
    ],
)
def test_only_a_parts_bytes_are_read(
    name: str, box: Any, of_blocks: int, of_scales: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, parts = dense_parts(PACKED)
    read = {"blocks": 0, "scales": 0}
    reading: Callable[..., None] = StoredTensor._read  # pyright: ignore[reportPrivateUsage]

    def counted(tensor: StoredTensor, file: int, run: np.ndarray, offset: int) -> None:
        read[tensor.name.rpartition("_")[2]] += run.nbytes
        reading(tensor, file, run, offset)

    monkeypatch.setattr(StoredTensor, "_read", counted)
    shape, dtype = parameter_table(model)[name].shape, np.dtype("f4")
    given = parts[name].read(shape, dtype, box)
    assert read == {"blocks": of_blocks, "scales": of_scales}
    whole = parts[name].read(shape, dtype, tuple((0, n) for n in shape))
    assert np.array_equal(given, whole[tuple(slice(*each) for each in box)])


def test_converted_it_is_unpacked(tmp_path: Path) -> None:
    expected = load_checkpoint(PACKED, dtype=jnp.float32).parameters
    assert convert_checkpoint(PACKED, tmp_path / "orbax") == "orbax"
    assert convert_checkpoint(PACKED, tmp_path / "plain", to="safetensors") == "safetensors"
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    gate_up = plain["model.layers.0.mlp.experts.gate_up_proj"]
    assert gate_up.shape == (3, 32, 128) and gate_up.dtype == ml_dtypes.bfloat16
    assert not any(name.endswith(("_blocks", "_scales")) for name in plain)
    for directory in (tmp_path / "orbax", tmp_path / "plain"):
        assert "quantization_config" not in json.loads((directory / "config.json").read_text())
        given = load_checkpoint(directory, dtype=jnp.float32).parameters
        assert all(np.array_equal(given[key], value) for key, value in expected.items())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({SCALES: None}, f"'{SCALES}' is missing"),
        ({BLOCKS: lambda blocks: blocks[1:]}, f"'{BLOCKS}': expected shape [3, 32, 2, 16]"),
        ({BLOCKS: lambda blocks: blocks.astype(np.float32)}, f"'{BLOCKS}': expected dtype U8, found F32"),
        ({SCALES: lambda scales: np.full_like(scales, 253)}, f"'{SCALES}': a scale: expected at most 252"),
    ],
)
def test_malformed_packed_experts(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    given = tensors()
    for name, change in changes.items():
        value = given.pop(name)
        if change is not None:
            given[name] = change(value)
    with pytest.raises(TensorMismatch, match=re.escape(words)):
        load_checkpoint(write_checkpoint(tmp_path, CONFIG, given), dtype=jnp.float32)


def test_matrices_that_have_no_whole_blocks(tmp_path: Path) -> None:
    given = {name: value[:, :96] if "gate_up" in name else value for name, value in tensors().items()}
    directory = write_checkpoint(tmp_path, CONFIG | {"intermediate_size": 48}, given)
    with pytest.raises(TensorMismatch, match="MXFP4 has blocks of 32 numbers, and 48 is no multiple of it"):
        load_checkpoint(directory, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "hqq", "bits": 4}, "quantised by HQQ in 4 bits (quant_method hqq)"),
        ({"bits": 4}, "quantised by a method that it does not name in 4 bits"),
        ({"quant_method": "mxfp4", "block_size": 16}, "quantization_config.block_size is 16"),
    ],
)
def test_other_quantizations_are_refused_by_name(
    tmp_path: Path, quantization: dict[str, Any], words: str
) -> None:
    directory = write_checkpoint(tmp_path, CONFIG | {"quantization_config": quantization}, tensors())
    with pytest.raises(UnsupportedModel, match=re.escape(words)):
        load_checkpoint(directory, dtype=jnp.float32)


def test_a_quantization_of_the_wrong_kind(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, CONFIG | {"quantization_config": "mxfp4"}, tensors())
    with pytest.raises(CheckpointError, match="quantization_config: expected an object"):
        load_checkpoint(directory, dtype=jnp.float32)
