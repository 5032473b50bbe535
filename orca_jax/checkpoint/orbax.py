"""Finds the arrays of a model's parameters in a trainer's directory, and checks them before any is read.

Orbax reads its trees (orbax_store.py), other trees are Zarr arrays by path (zarr_store.py). TensorStore opens
the arrays, and shards are read box by box (orbax_boxes.py). This file checks what the libraries do not: that
the checkpoint is complete, and that it holds exactly the described model.
"""

import glob
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from orca_jax.checkpoint.array_view import ArrayView, view
from orca_jax.checkpoint.expert_view import StackedExperts
from orca_jax.checkpoint.head_view import HeadView, stored_shapes
from orca_jax.checkpoint.orbax_boxes import OrbaxArray
from orca_jax.checkpoint.shard_reader import Parts
from orca_jax.errors import CorruptFile, TensorMismatch
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import Parameter, attention_of, in_layers, parameter_table
from orca_jax.families.stored_name import StoredName
from orca_jax.families.strict_json import read_object, shown
from orca_jax.families.trainers.array_form import EXPERTS, LAYERS, ArrayForm, axis_sizes
from orca_jax.families.trainers.array_trees import (
    COMMIT,
    COMPLETE,
    INDEX,
    MANIFEST,
    TREE,
    UNFINISHED,
    is_zarr_tree,
)
from orca_jax.families.trainers.layouts import detect
from orca_jax.families.trainers.orca_json import ORCA_JSON, Description, read_description, same_names
from orca_jax.families.weight_form import WeightForm

_MAX_TREE_BYTES = 100_000_000
_FLOATS = tuple(np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64))


def find_parameters(
    directory: Path,
    kv_repeats: int = 1,
    forms: Mapping[str, WeightForm] | None = None,
    orca_json: Path | None = None,
) -> tuple[ModelConfig, dict[str, Parts]]:
    """Find the model and the arrays of each parameter; all must be present and fit, and none left over.

    The model has each K/V head `kv_repeats` times, and its weights in `forms`. `orca_json` is read in place
    of the directory's. Reads no weight. Raises a CheckpointError.
    """
    description = read_description(directory, orca_json)
    description = replace(description, model=description.model.with_kv_heads(kv_repeats))
    place = description.checkpoint
    _refuse_unfinished(place)
    tree = _tree(place)
    description = _named(description, tree.names)
    names = description.names
    assert names is not None
    used = _check_names(description, tree.names)
    opened = tree.open(used, _bytes_at_once(description))
    parts: dict[str, Parts] = {}
    unrepeated = parameter_table(description.model.with_kv_heads(1))
    model = description.model.with_forms(forms or {})
    table = parameter_table(model)
    # Layers in the same array follow one another, so that it is read once.
    for name in sorted(table, key=lambda name: in_layers(name)[0] if _is_stack(names[name]) else ""):
        parameter, wanted = table[name], names[name]
        attention = attention_of(description.model, name)
        shapes = stored_shapes(parameter, wanted, attention)
        views = tuple(
            _of_form(description, name, parameter, form, stored, opened[stored])
            for stored, form in zip(wanted.names, wanted.forms, strict=False)  # without forms none
        )
        if views and parameter.axes[0] == EXPERTS:
            parts[name] = Parts((StackedExperts(views),))
            continue
        arrays = views or tuple(
            _as_matrix(description, name, unrepeated[name], wanted, stored, opened[stored], shape)
            for stored, shape in zip(wanted.names, shapes, strict=True)
        )
        if wanted.heads is None:
            parts[name] = Parts(arrays, wanted.transpose and len(arrays[0].shape) == 2)
        else:
            parts[name] = Parts((HeadView.of(arrays, parameter, wanted, attention),))
    return model, parts


def open_chosen(place: Path, choose: Callable[[Collection[str]], Iterable[str]]) -> dict[str, Any]:
    """Open the arrays of a checkpoint that `choose` takes of all names, whatever they are; reads no data.

    Raises CorruptFile, for an unfinished checkpoint too, and what `choose` raises.
    """
    _refuse_unfinished(place)
    tree = _tree(place)
    return tree.open(choose(tree.names), 0)


@dataclass(frozen=True, slots=True)
class _Tree:
    """The names of a checkpoint's arrays, and what opens some of them, with so many bytes of cache."""

    names: Collection[str]
    open: Callable[[Iterable[str], int], dict[str, Any]]


