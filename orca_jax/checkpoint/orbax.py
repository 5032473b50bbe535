"""An Orbax directory as a model: which arrays its parameters are made of, checked before any is read.

Orbax reads the tree and TensorStore opens the arrays (orbax_store.py); their shards are read box by box
(orbax_boxes.py). This file checks what neither does: that the checkpoint is complete, and that it holds the
model which orca.json describes, no more and no less.
"""

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from orca_jax.checkpoint.head_view import HeadView, stored_shapes
from orca_jax.checkpoint.orbax_boxes import OrbaxArray
from orca_jax.checkpoint.orca_json import ORCA_JSON, Description, read_description
from orca_jax.checkpoint.shard_reader import Parts
from orca_jax.errors import CorruptFile, TensorMismatch
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import Parameter, parameter_table
from orca_jax.families.stored_name import StoredName
from orca_jax.families.strict_json import read_object, shown

_TREE = "_METADATA"
_COMMIT = "_CHECKPOINT_METADATA"
_MANIFEST = "manifest.ocdbt"
_UNFINISHED = ".orbax-checkpoint-tmp"  # in a directory's name until Orbax renames it
_MAX_TREE_BYTES = 100_000_000
_FLOATS = tuple(np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64))


def is_orbax(directory: Path) -> bool:
    """Whether Orbax wrote this directory, or began to, or orca.json says where it did."""
    if any(os.path.exists(directory / name) for name in (ORCA_JSON, _TREE, _COMMIT, _MANIFEST)):
        return True
    return _UNFINISHED in directory.name or os.path.exists(directory / "ocdbt.process_0")


def find_parameters(directory: Path, kv_repeats: int = 1) -> tuple[ModelConfig, dict[str, Parts]]:
    """The model, and for each parameter the arrays it is made of: all there and right, and none left over.

    The model has each K/V head `kv_repeats` times. Raises a CheckpointError; no weight is read.
    """
    description = read_description(directory)
    description = replace(description, model=description.model.with_kv_heads(kv_repeats))
    place = description.checkpoint
    _refuse_unfinished(place)
    about = read_object(place / _TREE, _MAX_TREE_BYTES)  # bounds what Orbax is about to read
    located = _locate(place, about)
    used = _check_names(description, located)
    opened = _library().open_arrays(
        {name: located[name] for name in used},
        lambda name: _array(place, name),
        zeros_are_stored=about.get("store_array_data_equal_to_fill_value") is True,
    )
    parts: dict[str, Parts] = {}
    for name, parameter in parameter_table(description.model).items():
        wanted = description.names[name]
        attention = description.model.attention
        shapes = stored_shapes(parameter, wanted, attention)
        arrays = tuple(
            _as_matrix(description, name, parameter, wanted, stored, opened[stored], shape)
            for stored, shape in zip(wanted.names, shapes, strict=True)
        )
        if wanted.heads is None:
            parts[name] = Parts(arrays, wanted.transpose and len(arrays[0].shape) == 2)
        else:
            parts[name] = Parts((HeadView.of(arrays, parameter, wanted, attention),))
    return description.model, parts


def _refuse_unfinished(place: Path) -> None:
    half = f"{shown(place)} is a half-written Orbax checkpoint: "
    for part in (place, place.parent):
        if _UNFINISHED in part.name:
            raise CorruptFile(f"{half}Orbax takes '{_UNFINISHED}...' off the name when it is complete")
        commit = part / _COMMIT
        if os.path.exists(commit):
            values = read_object(commit, _MAX_TREE_BYTES)
            if "commit_timestamp_nsecs" in values and values["commit_timestamp_nsecs"] is None:
                raise CorruptFile(f"{half}{shown(commit)} has no time of commit")
    if os.path.exists(place / _TREE):
        return
    try:
        below = sorted(path.parent for path in [*place.glob(f"*/{_TREE}"), *place.glob(f"*/*/{_TREE}")])
    except OSError as error:
        raise CorruptFile(f"{shown(place)} cannot be read: {error.strerror}") from error
    if below:
        raise CorruptFile(
            f"{shown(place)} has no {_TREE}, but {shown(below[-1])} has: name that one, or say "
            f'"checkpoint": "{shown(below[-1].relative_to(place))}" in {ORCA_JSON}'
        )
    raise CorruptFile(f"{half}it has no {_TREE}, which Orbax writes last")


