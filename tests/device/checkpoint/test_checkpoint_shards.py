"""Partial reads: any box of a parameter is that slice of it, and reads only the slice's bytes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orca_jax.checkpoint import orbax_store, safetensors_reader
from orca_jax.checkpoint.convert import convert_checkpoint
from orca_jax.checkpoint.orbax_boxes import runs
from orca_jax.checkpoint.shard_reader import Box
from orca_jax.errors import CorruptFile, TensorMismatch
from orca_jax.families.parameters import parameter_shapes
from tests.device.checkpoint.dense_parts import dense_parts
from tests.device.checkpoint.tiny_checkpoint import GPT2, OPT, gpt2_tensors, opt_tensors, write_checkpoint
from tests.places import ROOT
from tests.xla_flags import xla_flags


def whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """GPT-2 and OPT, each as safetensors and as Orbax arrays of small chunks."""
    directory = tmp_path_factory.mktemp("sources")
    paths: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orbax_store, "_CHUNK_BYTES", 40)
        for name, config, tensors in (("gpt2", GPT2, gpt2_tensors()), ("opt", OPT, opt_tensors())):
            place = write_checkpoint(directory / name, config, tensors, n_files=2)
            convert_checkpoint(place, directory / f"{name}-orbax")
            paths += [place, directory / f"{name}-orbax"]
    return paths


@settings(max_examples=150)
@given(data=st.data())
def test_any_box_is_that_slice_of_the_whole(sources: list[Path], data: st.DataObject) -> None:
    directory = data.draw(st.sampled_from(sources))
    config, parts = dense_parts(directory)
    name = data.draw(st.sampled_from(sorted(parts)))
    shape = parameter_shapes(config)[name]
    if name == "token_embedding":
        shape = (shape[0] + data.draw(st.integers(0, 9)), shape[1])  # a padded vocabulary
    edges = [sorted(data.draw(st.sets(st.integers(0, n), min_size=2, max_size=2))) for n in shape]
    box = tuple((first, end) for first, end in edges)
    full = parts[name].read(shape, np.dtype("f4"), whole(shape))
    part = parts[name].read(shape, np.dtype("f4"), box)
    np.testing.assert_array_equal(part, full[tuple(slice(a, b) for a, b in box)])
    stored = parameter_shapes(config)[name]
    inside = [max(0, min(b, n) - min(a, n)) for (a, b), n in zip(box, stored, strict=True)]
    assert parts[name].n_bytes(shape, box) == np.prod(inside) * 4


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4).flatmap(
        lambda sizes: st.tuples(
            st.just(tuple(sizes)), st.integers(0, int(np.prod(sizes))), st.integers(0, int(np.prod(sizes)))
        )
    )
)
def test_a_run_of_merged_axes_as_boxes(case: tuple[tuple[int, ...], int, int]) -> None:
    sizes, one, other = case
    first, end = sorted((one, other))
    values = np.arange(np.prod(sizes)).reshape(sizes)
    pieces = [values[tuple(slice(a, b) for a, b in box)].ravel() for box in runs(sizes, first, end)]
    result = np.concatenate([np.arange(0), *pieces]) if first < end else np.arange(0)
    np.testing.assert_array_equal(result, np.arange(first, end))


def test_only_a_shards_bytes_are_read(sources: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = os.preadv

    def counted(file: int, buffers: list[memoryview], offset: int) -> int:
        n = real(file, buffers, offset)
        read.append(n)
        return n

    monkeypatch.setattr(os, "preadv", counted)
    for directory in sources[::2]:
        config, parts = dense_parts(directory)
        for name, shape in parameter_shapes(config).items():
            box = (*whole(shape[:-1]), (shape[-1] // 2, shape[-1]))
            read.clear()
            parts[name].read(shape, np.dtype("f4"), box)
            assert sum(read) == parts[name].n_bytes(shape, box) == np.prod([b - a for a, b in box]) * 4


def test_on_meshes_of_virtual_devices(tmp_path: Path) -> None:
    env = {**os.environ, "XLA_FLAGS": xla_flags(8), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-m", "tests.device.checkpoint.placed_shards", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert any(tmp_path.iterdir())


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["F32", "BF16", "F64"]), st.sampled_from(["f4", "f2"]))
def test_a_part_with_numbers_too_large(tmp_path: Path, stored: str, asked: str) -> None:
    tensors = gpt2_tensors(prefix="")
    tensors["ln_f.bias"][1] = 1e6
    element = safetensors_reader.FLOAT_DTYPES[stored]
    write_checkpoint(tmp_path, GPT2, {name: value.astype(element) for name, value in tensors.items()})
    _, parts = dense_parts(tmp_path)
    part = parts["final_norm.bias"]
    assert part.read((4,), np.dtype(asked), ((2, 4),)).shape == (2,)  # what is too large is not in it
    if asked == "f2":
        with pytest.raises(TensorMismatch, match=r"ln_f\.bias.*float16"):
            part.read((4,), np.dtype(asked), ((0, 2),))


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, GPT2, gpt2_tensors(prefix=""))
    _, parts = dense_parts(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 2000)
    late = parts["final_norm.bias"]
    with pytest.raises(CorruptFile, match=r"model\.safetensors: tensor 'ln_f\.bias' cannot be read"):
        late.read((4,), np.dtype("f4"), ((0, 4),))