def _tree(place: Path) -> _Tree:
    """List the arrays of a complete checkpoint. Raises CorruptFile."""
    describe = partial(_array, place)
    if is_zarr_tree(place):
        specs = zarr_library().read_tree(place)

        def open_zarr(names: Iterable[str], cache_bytes: int) -> dict[str, Any]:
            chosen = {name: specs[name] for name in names}
            return zarr_library().open_arrays(chosen, describe, cache_bytes=cache_bytes)

        return _Tree(specs, open_zarr)
    about = read_object(place / TREE, _MAX_TREE_BYTES)  # bounds the size of what Orbax reads next
    located = _locate(place, about)

    def open_orbax(names: Iterable[str], cache_bytes: int) -> dict[str, Any]:
        return _library().open_arrays(
            {name: located[name] for name in names},
            describe,
            zeros_are_stored=about.get("store_array_data_equal_to_fill_value") is True,
            cache_bytes=cache_bytes,
        )

    return _Tree(located, open_orbax)


def _named(description: Description, stored: Collection[str]) -> Description:
    """Complete the description's names: its own, ours, or those of the detected trainer."""
    if description.names is not None:
        return description
    own = same_names(description.model)
    detected = None
    if not all(name in stored for name in own):
        detected = detect(description.model, stored, description.interleaved)
    if detected is None:
        return replace(description, names=own)
    prefix = detected.prefix
    others = [name for name in stored if not name.startswith(prefix)]  # an optimizer's state, a step
    ignore = (*description.ignore, *map(glob.escape, (*others, *detected.unused)))
    return replace(description, names=detected.names, ignore=ignore)


def _is_stack(wanted: StoredName) -> bool:
    return any(form.n_layers and LAYERS in form.letters for form in wanted.forms)


def _bytes_at_once(description: Description) -> int:
    """The most bytes of stacked arrays that one weight needs, at 4 bytes an element."""
    most = 0
    for name, wanted in (description.names or {}).items():
        if _is_stack(wanted) or any(EXPERTS in form.letters for form in wanted.forms):
            sizes = axis_sizes(description.model, name)
            most = max(most, sum(4 * math.prod(form.shape(sizes)) for form in wanted.forms))
    return most


def _refuse_unfinished(place: Path) -> None:
    if is_zarr_tree(place):
        return
    if os.path.exists(place / INDEX):
        raise CorruptFile(f"{shown(place)} is incomplete: it has no {COMPLETE}, which EasyDeL writes last")
    half = f"{shown(place)} is an incomplete Orbax checkpoint: "
    for part in (place, place.parent):
        if UNFINISHED in part.name:
            raise CorruptFile(f"{half}Orbax removes '{UNFINISHED}...' from the name when it is complete")
        commit = part / COMMIT
        if os.path.exists(commit):
            values = read_object(commit, _MAX_TREE_BYTES)
            if "commit_timestamp_nsecs" in values and values["commit_timestamp_nsecs"] is None:
                raise CorruptFile(f"{half}{shown(commit)} has no commit time")
    if os.path.exists(place / TREE):
        return
    try:
        below = sorted(path.parent for path in [*place.glob(f"*/{TREE}"), *place.glob(f"*/*/{TREE}")])
    except OSError as error:
        raise CorruptFile(f"{shown(place)} cannot be read: {error.strerror}") from error
    if below:
        raise CorruptFile(
            f"{shown(place)} has no {TREE}, but {shown(below[-1])} has one: name that directory, or set "
            f'"checkpoint": "{shown(below[-1].relative_to(place))}" in {ORCA_JSON}'
        )
    raise CorruptFile(f"{half}it has no {TREE}, which Orbax writes last")


