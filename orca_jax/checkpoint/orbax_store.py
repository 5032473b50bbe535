"""Reads a checkpoint's tree and writes checkpoints with Orbax; opens arrays with TensorStore, its storage.

Only this file imports these libraries, and checkpoint/orbax.py imports this file only for an Orbax directory,
so that serving from safetensors loads neither library.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from orca_jax.checkpoint import zarr_store
from orca_jax.checkpoint.orbax_boxes import reason
from orca_jax.errors import CheckpointError, CorruptFile
from orca_jax.families.strict_json import shown

_SECONDS = 600.0  # timeout of opening or writing one array
_CHUNK_BYTES = 1 << 22  # of written chunks: small, so a shard that ends inside a chunk reads little beyond

Location = ocp.type_handlers.ParamInfo  # an array's location and format


class _Locate(ocp.type_handlers.ArrayHandler):
    """Returns arrays' locations where Orbax asks for their metadata, and opens no array."""

    async def metadata(self, infos: Sequence[Location]) -> Sequence[Any]:
        return infos


class _LocateEverything(ocp.type_handlers.TypeHandlerRegistry):
    """Uses one handler for all types, which locates scalars, text and unknown values without opening them."""

    _locate = _Locate()

    def add(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("one handler serves all types")

    def get(self, ty: Any) -> ocp.type_handlers.TypeHandler:
        return self._locate

    def has(self, ty: Any) -> bool:
        return True


def read_tree(place: Path) -> list[Location]:
    """List the arrays of the checkpoint in `place`, named by their keys joined by dots.

    Raises CorruptFile.
    """
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=_LocateEverything())
    directory: Any = place.absolute()  # Orbax's own path type has the same methods
    try:
        tree = handler.metadata(directory).tree
    except Exception as error:  # ValueError, KeyError, AssertionError and others
        raise CorruptFile(f"{shown(place / '_METADATA')} is not a tree of arrays: {reason(error)}") from error
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, Location)]


def open_arrays(
    places: Mapping[str, Location],
    describe: Callable[[str], str],
    *,
    zeros_are_stored: bool,
    cache_bytes: int = 0,
) -> dict[str, ts.TensorStore]:
    """Open arrays by name, reading their metadata and no data.

    If Orbax stored every chunk (`zeros_are_stored`), a missing chunk is an error rather than zeros. The last
    `cache_bytes` of chunks are kept, for arrays that are read in several parts.
    Error messages begin with `describe(name)`. Raises CorruptFile.
    """
    specs = {
        name: ocp.type_handlers.get_json_tspec_read(
            info,
            use_ocdbt=bool(info.is_ocdbt_checkpoint),
            raise_array_data_missing_error=zeros_are_stored,
        )
        for name, info in places.items()
    }
    return zarr_store.open_arrays(specs, describe, cache_bytes=cache_bytes)


@dataclass(frozen=True, slots=True)
class _Unread:
    """An array to read just before it is written."""

    read: Callable[[], np.ndarray]
    apart: tuple[int, ...]


class _WriteOneByOne(ocp.type_handlers.NumpyHandler):
    """Writes one array at a time: given the arrays themselves, Orbax would need all of them at once."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Location], args: Sequence[ocp.SaveArgs] | None = None
    ) -> Sequence[Any]:
        for value, info in zip(values, infos, strict=True):
            await self._write(value, info)
        return []

    async def _write(self, value: _Unread, info: Location) -> None:
        chunks = ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=value.apart)
        for written in await super().serialize([value.read()], [info], [chunks]):
            written.result(timeout=_SECONDS)


def write(
    directory: Path,
    names: Iterable[str],
    read: Callable[[str], np.ndarray],
    *,
    apart: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    nested: bool = False,
    item: str | None = None,
) -> None:
    """Write a checkpoint of named arrays, one at a time; `read(name)` is called just before its write.

    `directory` must not exist. Chunks do not cross indices of the axes in `apart`, since a device's shard
    has, for instance, a part of queries, keys and values each. With `nested` a name is a path of keys joined
    by dots. With `item` the directory is a step, and the arrays are that item of it. Raises CheckpointError,
    including those of `read`.
    """
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler()), (_Unread, _WriteOneByOne())
    )
    handler: Any = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    tree: dict[str, Any] = {}
    for name in names:
        *path, last = name.split(".") if nested else [name]
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = _Unread(partial(read, name), apart.get(name, ()))
    try:
        args: Any = ocp.args.PyTreeSave(tree)
        if item is not None:
            handler = ocp.CompositeCheckpointHandler(**{item: handler})
            args = ocp.args.Composite(**{item: args})
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(directory.absolute(), args=args)
    except CheckpointError:
        raise
    except Exception as error:  # ValueError, OSError and others, depending on the failure
        raise CheckpointError(f"{shown(directory)} cannot be written: {reason(error)}") from error
