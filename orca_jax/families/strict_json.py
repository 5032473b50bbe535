"""Reads JSON from untrusted files: bounded in size, objects only, no repeated keys."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from orca_jax.errors import CorruptFile, NotACheckpoint

INFINITY = {"__float__": "Infinity"}  # how transformers 5 writes an infinite number


def file_size(path: Path) -> int:
    """Bytes of a regular file. Raises NotACheckpoint for anything else: a missing file, a folder, a pipe."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise NotACheckpoint(f"{shown(path)} cannot be read: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise NotACheckpoint(f"{shown(path)} is not a regular file")
    return status.st_size


def shown(value: object) -> str:
    """Show a value from a file in a message: short, and without control characters.

    Short printable text, including paths, is shown as it is.
    """
    text = str(value) if isinstance(value, str | Path) else repr(value)
    if not text.isprintable():
        text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= 200 else f"{text[:120]}... ({len(text)} characters)"


def parse_object(data: bytes, path: Path, *, infinity: bool = False) -> dict[str, Any]:
    """Parse the JSON object in `data`, which was read from `path`.

    Raises CorruptFile, naming the file, where the data is not UTF-8 or not JSON, is another kind of value,
    nests too deeply, repeats a key, or holds NaN or an infinity. With `infinity` it may hold Infinity, which
    transformers 4 writes, and which becomes INFINITY.
    """

    def constant(name: str) -> dict[str, str]:
        if infinity and name == "Infinity":
            return dict(INFINITY)
        raise ValueError(f"it holds {name}, which is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            seen = set[str]()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ValueError(f"it has the key '{shown(twice)}' twice")
        return values

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except RecursionError as error:
        raise CorruptFile(f"{shown(path)} is not usable JSON: it is nested too deep") from error
    except ValueError as error:  # bad UTF-8 and numbers of too many digits too
        raise CorruptFile(f"{shown(path)} is not usable JSON: {shown(str(error))}") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{shown(path)}: expected a JSON object, found {shown(value)}")
    return value


def read_object(path: Path, max_bytes: int, *, infinity: bool = False) -> dict[str, Any]:
    """Read the JSON object in a file of at most `max_bytes`, with `infinity` as in `parse_object`.

    Raises NotACheckpoint or CorruptFile.
    """
    size = file_size(path)
    if size > max_bytes:
        raise CorruptFile(f"{shown(path)} has {size} bytes; at most {max_bytes} are expected there")
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise NotACheckpoint(f"{shown(path)} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:  # the file has grown
        raise CorruptFile(f"{shown(path)} has more than {max_bytes} bytes")
    return parse_object(data, path, infinity=infinity)
