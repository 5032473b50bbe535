"""Finds the weights of a module that a user wrote in a checkpoint, by their paths in the module.

The directory has one or several safetensors files, or Orbax wrote it: the module's state, alone or as a part
of a training state, such as `nnx.state(model, nnx.Param)` or `{"model": ..., "optimizer": ...}`.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from orca_jax.checkpoint.huggingface import find_tensors
from orca_jax.checkpoint.orbax import open_chosen
from orca_jax.checkpoint.orbax_boxes import read_box
from orca_jax.checkpoint.safetensors_reader import FLOAT_DTYPES, PACKED_DTYPES, StoredTensor
from orca_jax.checkpoint.shard_reader import Box, Plane, assign
from orca_jax.errors import TensorMismatch
from orca_jax.families.strict_json import shown
from orca_jax.families.trainers.array_trees import has_array_tree, weights_in

_DTYPES = {**FLOAT_DTYPES, **PACKED_DTYPES}
_MODELS = ("model", "params", "module")  # where a training state has its weights
_VALUE = ".value"  # the end of a name where Orbax saved an nnx.State
_SHOWN = 4  # names in a message


@dataclass(frozen=True, slots=True)
class _OrbaxPlane:
    """An array of any rank in a checkpoint of TensorStore arrays."""

    where: str
    store: Any  # a ts.TensorStore

    def __str__(self) -> str:
        return self.where

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.store.shape)

    @property
    def element(self) -> np.dtype:
        return self.store.dtype.numpy_dtype

    @property
    def divisible(self) -> bool:
        return tuple(self.store.chunk_layout.read_chunk.shape) != self.shape

    def n_bytes(self, shape: tuple[int, ...], box: Box) -> int:
        return self.element.itemsize * math.prod(end - first for first, end in box)

    def read(self, shape: tuple[int, ...], dtype: np.dtype, box: Box) -> np.ndarray:
        out = np.empty([end - first for first, end in box], dtype)
        assign(out, read_box(self.store, tuple(slice(*each) for each in box), self.where), self)
        return out


@dataclass(frozen=True, slots=True)
class _SafetensorsPlane:
    """An array of any rank in a safetensors file."""

    tensor: StoredTensor

    def __str__(self) -> str:
        return str(self.tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def element(self) -> np.dtype:
        return self.tensor.element

    @property
    def divisible(self) -> bool:
        return True

    def n_bytes(self, shape: tuple[int, ...], box: Box) -> int:
        return self.element.itemsize * math.prod(end - first for first, end in box)

    def read(self, shape: tuple[int, ...], dtype: np.dtype, box: Box) -> np.ndarray:
        out = np.empty([end - first for first, end in box], dtype)
        rows = replace(self.tensor, shape=(shape[0], math.prod(shape[1:])) if shape else (1,))
        columns = [(0, rows.shape[1])] if shape else []
        for row, piece in rows.pieces((box[0] if shape else (0, 1), *columns)):
            if not shape:
                assign(out, piece.reshape(()), self)
                continue
            piece = piece.reshape(len(piece), *shape[1:])
            part = piece[(slice(None), *(slice(*each) for each in box[1:]))]
            assign(out[row : row + len(piece)], part, self)
        return out


def find_module_weights(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], optional: Collection[str]
) -> dict[str, Plane]:
    """Find the arrays with these names and shapes; all but the `optional` must be there.

    Names may have a prefix, the same for all. Without one, no array may be left over. Reads no weight. Raises
    a CheckpointError.
    """
    planes: dict[str, _OrbaxPlane | _SafetensorsPlane] = {}
    if has_array_tree(directory):
        place = weights_in(directory)
        chosen: dict[str, str] = {}

        def choose(stored: Collection[str]) -> Iterable[str]:
            spelled = {name.removesuffix(_VALUE): name for name in stored}
            chosen.update(_chosen(shown(place), spelled, shapes, optional))
            return [spelled[name] for name in chosen.values()]

        opened = {name.removesuffix(_VALUE): store for name, store in open_chosen(place, choose).items()}
        for name, stored in chosen.items():
            planes[name] = _OrbaxPlane(f"{shown(place)}: array {shown(stored)!r}", opened[stored])
    else:
        tensors = find_tensors(directory)
        for name, stored in _chosen(shown(directory), tensors, shapes, optional).items():
            planes[name] = _SafetensorsPlane(tensors[stored])
            if tensors[stored].dtype not in _DTYPES:
                raise TensorMismatch(f"{tensors[stored]}: the dtype {tensors[stored].dtype} is not read")
    for name, plane in planes.items():
        if plane.shape != shapes[name]:
            expected, found = [*shapes[name]], shown([*plane.shape])
            raise TensorMismatch(f"{plane}: expected the shape {expected} of {name}, found {found}")
    return dict(planes)


def _chosen(
    where: str, stored: Collection[str], shapes: Collection[str], optional: Collection[str]
) -> dict[str, str]:
    """The stored name of each of the module's weights. Raises TensorMismatch."""
    needed = [name for name in shapes if name not in optional]
    n_found = {
        prefix: sum(f"{prefix}{name}" in stored for name in needed) for prefix in _prefixes(needed, stored)
    }
    whole = [prefix for prefix, n in n_found.items() if n == len(needed)]
    if len(whole) > 1:
        # An optimizer's moments have the weights' names too.
        whole = [prefix for prefix in whole if prefix.split(".")[0] in _MODELS] or whole
    if len(whole) != 1:
        if whole:
            raise TensorMismatch(
                f"{where}: the module's weights are there several times, under {_some(whole)}; save them "
                f"alone, or under {' or '.join(_MODELS)}"
            )
        best = max(n_found, key=lambda prefix: n_found[prefix], default="")
        missing = [name for name in needed if f"{best}{name}" not in stored]
        raise TensorMismatch(
            f"{where}: {len(missing)} of the module's weights are missing, such as {_some(missing)}; the "
            f"checkpoint has {_some(stored)}"
        )
    (prefix,) = whole
    left = [] if prefix else [name for name in stored if name not in shapes]
    if left:
        raise TensorMismatch(f"{where}: {len(left)} arrays are not the module's, such as {_some(left)}")
    return {name: f"{prefix}{name}" for name in shapes if f"{prefix}{name}" in stored}


def _prefixes(needed: Sequence[str], stored: Collection[str]) -> Iterator[str]:
    """The prefixes under which the first weight is stored."""
    for name in stored:
        if name == needed[0] or name.endswith(f".{needed[0]}"):
            yield name.removesuffix(needed[0])


def _some(names: Collection[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(shown(name) for name in [*names][:_SHOWN]) or "none") + more
