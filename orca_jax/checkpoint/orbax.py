"""Orbax's directories, read and written array by array with TensorStore, the library that Orbax stores with.

`_METADATA` is the tree: the path of keys to each array. The arrays are zarr, each under its keys joined by
dots, in one OCDBT database (manifest.ocdbt and what it refers to) or each in a directory of its own. Orbax
itself would restore whole trees, and takes twenty times as long to import; here any box of an array can be
read, and one array at a time written.
"""

import itertools
import json
import math
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts

from orca_jax.checkpoint.orca_json import ORCA_JSON, Description, read_description
from orca_jax.checkpoint.shard_reader import Box, Parts, stacked_shape
from orca_jax.errors import CheckpointError, CorruptFile, TensorMismatch
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import parameter_shapes
from orca_jax.families.stored_name import StoredName
from orca_jax.families.strict_json import read_object, shown

_TREE = "_METADATA"
_COMMIT = "_CHECKPOINT_METADATA"
_MANIFEST = "manifest.ocdbt"
_UNFINISHED = ".orbax-checkpoint-tmp"  # in a directory's name until Orbax renames it
_MAX_TREE_BYTES = 100_000_000
_SECONDS = 600.0  # for one read or write of at most a few hundred megabytes
_CHUNK_BYTES = 1 << 22  # of what is written: a shard whose edges fall inside chunks reads little beyond them
_N_PENDING = 4
_FLOATS = tuple(np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64))