def _locate(place: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Where each array is, by its name; `about` is what the tree's file holds. Raises CorruptFile."""
    located: dict[str, Any] = {}
    for info in _library().read_tree(place):
        name = info.name
        if name in located or "/" in name or "\0" in name or name.startswith("."):
            raise CorruptFile(
                f"{shown(place / _TREE)}: {shown(name)!r} is there twice or cannot be an array's name"
            )
        if info.is_ocdbt_checkpoint and not os.path.exists(place / _MANIFEST):
            raise CorruptFile(
                f"{shown(place)} is incomplete: {_MANIFEST} is missing, which says where the arrays lie"
            )
        located[name] = info
    entries = [entry["value_metadata"] for entry in about["tree_metadata"].values()]
    n_listed = sum(not entry["skip_deserialize"] for entry in entries)
    if len(located) != n_listed:
        raise CorruptFile(
            f"{shown(place / _TREE)} lists {n_listed} arrays, of which Orbax finds {len(located)}: "
            "some have the same name, or none"
        )
    return located


def _check_names(description: Description, stored: Iterable[str]) -> list[str]:
    """The arrays that are used; each must be there, and no other that is not ignored."""
    used: dict[str, None] = {}
    for parameter, wanted in description.names.items():
        for name in wanted.names:
            if name not in stored:
                raise TensorMismatch(
                    f"{shown(description.checkpoint)}: array {shown(name)!r} is missing: expected for "
                    f"{parameter} by {shown(description.path)}, found {_some(stored)}"
                )
            used[name] = None
    left = [name for name in stored if name not in used and not description.ignores(name)]
    if left:
        raise TensorMismatch(
            f"{shown(description.checkpoint)}: {len(left)} arrays are left over, such as {_some(left)}: "
            f"expected none by {shown(description.path)}; a model that has them computes something else. "
            f'Those that are no weights can stand under "ignore" in {ORCA_JSON}'
        )
    return [*used]


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return (", ".join(shown(name) for name in names[:4]) or "none") + more


def _array(place: Path, name: str) -> str:
    return f"{shown(place)}: array {shown(name)!r}"


def _as_matrix(
    description: Description,
    name: str,
    parameter: Parameter,
    wanted: StoredName,
    stored: str,
    store: Any,
    expected: tuple[int, ...],
) -> OrbaxArray:
    """The array as the vector or matrix it must be, by its own shape or by merged axes of it."""
    where, found = _array(description.checkpoint, stored), tuple(store.shape)
    shape = parameter.shape
    axes = _merged(found, expected)
    own_shape = found == expected or (not wanted.transpose and len(wanted.names) == 1 and found == shape)
    if axes is None or not (own_shape or wanted.reshape):
        hint = '; "reshape": true takes neighbouring axes as one' if axes is not None else ""
        listed = list(shape) if len(wanted.names) == 1 and not wanted.transpose else list(expected)
        raise TensorMismatch(
            f"{where}: expected shape {listed} for {name} by {shown(description.path)}, "
            f"found {shown(list(found))}{hint}"
        )
    element = store.dtype.numpy_dtype
    if element not in _FLOATS:
        allowed = ", ".join(one.name for one in _FLOATS)
        raise TensorMismatch(f"{where}: expected dtype {allowed}, found {store.dtype.name}")
    if math.prod(store.chunk_layout.read_chunk.shape) > math.prod(found):
        raise CorruptFile(f"{where}: its chunks are larger than the array")
    return OrbaxArray(where, store, axes)


def _merged(found: tuple[int, ...], expected: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
    """The stored axes that make up each expected one; None where none do."""
    if len(expected) == 1:
        return (found,) if math.prod(found) == expected[0] and found else None
    for cut in range(1, len(found)):
        if math.prod(found[:cut]) == expected[0] and math.prod(found[cut:]) == expected[1]:
            return found[:cut], found[cut:]
    return None


def write(directory: Path, names: Iterable[str], read: Callable[[str], np.ndarray]) -> None:
    """Write a checkpoint that Orbax restores: orbax_store.write."""
    _library().write(directory, names, read)


def _library() -> ModuleType:
    # On demand: importing Orbax takes 0.2 s and 260 modules, which serving from safetensors does not need.
    from orca_jax.checkpoint import orbax_store

    return orbax_store