def _locate(place: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Locate each array by name; `about` is the content of the tree's file. Raises CorruptFile."""
    located: dict[str, Any] = {}
    for info in _library().read_tree(place):
        name = info.name
        hidden = any(part.startswith(".") or not part for part in name.split("/"))
        if name in located or "\0" in name or hidden:
            raise CorruptFile(
                f"{shown(place / TREE)}: {shown(name)!r} appears twice or is not a valid array name"
            )
        if info.is_ocdbt_checkpoint and not os.path.exists(place / MANIFEST):
            raise CorruptFile(
                f"{shown(place)} is incomplete: {MANIFEST}, which locates the arrays, is missing"
            )
        located[name] = info
    entries = [entry["value_metadata"] for entry in about["tree_metadata"].values()]
    n_listed = sum(not entry["skip_deserialize"] for entry in entries)
    if len(located) != n_listed:
        raise CorruptFile(
            f"{shown(place / TREE)} lists {n_listed} arrays, but Orbax finds {len(located)}: some share a "
            "name or have none"
        )
    return located


def _check_names(description: Description, stored: Iterable[str]) -> list[str]:
    """List the arrays to use; all must be present, and all others ignored."""
    used: dict[str, None] = {}
    for parameter, wanted in (description.names or {}).items():
        for name in wanted.names:
            if name not in stored:
                raise TensorMismatch(
                    f"{shown(description.checkpoint)}: array {shown(name)!r} is missing: expected for "
                    f"{parameter} according to {shown(description.path)}, found {_some(stored)}"
                )
            used[name] = None
    left = [name for name in stored if name not in used and not description.ignores(name)]
    if left:
        raise TensorMismatch(
            f"{shown(description.checkpoint)}: {len(left)} arrays are left over, such as {_some(left)}: "
            f"{shown(description.path)} expects none; a model with these arrays computes something else. "
            f'List arrays that are not weights under "ignore" in {ORCA_JSON}'
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
    """View an array as the expected vector or matrix, with merged axes if necessary."""
    where, found = _array(description.checkpoint, stored), tuple(store.shape)
    shape = parameter.shape
    axes = _merged(found, expected)
    shape_fits = found == expected or (not wanted.transpose and len(wanted.names) == 1 and found == shape)
    if axes is None or not (shape_fits or wanted.reshape):
        hint = '; "reshape": true merges neighbouring axes' if axes is not None else ""
        listed = list(shape) if len(wanted.names) == 1 and not wanted.transpose else list(expected)
        raise TensorMismatch(
            f"{where}: expected shape {listed} for {name} according to {shown(description.path)}, "
            f"found {shown(list(found))}{hint}"
        )
    _check_element(where, store)
    return OrbaxArray(where, store, axes)


def _of_form(
    description: Description, name: str, parameter: Parameter, form: ArrayForm, stored: str, store: Any
) -> ArrayView:
    """View the part of an array that is one of our weights, or some of its rows."""
    where, found = _array(description.checkpoint, stored), tuple(store.shape)
    sizes = axis_sizes(description.model, name)
    form = form.fitting(found, sizes)
    if not form.fits(found, sizes):
        raise TensorMismatch(
            f"{where}: expected shape {list(form.shape(sizes))} ({form.axes}) for {name} according to "
            f"{shown(description.path)}, found {shown(list(found))}"
        )
    _check_element(where, store)
    return view(where, store, form, parameter, sizes)


def _check_element(where: str, store: Any) -> None:
    if store.dtype.numpy_dtype not in _FLOATS:
        allowed = ", ".join(dtype.name for dtype in _FLOATS)
        raise TensorMismatch(f"{where}: expected dtype {allowed}, found {store.dtype.name}")
    if math.prod(store.chunk_layout.read_chunk.shape) > math.prod(store.shape):
        raise CorruptFile(f"{where}: its chunks are larger than the array")


def _merged(found: tuple[int, ...], expected: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
    """Find the stored axes that merge into each expected axis; None if the shapes do not match."""
    if len(expected) == 1:
        return (found,) if math.prod(found) == expected[0] and found else None
    for cut in range(1, len(found)):
        if math.prod(found[:cut]) == expected[0] and math.prod(found[cut:]) == expected[1]:
            return found[:cut], found[cut:]
    return None


def zarr_library() -> ModuleType:
    """The module that reads and writes Zarr arrays, imported on demand as Orbax is."""
    from orca_jax.checkpoint import zarr_store

    return zarr_store


def write(directory: Path, names: Iterable[str], read: Callable[[str], np.ndarray], **options: Any) -> None:
    """Write a checkpoint that Orbax can restore; `options` are those of orbax_store.write."""
    _library().write(directory, names, read, **options)


def _library() -> ModuleType:
    # Imported on demand: Orbax takes 0.2 s and 260 modules, which serving from safetensors does not need.
    from orca_jax.checkpoint import orbax_store

    return orbax_store