@dataclass(frozen=True, slots=True)
class OrbaxArray:
    """An array of the checkpoint, seen as a vector or a matrix: neighbouring axes of it are taken as one."""

    where: str
    store: Any  # a ts.TensorStore
    axes: tuple[tuple[int, ...], ...]  # for each axis of the view the stored axes' sizes

    def __str__(self) -> str:
        return self.where

    @property
    def shape(self) -> tuple[int, ...]:
        """[n] or [rows, columns]."""
        return tuple(map(math.prod, self.axes))

    @property
    def element(self) -> np.dtype:
        """The dtype of its elements."""
        return self.store.dtype.numpy_dtype

    @property
    def divisible(self) -> bool:
        """Whether it was written in several chunks; one chunk is read as a whole."""
        return self._chunk != tuple(self.store.shape)

    @property
    def _chunk(self) -> tuple[int, ...]:
        return tuple(self.store.chunk_layout.read_chunk.shape)

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """The part `box`, about a chunk's rows at a time: the row within the box, and the piece.

        Raises CorruptFile where chunks are missing or broken.
        """
        (first, end), *inner = box
        rows = math.prod(self.axes[0])
        chunk_rows = max(1, rows * self._chunk[0] // max(1, self.store.shape[0]))
        for start in range(first - first % chunk_rows, end, chunk_rows):
            low, high = max(first, start), min(end, start + chunk_rows)
            row = low
            for part in _boxes(self.axes[0], low, high):
                columns = [self._read(part, other) for other in self._inner_boxes(inner)]
                piece = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
                yield row - first, piece
                row += len(piece)

    def _inner_boxes(self, inner: Sequence[tuple[int, int]]) -> list[Box]:
        return [()] if not inner else [*_boxes(self.axes[1], *inner[0])]

    def _read(self, rows: Box, columns: Box) -> np.ndarray:
        index = tuple(slice(first, end) for first, end in (*rows, *columns))
        try:
            values = self.store[index].read().result(timeout=_SECONDS)
        except Exception as error:  # a ValueError, a KeyError and others, by the kind of failure
            raise CorruptFile(f"{self}: its data cannot be read: {_reason(error)}") from error
        n_rows = math.prod(end - first for first, end in rows)
        return values.reshape(n_rows, -1) if columns else values.reshape(n_rows)


def _boxes(sizes: tuple[int, ...], first: int, end: int) -> Iterator[Box]:
    """The elements `first` to `end` of axes of these sizes taken as one, as boxes in their order."""
    if len(sizes) == 1:
        yield ((first, end),)
        return
    inner = math.prod(sizes[1:])
    while first < end:
        row, offset = divmod(first, inner)
        if offset == 0 and end - first >= inner:
            n = (end - first) // inner
            yield ((row, row + n), *((0, size) for size in sizes[1:]))
            first += n * inner
        else:
            stop = min(end, (row + 1) * inner)
            for box in _boxes(sizes[1:], offset, offset + stop - first):
                yield ((row, row + 1), *box)
            first = stop


def is_orbax(directory: Path) -> bool:
    """Whether Orbax wrote this directory, or began to, or orca.json says where it did."""
    if any(os.path.exists(directory / name) for name in (ORCA_JSON, _TREE, _COMMIT, _MANIFEST)):
        return True
    return _UNFINISHED in directory.name or os.path.exists(directory / "ocdbt.process_0")


def find_parameters(directory: Path) -> tuple[ModelConfig, dict[str, Parts]]:
    """The model, and for each parameter the arrays it is made of: all there and right, and none left over.

    Raises a CheckpointError; no weight is read.
    """
    description = read_description(directory)
    place = description.checkpoint
    _refuse_unfinished(place)
    tree = read_object(place / _TREE, _MAX_TREE_BYTES)
    stored = _arrays(place, tree)
    used = _check_names(description, stored)
    opened = _open(place, tree, used)
    parts: dict[str, Parts] = {}
    for parameter, shape in parameter_shapes(description.model).items():
        wanted = description.names[parameter]
        arrays = tuple(
            _as_matrix(description, parameter, shape, wanted, name, opened[name]) for name in wanted.names
        )
        parts[parameter] = Parts(arrays, wanted.transpose and len(arrays[0].shape) == 2)
    return description.model, parts


def _refuse_unfinished(place: Path) -> None:
    half = f"{shown(place)} is a half-written Orbax checkpoint: "
    for part in (place, place.parent):
        if _UNFINISHED in part.name:
            raise CorruptFile(f"{half}Orbax takes '{_UNFINISHED}...' off the name when all is there")
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


def _arrays(place: Path, tree: dict[str, Any]) -> dict[str, str]:
    """Every array by its name, with the kind of value it was; empty nodes are left out."""
    entries = tree.get("tree_metadata")
    if not isinstance(entries, dict):
        raise CorruptFile(
            f"{shown(place / _TREE)}: tree_metadata: expected an object, found {shown(entries)}"
        )
    found: dict[str, str] = {}
    for key, entry in entries.items():
        keys = entry.get("key_metadata") if isinstance(entry, dict) else None
        value = entry.get("value_metadata") if isinstance(entry, dict) else None
        names = [
            one["key"] for one in keys or [] if isinstance(one, dict) and isinstance(one.get("key"), str)
        ]
        if not names or not isinstance(keys, list) or len(names) < len(keys) or not isinstance(value, dict):
            raise CorruptFile(
                f"{shown(place / _TREE)}: {shown(key)}: expected key_metadata and value_metadata, "
                f"found {shown(entry)}"
            )
        if value.get("skip_deserialize") is True:
            continue
        name = ".".join(names)
        if name in found or "/" in name or "\0" in name or name.startswith("."):
            raise CorruptFile(f"{shown(place / _TREE)}: {shown(key)} is there twice or is no array's name")
        found[name] = str(value.get("value_type"))
    return found


def _check_names(description: Description, stored: dict[str, str]) -> list[str]:
    """The arrays that are used; each must be there, and no other that is not ignored."""
    used: list[str] = []
    for parameter, wanted in description.names.items():
        for name in wanted.names:
            if name not in stored:
                raise TensorMismatch(
                    f"{shown(description.checkpoint)}: array {shown(name)!r} is missing: expected for "
                    f"{parameter} by {shown(description.path)}, found {_some(stored)}"
                )
            used.append(name)
    left = [name for name in stored if name not in set(used) and not description.ignores(name)]
    if left:
        raise TensorMismatch(
            f"{shown(description.checkpoint)}: {len(left)} arrays are left over, such as {_some(left)}: "
            f"expected none by {shown(description.path)}; a model that has them computes something else. "
            f'Those that are no weights can stand under "ignore" in {ORCA_JSON}'
        )
    return used


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return (", ".join(shown(name) for name in names[:4]) or "none") + more


def _open(place: Path, tree: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """A store for each array: what is opened is the array's own metadata, no data."""
    ocdbt = tree.get("use_ocdbt", True) is not False
    if ocdbt and not os.path.exists(place / _MANIFEST):
        raise CorruptFile(
            f"{shown(place)} is incomplete: {_MANIFEST} is missing, which says where the arrays lie"
        )
    context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 1 << 24}})
    futures = {
        name: ts.open(
            {
                "driver": "zarr3" if tree.get("use_zarr3") is True else "zarr",
                "kvstore": _database(place, name) if ocdbt else _own_directory(place, name),
                # Where Orbax stored every chunk, one that is missing is an error and not zeros.
                "fill_missing_data_reads": tree.get("store_array_data_equal_to_fill_value") is not True,
                "recheck_cached_data": False,
                "recheck_cached_metadata": False,
            },
            read=True,
            open=True,
            context=context,
        )
        for name in dict.fromkeys(names)
    }
    stores: dict[str, Any] = {}
    for name, future in futures.items():
        try:
            stores[name] = future.result(timeout=_SECONDS)
        except Exception as error:  # a ValueError, a KeyError and others, by the kind of failure
            raise CorruptFile(f"{_array(place, name)} cannot be opened: {_reason(error)}") from error
    return stores


