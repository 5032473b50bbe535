"""Loads a checkpoint's directory: reads its named parameters onto their devices.

The directory is Hugging Face's with safetensors, or an Orbax checkpoint. All metadata is checked for
consistency before any weight is read. Then each parameter is read shard by shard, and only the needed shards,
so the host holds one shard at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from orca_jax.checkpoint import gguf as gguf_checkpoint
from orca_jax.checkpoint import huggingface as hf_checkpoint
from orca_jax.checkpoint import orbax as orbax_checkpoint
from orca_jax.checkpoint.ordered_rows import in_order_of_shares
from orca_jax.checkpoint.shard_reader import Place, Plane, Source, bytes_read, put, read_whole
from orca_jax.errors import ConfigError, UnsupportedModel
from orca_jax.families.hf_config import HFConfig, read_hf_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import Parameter, parameter_table
from orca_jax.families.strict_json import shown
from orca_jax.families.trainers.array_trees import has_array_tree
from orca_jax.families.trainers.orca_json import read_description
from orca_jax.families.weight_form import DENSE, Dense, HeldArray, WeightForm
from orca_jax.gguf_file import is_gguf
from orca_jax.model.weight import kind_of
from orca_jax.sharding.partition import Placement
from orca_jax.sharding.specs import in_form, place_of_dense

# Reads the config of a Hugging Face directory, or of a part of it with its own names.
ReadConfig = Callable[[Path], HFConfig]

_DTYPES = tuple(np.dtype(dtype) for dtype in (np.float32, ml_dtypes.bfloat16, np.float16))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on its devices: each stage's parameters by name, in the forms of `parameter_table(config)`."""

    config: ModelConfig
    stages: list[dict[str, Any]]
    directory: Path

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the only stage."""
        (parameters,) = self.stages
        return parameters


def load_checkpoint(
    directory: Path,
    *,
    dtype: DTypeLike,
    vocab_multiple: int = 1,
    kv_repeats: int = 1,
    state_shares: int = 1,
    packed: bool = False,
    forms: Mapping[str, WeightForm] | None = None,
    placements: Sequence[Placement] | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
    read: ReadConfig = read_hf_config,
) -> Checkpoint:
    """Read the checkpoint in a directory and put its parameters onto devices.

    The directory has config.json and either model.safetensors or model.safetensors.index.json with its files
    (if both exist, the single file is read, as in transformers); or it is an Orbax checkpoint with orca.json
    or config.json. The weights are converted to `dtype`: float32, bfloat16 or float16. `vocab_multiple` pads
    the vocabulary's rows with zeros, each K/V head is read `kv_repeats` times, and the rows of recurrent
    layers are in the order of `state_shares` devices (ModelConfig). With `packed` experts stay in MXFP4;
    `forms` has the forms of weights by name, by default the checkpoint's.

    `placements` maps parameter names to shardings, for each stage of this process. Parameters that no stage
    names are not read; a tied embedding, which two stages name, is read once. Without `placements` there is
    one stage, on the default device. `on_bytes(done, total)` receives the progress in bytes read. `read` is
    as in find_parameters.

    Raises a CheckpointError (NotACheckpoint, UnsafeFile, CorruptFile, BadModelConfig, UnsupportedModel or
    TensorMismatch), or ConfigError for another `dtype`.
    """
    target = np.dtype(dtype)
    if target not in _DTYPES:
        raise ConfigError(f"dtype is {target.name}; it must be float32, bfloat16 or float16")
    model, parts = find_parameters(
        directory, kv_repeats, state_shares=state_shares, packed=packed, forms=forms, read=read
    )
    config = replace(model, vocab_multiple=vocab_multiple)
    table = parameter_table(config)

    wanted: dict[str, dict[int, Any]] = {name: {0: None} for name in parts}  # in the order of reading
    if placements is not None:
        unknown = {name for placement in placements for name in placement} - set(table)
        assert not unknown, unknown
        wanted = {
            name: {i: placement[name] for i, placement in enumerate(placements) if name in placement}
            for name in parts
        }
    n_bytes = {
        name: sum(
            bytes_read(source, array.shape, each)
            for source, array, each in _arrays(parts[name], table[name], target, [*places.values()])
        )
        for name, places in wanted.items()
    }
    total, done = sum(n_bytes.values()), 0
    stages: list[dict[str, Any]] = [{} for _ in placements or [None]]
    for name, places in wanted.items():
        if not places:
            continue
        loaded = put_in_form(parts[name], table[name], target, [*places.values()])
        for i, weight in zip(places, loaded, strict=True):
            stages[i][name] = weight
        done += n_bytes[name]
        if on_bytes is not None:
            on_bytes(done, total)
    return Checkpoint(config, stages, directory)


def put_in_form(source: Source, parameter: Parameter, dtype: np.dtype, places: Sequence[Any]) -> list[Any]:
    """Read a parameter onto each of `places`, in its form. Raises TensorMismatch or CorruptFile.

    Where a checkpoint lacks the form, the dense numbers are read and then encoded on the devices.
    """
    form = parameter.form
    read = [
        put(one, array.shape, array.dtype, each)
        for one, array, each in _arrays(source, parameter, dtype, places)
    ]
    if isinstance(form, Dense):
        return read[0]
    if isinstance(source, Mapping):
        names = parameter.held_arrays(dtype)
        return [
            kind_of(form)(form, dict(zip(names, arrays, strict=True))) for arrays in zip(*read, strict=True)
        ]
    return [in_form(parameter, one, place) for one, place in zip(read[0], places, strict=True)]


def read_ahead(source: Source, parameter: Parameter, dtype: np.dtype) -> Source:
    """Read a parameter whole into host memory. Raises TensorMismatch or CorruptFile."""
    read = [
        read_whole(one, array.shape, np.dtype(array.dtype))
        for one, array, _ in _arrays(source, parameter, dtype, [])
    ]
    if isinstance(source, Mapping):
        return dict(zip(source, read, strict=True))
    return read[0]


def _arrays(
    source: Source, parameter: Parameter, dtype: np.dtype, places: Sequence[Any]
) -> Iterator[tuple[Plane, HeldArray, list[Place]]]:
    """Yield each array that is read from the checkpoint, where it is read, and its places."""
    form = parameter.form
    if isinstance(source, Mapping):
        arrays = parameter.held_arrays(dtype)
        assert arrays.keys() == source.keys(), (form, list(source))
        for name, array in arrays.items():
            yield source[name], array, [None if place is None else place.arrays[name] for place in places]
        return
    dense = form if isinstance(form, Dense) else DENSE
    (array,) = dense.arrays(parameter.shape, dtype).values()
    if isinstance(form, Dense):
        yield source, array, [*places]
    else:
        yield source, array, [None if place is None else place_of_dense(parameter, place) for place in places]


def find_parameters(
    directory: Path,
    kv_repeats: int = 1,
    *,
    state_shares: int = 1,
    packed: bool = False,
    forms: Mapping[str, WeightForm] | None = None,
    read: ReadConfig = read_hf_config,
) -> tuple[ModelConfig, dict[str, Source]]:
    """Find the model in a directory and how each parameter is stored; check everything, and read no weight.

    The model has each K/V head `kv_repeats` times, the rows of recurrent layers in the order of
    `state_shares` devices, with `packed` experts in MXFP4, and its weights in `forms`, by default in those
    that the checkpoint has. A reader of packed checkpoints gives the model its forms
    (ModelConfig.with_forms), and so does what reads only metadata (model_files/found_model.py), so that
    plans know them. For each weight in a form that the checkpoint has it gives a Source of planes
    (shard_reader.py); where `forms` asks for another form than the checkpoint's, the Source is Parts of the
    dense numbers. `read` reads the config of a Hugging Face directory; a head's reads that of a part of it.
    Raises a CheckpointError, or ConfigError for a model without experts to pack.
    """
    stored, sources = _find_stored(directory, kv_repeats, packed=packed, forms=forms, read=read)
    model = stored.with_state_shares(state_shares)
    return model, in_order_of_shares(sources, stored, model)


def _find_stored(
    directory: Path,
    kv_repeats: int,
    *,
    packed: bool,
    forms: Mapping[str, WeightForm] | None,
    read: ReadConfig,
) -> tuple[ModelConfig, Mapping[str, Source]]:
    """Find the model, with a checkpoint's order of rows, and how each parameter is stored."""
    if is_gguf(directory):
        if packed:
            raise UnsupportedModel(f"{shown(directory)} is a GGUF file, which is held as it is stored")
        return gguf_checkpoint.find_parameters(directory, kv_repeats, forms)
    if has_array_tree(directory):
        if packed or read_description(directory).model.has_packed_experts:
            raise UnsupportedModel(f"{shown(directory)} is an Orbax checkpoint, which has no packed experts")
        return orbax_checkpoint.find_parameters(directory, kv_repeats, forms)
    hf_config = read(directory)
    model = hf_config.model.with_packed_experts() if packed else hf_config.model
    model = model if forms is None else model.with_forms(forms)
    hf_config = replace(hf_config, model=model.with_kv_heads(kv_repeats))
    stored = hf_checkpoint.find_tensors(directory, hf_config.family.may_be_unlisted)
    return hf_config.model, hf_checkpoint.match(hf_config, stored)
