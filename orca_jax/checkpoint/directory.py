"""Loads a checkpoint's directory: reads its named parameters onto their devices.

The directory is a Hugging Face one with safetensors, or an Orbax checkpoint. All metadata is checked for
consistency before any weight is read. Then each parameter is read shard by shard, and only the shards that
are needed, so the host holds one shard in addition to what is placed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from orca_jax.checkpoint import huggingface as hf_checkpoint
from orca_jax.checkpoint import orbax as orbax_checkpoint
from orca_jax.checkpoint.shard_reader import Parts, Place, bytes_read, put
from orca_jax.errors import ConfigError, UnsupportedModel
from orca_jax.families.hf_config import read_hf_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import parameter_table
from orca_jax.families.strict_json import shown
from orca_jax.families.trainers.orca_json import read_description
from orca_jax.model_files.description import is_orbax

_DTYPES = tuple(np.dtype(dtype) for dtype in (np.float32, ml_dtypes.bfloat16, np.float16))

Placement = Mapping[str, jax.sharding.Sharding]  # a stage's parameters by name


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on its devices: each stage's parameters by name, shaped as in `parameter_shapes(config)`."""

    config: ModelConfig
    stages: list[dict[str, jax.Array]]
    directory: Path

    @property
    def parameters(self) -> dict[str, jax.Array]:
        """The parameters of the only stage."""
        (parameters,) = self.stages
        return parameters


def load_directory(
    directory: Path,
    *,
    dtype: DTypeLike,
    vocab_multiple: int = 1,
    kv_repeats: int = 1,
    packed: bool = False,
    placements: Sequence[Placement] | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """Read a checkpoint and put its parameters onto devices.

    The directory has config.json and either model.safetensors or model.safetensors.index.json with its files
    (if both exist, the single file is read, as in transformers); or it is an Orbax checkpoint with orca.json
    or config.json. The weights are converted to `dtype`: float32, bfloat16 or float16. `vocab_multiple` pads
    the vocabulary's rows with zeros, and each K/V head is read `kv_repeats` times (ModelConfig). With
    `packed` experts in MXFP4 stay so.

    `placements` has a mapping from parameter names to shardings for each stage of this process. Parameters
    that no stage names are not read; those that several name (a tied embedding) are read once. Without
    `placements` there is one stage, on the default device. `on_bytes(done, total)` receives the progress in
    bytes read.

    Raises a CheckpointError (NotACheckpoint, UnsafeFile, CorruptFile, BadModelConfig, UnsupportedModel or
    TensorMismatch), or ConfigError for another `dtype`.
    """
    target = np.dtype(dtype)
    if target not in _DTYPES:
        raise ConfigError(f"dtype is {target.name}; it must be float32, bfloat16 or float16")
    model, parts = find_parameters(directory, kv_repeats, packed=packed)
    config = replace(model, vocab_multiple=vocab_multiple)
    table = parameter_table(config)
    shapes = {name: parameter.held_shape for name, parameter in table.items()}

    wanted: dict[str, dict[int, Place]] = {name: {0: None} for name in parts}  # in the order of reading
    if placements is not None:
        unknown = {name for placement in placements for name in placement} - set(shapes)
        assert not unknown, unknown
        wanted = {
            name: {i: placement[name] for i, placement in enumerate(placements) if name in placement}
            for name in parts
        }
    n_bytes = {
        name: bytes_read(parts[name], shapes[name], [*places.values()]) for name, places in wanted.items()
    }
    total, done = sum(n_bytes.values()), 0
    stages: list[dict[str, jax.Array]] = [{} for _ in placements or [None]]
    for name, places in wanted.items():
        if not places:
            continue
        arrays = put(parts[name], shapes[name], table[name].held_dtype(target), [*places.values()])
        for i, array in zip(places, arrays, strict=True):
            stages[i][name] = array
        done += n_bytes[name]
        if on_bytes is not None:
            on_bytes(done, total)
    return Checkpoint(config, stages, directory)


def find_parameters(
    directory: Path, kv_repeats: int = 1, *, packed: bool = False
) -> tuple[ModelConfig, dict[str, Parts]]:
    """The model in a directory, and how each parameter is stored; checks everything and reads no weight.

    The model has each K/V head `kv_repeats` times, and with `packed` experts in MXFP4. Raises a
    CheckpointError, or ConfigError for a model that cannot be so.
    """
    if is_orbax(directory):
        if packed or read_description(directory).model.has_packed_experts:
            raise UnsupportedModel(f"{shown(directory)} is an Orbax checkpoint, which has no packed experts")
        return orbax_checkpoint.find_parameters(directory, kv_repeats)
    hf_config = read_hf_config(directory)
    model = hf_config.model.with_packed_experts() if packed else hf_config.model
    hf_config = replace(hf_config, model=model.with_kv_heads(kv_repeats))
    stored = hf_checkpoint.find_tensors(directory, hf_config.family.may_be_unlisted)
    return hf_config.model, hf_checkpoint.match(hf_config, stored)