def _array(place: Path, name: str) -> str:
    return f"{shown(place)}: array {shown(name)!r}"


def _database(place: Path, name: str) -> dict[str, Any]:
    base = {"driver": "file", "path": f"{place.absolute()}/"}
    return {"driver": "ocdbt", "base": base, "path": name, "cache_pool": "cache_pool#ocdbt"}


def _own_directory(place: Path, name: str) -> dict[str, Any]:
    return {"driver": "file", "path": f"{place.absolute()}/{name}/"}


def _reason(error: Exception) -> str:
    return shown(" ".join(str(error).split(" [")[0].split())) or type(error).__name__


def _as_matrix(
    description: Description,
    parameter: str,
    shape: tuple[int, ...],
    wanted: StoredName,
    name: str,
    store: Any,
) -> OrbaxArray:
    """The array as the vector or matrix it must be, by its own shape or by merged axes of it."""
    where, found = _array(description.checkpoint, name), tuple(store.shape)
    rows, *columns = stacked_shape(parameter, shape)
    expected = (rows // len(wanted.names), *columns)
    if wanted.transpose:
        expected = expected[::-1]
    axes = _merged(found, expected)
    own_shape = found == expected or (not wanted.transpose and len(wanted.names) == 1 and found == shape)
    if axes is None or not (own_shape or wanted.reshape):
        hint = '; "reshape": true takes neighbouring axes as one' if axes is not None else ""
        listed = list(shape) if len(wanted.names) == 1 and not wanted.transpose else list(expected)
        raise TensorMismatch(
            f"{where}: expected shape {listed} for {parameter} by {shown(description.path)}, "
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


def write(directory: Path, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write named arrays into an existing directory, one after another, as a checkpoint that Orbax restores.

    Each array is there when the next is asked for. Raises CheckpointError where writing fails.
    """
    context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 1 << 24}})
    tree: dict[str, Any] = {}
    for name, values in arrays:
        chunk = _chunk_shape(values.shape, values.itemsize)
        spec = {
            "driver": "zarr",
            "kvstore": _database(directory, name),
            "metadata": {"chunks": list(chunk), "compressor": {"id": "zstd", "level": 1}},
            "store_data_equal_to_fill_value": True,
        }
        try:
            store = ts.open(
                spec, create=True, open=False, context=context, shape=values.shape, dtype=values.dtype
            ).result(timeout=_SECONDS)
            # A few chunks at a time, so that what is compressed and not yet on the disk stays small.
            pending: list[Any] = []
            for corner in itertools.product(*map(range, [0] * values.ndim, values.shape, chunk)):
                ends = map(min, map(operator.add, corner, chunk), values.shape)
                index = tuple(map(slice, corner, ends))
                pending.append(store[index].write(values[index]))
                if len(pending) == _N_PENDING:
                    pending.pop(0).result(timeout=_SECONDS)
            for one in pending:
                one.result(timeout=_SECONDS)
        except Exception as error:  # a ValueError, a KeyError and others, by the kind of failure
            raise CheckpointError(f"{_array(directory, name)} cannot be written: {_reason(error)}") from error
        tree[str((name,))] = {
            "key_metadata": [{"key": name, "key_type": 2}],  # a key of a dict
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
    about = {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    (directory / _TREE).write_text(json.dumps(about), encoding="utf-8")


def _chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Chunks of at most `_CHUNK_BYTES`: the longest axis is halved until they are.

    None spans queries, keys and values: the heads of each are apart.
    """
    chunk = [1, *shape[1:]] if len(shape) == 3 else list(shape)
    while math.prod(chunk) * itemsize > _CHUNK_BYTES:
        longest = max(range(len(chunk)), key=lambda i: chunk[i])
        chunk[longest] = -(-chunk[longest] // 2)
    return tuple(chunk)
