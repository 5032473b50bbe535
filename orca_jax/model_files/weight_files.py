"""Finds the safetensors files of a checkpoint: one, or several with an index of tensors."""

import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orca_jax.errors import CorruptFile, NotACheckpoint
from orca_jax.families.strict_json import parse_object, read_object, shown
from orca_jax.model_files.other_kinds import no_weights

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MAX_INDEX_BYTES = 100_000_000
_FILE_NAME = re.compile(r"[\w][\w.-]*\.safetensors", re.ASCII)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Weight files, all of which exist. With an `index`, `file_of` has the name of each tensor's file."""

    paths: tuple[Path, ...]
    index: Path | None
    file_of: Mapping[str, str]


def tensor_names(directory: Path) -> set[str] | None:
    """The names of the tensors in a Hugging Face directory; None if it has no weights.

    The reader of weights checks the files. Raises as `find_weight_files`.
    """
    if not any(os.path.exists(directory / name) for name in (SINGLE, INDEX)):
        return None
    files = find_weight_files(directory)
    if files.index is not None:
        return {*files.file_of}
    (path,) = files.paths
    try:
        with path.open("rb") as file:
            n_bytes = int.from_bytes(file.read(8), "little")
            header = file.read(min(n_bytes, _MAX_INDEX_BYTES))
    except OSError as error:
        raise NotACheckpoint(f"{shown(path)} cannot be read: {error.strerror}") from error
    return {*parse_object(header, path)}


def find_weight_files(directory: Path) -> WeightFiles:
    """Find the weight files of a Hugging Face directory. Raises NotACheckpoint, UnsafeFile or CorruptFile."""
    single, index = directory / SINGLE, directory / INDEX
    if os.path.exists(single):  # unlike Path.exists, never raises
        return WeightFiles((single,), None, {})
    if not os.path.exists(index):
        raise no_weights(directory)
    file_of = read_object(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise CorruptFile(
            f"{shown(index)}: weight_map: expected an object of tensor and file names, found {shown(file_of)}"
        )
    for name, file in file_of.items():
        # File names alone, so that no index can point outside its directory.
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise CorruptFile(
                f"{shown(index)}: tensor '{shown(name)}': expected the name of a .safetensors file in "
                f"the same directory, found {shown(file)}"
            )
    paths = tuple(directory / file for file in sorted(set(file_of.values())))
    for path in paths:
        if not os.path.exists(path):
            n = sum(file == path.name for file in file_of.values())
            raise NotACheckpoint(
                f"{shown(path)} is missing; according to {shown(index)} it holds {n} tensors. Copy it there; "
                "if a download was cut off, run it again"
            )
    return WeightFiles(paths, index, file_of)
