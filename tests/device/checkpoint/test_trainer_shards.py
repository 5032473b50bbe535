"""Trainers' checkpoints are read onto stages and devices, each its part, and give the trainer's tokens."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

from orca_jax.checkpoint import array_view
from orca_jax.checkpoint.directory import Checkpoint, find_parameters, load_checkpoint
from orca_jax.config import ParallelConfig, ServingConfig
from orca_jax.families.hf_config import read_config
from orca_jax.families.trainers.orca_json import read_description
from orca_jax.sharding.partition import StagePart, split_model
from tests.device.checkpoint.test_trainers import DIRECTORY, arrays_of, golden_of
from tests.device.harness import greedy_request, harness

NAMES = ("tunix-llama3", "maxtext-llama2-scanned", "maxtext-mixtral-scanned")
FIRST = {"embedder", "token_embedder"}  # only in the first stage
LAST = {"final_norm", "lm_head", "decoder_norm", "logits_dense"}  # only in the last

Reads = list[tuple[str, tuple[int | slice, ...]]]  # the array and the box of each


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found: Reads = []
    real = array_view.read_box

    def noted(store: ts.TensorStore, index: tuple[int | slice, ...], where: str) -> np.ndarray:
        found.append((where.split("'")[1], index))
        return real(store, index, where)

    monkeypatch.setattr(array_view, "read_box", noted)
    return found


def weights_of(directory: Path) -> dict[str, np.ndarray]:
    arrays = arrays_of(read_description(directory).checkpoint)
    return {name: values for name, values in arrays.items() if values.dtype.kind == "f"}


def stages_of(directory: Path, n_devices: int) -> tuple[StagePart, ...]:
    """Two stages of `n_devices` each."""
    parallel = ParallelConfig(tensor_parallel=n_devices, pipeline_parallel=2)
    return split_model(read_config(directory), jax.devices(), parallel)


def load(directory: Path, parts: Sequence[StagePart]) -> Checkpoint:
    placements = [part.placement(read_config(directory)) for part in parts]
    return load_checkpoint(directory, dtype=jnp.float32, placements=placements)


def is_in(part: StagePart, name: str, second: int) -> bool:
    """Whether a stage has the elements of an array that are at `second` of its axis 1."""
    keys = name.split(".")
    if "layers" not in keys:
        return bool((part.first and FIRST & {*keys}) or (part.last and LAST & {*keys}))
    return (int(keys[1]) if keys[0] == "layers" else second) in part.layers  # MaxText's axis 1 has the layers


def assert_read_once(reads: Reads, weights: dict[str, np.ndarray], parts: Sequence[StagePart]) -> None:
    """Each element of these stages was read once, and no other."""
    n_reads = {name: np.zeros(values.shape, int) for name, values in weights.items()}
    for name, index in reads:
        n_reads[name][index] += 1
    for name, found in n_reads.items():
        for second, elements in enumerate(np.moveaxis(found, 1, 0) if found.ndim > 1 else found[None]):
            assert {*elements.flat} == {sum(is_in(part, name, second) for part in parts)}, name


@pytest.mark.matrix(but=["tunix-llama3"])
@pytest.mark.parametrize(
    "name", [*NAMES[:2], *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[2:])]
)
def test_onto_two_stages_of_two_devices(name: str, reads: Reads) -> None:
    """Each device gets its slice, and the engine computes the trainer's tokens with them."""
    golden = golden_of(name)
    directory, weights = golden.directory, weights_of(golden.directory)
    whole = load_checkpoint(directory, dtype=jnp.float32).parameters
    parts = stages_of(directory, n_devices=2)
    for some in (parts[:1], parts[1:], parts):
        reads.clear()
        loaded = load(directory, some)
        assert_read_once(reads, weights, some)
    for stage, part in zip(loaded.stages, parts, strict=True):
        for parameter, value in stage.items():
            assert value.sharding.device_set == {*part.group.devices}
            for shard in value.addressable_shards:
                np.testing.assert_array_equal(shard.data, whole[parameter][shard.index], parameter)
        assert any(value.addressable_shards[0].data.size == value.size // 2 for value in stage.values())

    serving = ServingConfig(max_batch_size=4, n_slots=256, max_batch_tokens=64)
    both = loaded.stages[0] | loaded.stages[1]
    engine = harness(loaded.config, both, serving, buckets=(64,), parts=parts)
    n = golden.tokens.shape[1]
    outputs = engine.run([greedy_request(str(i), prompt, n) for i, prompt in enumerate(golden.prompts)])
    assert [[*outputs[str(i)]] for i in range(len(golden.tokens))] == golden.tokens.tolist()


def in_small_chunks(name: str, directory: Path) -> Path:
    """A copy with a file for each chunk, and a chunk for each layer and head."""
    tree: dict[str, Any] = {}
    save_args: dict[str, Any] = {}
    for path, values in weights_of(DIRECTORY / name).items():
        *keys, last = path.split(".")
        node, args = tree, save_args
        for key in keys:
            node, args = node.setdefault(key, {}), args.setdefault(key, {})
        node[last] = values
        few = tuple(i for i, n in enumerate(values.shape) if n <= 4)
        args[last] = ocp.SaveArgs(chunk_byte_size=256, shard_axes=few)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(directory / "0", args=ocp.args.PyTreeSave(tree, save_args))
    shutil.copy(DIRECTORY / name / "config.json", directory)
    return directory


def bytes_read() -> int:
    """The bytes that TensorStore has read from files in this process."""
    (metric,) = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return metric["values"][0]["value"]


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_reads_only_its_chunks(name: str, tmp_path: Path) -> None:
    directory = in_small_chunks(name, tmp_path)
    chunks = [
        (file.parent.name, int([*file.name.split("."), "0"][1]), file.stat().st_size)
        for file in directory.glob("0/*/[0-9]*")
    ]
    start = bytes_read()
    find_parameters(directory)
    metadata = bytes_read() - start
    for n_devices in (1, 2):
        for part in stages_of(directory, n_devices):
            start = bytes_read()
            load(directory, [part])
            expected = sum(size for array, second, size in chunks if is_in(part, array, second))
            assert bytes_read() - start - metadata == expected
            assert 0.4 < expected / sum(size for _, _, size in chunks) < 0.6
