"""Lists, opens and writes Zarr arrays with TensorStore: what Levanter and EasyDeL save, without Orbax.

The arrays are directories, or all in one OCDBT database. A chunk that is missing has zeros: trainers do not
write such chunks. So completeness is known by the JSON file that a trainer writes last (array_trees.py).
"""

import datetime
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorstore as ts

from orca_jax.checkpoint.orbax_boxes import reason
from orca_jax.errors import CheckpointError, CorruptFile
from orca_jax.families.strict_json import shown
from orca_jax.families.trainers.array_trees import COMPLETE, INDEX, MANIFEST, STEP_JSON

_SECONDS = 600.0  # timeout of listing a database, and of opening or writing one array
_CHUNK_BYTES = 1 << 22  # of written chunks
_INDEX_CACHE_BYTES = 1 << 24  # for the database's index
_DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}  # by the name of an array's metadata

Spec = Mapping[str, Any]


def read_tree(place: Path) -> dict[str, Spec]:
    """TensorStore's spec of each array below `place`, by the parts of its path joined with dots.

    Raises CorruptFile.
    """
    kvstore: dict[str, Any] = {"driver": "file", "path": f"{place.absolute()}/"}
    if (place / MANIFEST).exists():
        kvstore = {"driver": "ocdbt", "base": kvstore}
        paths = _listed(place, kvstore)
    else:
        paths = _walked(place)
    specs: dict[str, Spec] = {}
    for path, driver in sorted(paths):
        name = path.replace("/", ".")
        if not name or name in specs:
            raise CorruptFile(f"{shown(place)}: two arrays have the name {shown(name)!r}, or one has none")
        inside = {"path": f"{path}/"} if "base" in kvstore else {"path": f"{kvstore['path']}{path}/"}
        specs[name] = {"driver": driver, "kvstore": {**kvstore, **inside}}
    return specs


def _listed(place: Path, kvstore: Spec) -> Iterable[tuple[str, str]]:
    """The arrays of a database, each with TensorStore's driver. Raises CorruptFile."""
    try:
        store = ts.KvStore.open(dict(kvstore)).result(timeout=_SECONDS)
        keys = [key.decode() for key in store.list().result(timeout=_SECONDS)]
    except Exception as error:  # ValueError, UnicodeDecodeError and others, depending on the failure
        raise CorruptFile(
            f"{shown(place / MANIFEST)} is not a database of arrays: {reason(error)}"
        ) from error
    for key in keys:
        path, _, file = key.rpartition("/")
        if file in _DRIVERS:
            yield path, _DRIVERS[file]


def _walked(place: Path) -> Iterable[tuple[str, str]]:
    """The arrays in directories, each with TensorStore's driver."""
    for folder, folders, files in os.walk(place):
        found = next((driver for file, driver in _DRIVERS.items() if file in files), None)
        if found is not None:
            folders.clear()  # of chunks
            yield Path(folder).relative_to(place).as_posix(), found


def open_arrays(
    specs: Mapping[str, Spec], describe: Callable[[str], str], *, cache_bytes: int = 0
) -> dict[str, ts.TensorStore]:
    """Open arrays by name, reading their metadata and no data.

    The last `cache_bytes` of chunks are kept, for arrays that are read in several parts. Error messages begin
    with `describe(name)`. Raises CorruptFile.
    """
    context = ts.Context(
        {
            "cache_pool#ocdbt": {"total_bytes_limit": _INDEX_CACHE_BYTES},
            "cache_pool": {"total_bytes_limit": cache_bytes},
        }
    )
    options: dict[str, Any] = {"recheck_cached_data": "open"} if cache_bytes else {}
    opening: dict[str, Any] = {
        name: ts.open(ts.Spec({**spec, **options}), read=True, open=True, context=context)
        for name, spec in specs.items()
    }
    stores: dict[str, ts.TensorStore] = {}
    for name, store in opening.items():
        try:
            stores[name] = store.result(timeout=_SECONDS)
        except Exception as error:  # ValueError, KeyError and others, depending on the failure
            raise CorruptFile(f"{describe(name)} cannot be opened: {reason(error)}") from error
    return stores


def write(
    directory: Path,
    names: Iterable[str],
    read: Callable[[str], np.ndarray],
    *,
    index: bool,
    apart: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> None:
    """Write named arrays, one at a time, as Levanter does or with EasyDeL's `index` of them.

    `directory` must not exist; `read(name)` is called just before its write. Chunks do not cross indices of
    the axes in `apart`. Raises CheckpointError, including those of `read`.
    """
    listed: list[dict[str, Any]] = []
    try:
        directory.mkdir(parents=True)
        for name in names:
            values, path = read(name), name.replace(".", "/")
            chunks = _chunks(values, apart.get(name, ()))
            store = ts.open(
                {
                    "driver": "zarr",
                    "kvstore": {"driver": "file", "path": f"{directory.absolute() / path}/"},
                    "metadata": {"chunks": chunks, "compressor": {"id": "zstd"}},
                },
                create=True,
                dtype=values.dtype,
                shape=values.shape,
            ).result(timeout=_SECONDS)
            store.write(values).result(timeout=_SECONDS)
            listed.append({"path": path, "shape": [*values.shape], "dtype": values.dtype.name})
        now = datetime.datetime.now().isoformat()
        if index:
            _write_json(directory / INDEX, {"format": "tensorstore", "prefixes": {"model": listed}})
            _write_json(directory / COMPLETE, {"timestamp": now})
        else:
            _write_json(directory / STEP_JSON, {"step": 0, "timestamp": now, "is_temporary": False})
    except CheckpointError:
        raise
    except Exception as error:  # ValueError, OSError and others, depending on the failure
        raise CheckpointError(f"{shown(directory)} cannot be written: {reason(error)}") from error


def _chunks(values: np.ndarray, apart: tuple[int, ...]) -> list[int]:
    """Chunks of at most 4 MiB, by halving the first axis that still has more than one element in each."""
    chunks = [1 if axis in apart else max(1, size) for axis, size in enumerate(values.shape)]
    while values.itemsize * int(np.prod(chunks)) > _CHUNK_BYTES:
        axis = next(axis for axis, size in enumerate(chunks) if size > 1)
        chunks[axis] = -(-chunks[axis] // 2)
    return chunks


def _write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
