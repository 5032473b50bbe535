"""Reads the header of a GGUF file, llama.cpp's format: metadata, and the place of each tensor.

A file has the bytes "GGUF", a version, the numbers of tensors and of metadata entries, the entries (key,
type, value), a description of each tensor (name, sizes with the innermost first, type, offset), and after
padding the tensors' data, to which the offsets are relative. Nothing is trusted: every count, length and
offset is compared with the bytes that are left before it is used, and arrays are decoded only when asked for,
so that a hostile file costs neither time nor memory.
"""

import mmap
import os
import re
import stat
import struct
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from orca_jax.errors import BadModelConfig, CorruptFile, NotACheckpoint, UnsupportedModel, shown

SUFFIX = ".gguf"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_TENSORS, _MAX_ENTRIES, _MAX_KEY_BYTES, _MAX_RANK = 1 << 17, 1 << 16, 1 << 16, 4
_MAX_FILES = 1000
_FIRST_PART = re.compile(r"(.*)-00001-of-(\d{5})\.gguf")
_MAX_STRINGS = 1 << 21  # in all arrays of a file; the largest vocabularies have 600,000 with their merges
_MAX_TEXT_BYTES = 1 << 24
_TIME_STEP = 2.0  # seconds, the longest of file systems
_MAX_TOKENS_BYTES = 1 << 27

_SCALARS: Mapping[int, str] = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"},
}
_BOOL, _STRING, _ARRAY = 7, 8, 9

# Types that are read: numbers in a block, and its bytes.
BLOCKS: Mapping[str, tuple[int, int]] = {
    **{"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2)},
    **{"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34)},
    **{"Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)},
    **{"IQ4_NL": (32, 18), "MXFP4": (32, 17)},
}
_TYPES: Mapping[int, str] = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S"},
    **{23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16"},
    **{34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's location: `n_bytes` from byte `offset` of `path`. `shape` has the outermost axis first."""

    path: Path
    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class _Span:
    """A text or an array that is still encoded: its first byte, and its length in bytes or elements."""

    kind: int  # of a text _STRING, or that of an array's elements
    start: int
    n: int
    end: int
    is_array: bool = False


class GgufFile:
    """The header of a GGUF file, whose metadata is read by key and checked by type.

    Raises NotACheckpoint (cannot be read), CorruptFile (malformed or truncated) or UnsupportedModel (a
    version or a type of tensors that is not read); each names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stored = {path: _state(path)}
        self._data = _mapped(path)
        header = _Header(path, self._data)
        self._values = header.values
        self.tensors: Mapping[str, GgufTensor] = self._of_all_files(header.tensors)

    def _of_all_files(self, found: dict[str, GgufTensor]) -> dict[str, GgufTensor]:
        """The tensors of this file, and of the others where it is the first of a model that was split."""
        n = self.whole("split.count", 1)
        name = _FIRST_PART.fullmatch(self.path.name)
        if n <= 1:
            return found
        if self.whole("split.no", 0) or n > _MAX_FILES or name is None or int(name[2]) != n:
            raise NotACheckpoint(
                f"{self.path} is one of {n} files of its model; name the first, whose name ends in "
                f"-00001-of-{n:05}{SUFFIX}"
            )
        for i in range(2, n + 1):
            path = self.path.with_name(f"{name[1]}-{i:05}-of-{n:05}{SUFFIX}")
            self._stored[path] = _state(path)
            more = _Header(path, _mapped(path)).tensors
            if twice := more.keys() & found.keys():
                raise CorruptFile(f"{path}: tensor '{min(twice)}' is in another file of the model too")
            found |= more
        return found

    @property
    def is_current(self) -> bool:
        """Whether none of its files has been replaced or changed since they were read."""
        return all(state is not None and _state(path) == state for path, state in self._stored.items())

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the metadata."""
        return tuple(self._values)

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number. Raises BadModelConfig without one, unless there is a `default`."""
        value = self._values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.bad(key, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number: for a float32 the shortest decimal that is rounded to it, such as 1e-05."""
        value = self._values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not -1e30 < value < 1e30:
            raise self.bad(key, "a number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, bool, "true or false", default)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._values.get(key, default)
        if isinstance(value, str):
            return value
        if not isinstance(value, _Span) or value.is_array:
            raise self.bad(key, "a text")
        if value.n > _MAX_TEXT_BYTES:
            raise CorruptFile(
                f"{self.path}: {key} has {value.n} bytes; at most {_MAX_TEXT_BYTES} are expected"
            )
        return self._decoded(key, self._data[value.start : value.end])

    def length(self, key: str) -> int:
        """The number of elements of an array; 0 where the file lacks it."""
        span = self._array(key)
        return 0 if span is None else span.n

    def numbers(self, key: str) -> npt.NDArray[Any]:
        """An array of numbers; empty where the file lacks it."""
        span = self._array(key)
        if span is None:
            return np.zeros(0)
        if span.kind == _STRING:
            raise self.bad(key, "an array of numbers")
        return np.frombuffer(self._data, _SCALARS[span.kind], span.n, span.start).copy()

    def texts(self, key: str) -> list[str]:
        """An array of texts; empty where the file lacks it."""
        span = self._array(key)
        if span is None:
            return []
        if span.kind != _STRING:
            raise self.bad(key, "an array of texts")
        if span.end - span.start > _MAX_TOKENS_BYTES:
            raise CorruptFile(f"{self.path}: {key}: expected at most {_MAX_TOKENS_BYTES} bytes")
        return [self._decoded(key, each) for each in self._encoded_texts(span)]

    def texts_at(self, key: str, places: Collection[int]) -> dict[int, str]:
        """The texts at these places of an array of texts."""
        span = self._array(key)
        if span is None or span.kind != _STRING or not places:
            return {}
        some = islice(self._encoded_texts(span), max(places) + 1)
        return {i: self._decoded(key, each) for i, each in enumerate(some) if i in places}

    def _encoded_texts(self, span: _Span) -> Iterator[bytes]:
        data, at = self._data[span.start : span.end], 0
        length = struct.Struct("<Q").unpack_from
        for _ in range(span.n):
            (n,) = length(data, at)
            at += 8
            yield data[at : at + n]
            at += n

    def bad(self, key: str, rule: str) -> BadModelConfig:
        """The error for a value that is missing or of another type."""
        value = self._values.get(key)
        if isinstance(value, _Span):
            found = f"an array of {value.n}" if value.is_array else "a text"
        else:
            found = "none" if key not in self._values else shown(value)
        return BadModelConfig(f"{self.path}: {key}: expected {rule}, found {found}")

    def _typed(self, key: str, kind: type[_T], rule: str, default: _T) -> _T:
        value = self._values.get(key, default)
        if not isinstance(value, kind):
            raise self.bad(key, rule)
        return value

    def _array(self, key: str) -> _Span | None:
        value = self._values.get(key)
        if value is not None and not (isinstance(value, _Span) and value.is_array):
            raise self.bad(key, "an array")
        return value

    def _decoded(self, key: str, data: bytes) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptFile(f"{self.path}: {key} is not UTF-8: {shown(str(error))}") from None


def is_gguf(path: Path) -> bool:
    """Whether this is the path of a GGUF file, by its name."""
    return path.suffix.lower() == SUFFIX and path.is_file()


def open_gguf(path: Path) -> GgufFile:
    """The header of a GGUF file, which is parsed once as long as its files stay as they are.

    Raises what GgufFile does.
    """
    last = _last_opened.get(path)
    if last is not None and last.is_current:
        return last
    file = GgufFile(path)
    _last_opened.clear()  # one model is opened several times while an engine starts
    _last_opened[path] = file
    return file


_last_opened: dict[Path, GgufFile] = {}


def _state(path: Path) -> tuple[int, ...] | None:
    """Identify the state of a file: it changes when the file is replaced or written to; None without a file.

    None too where it has just been written to: a second change might leave its time as it is.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    if abs(time.time() - found.st_mtime) < _TIME_STEP:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise NotACheckpoint(f"{path} is not a regular file")
            if not status.st_size:
                raise CorruptFile(f"{path} is empty, so it is not a GGUF file")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise NotACheckpoint(f"{path} cannot be read: {error}") from error


class _Header:
    """Walks through a header once, from the first byte to the last tensor's description."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at, self._n_strings = path, data, 0, 0
        self._check_start()
        n_tensors = self._count("tensors", _MAX_TENSORS)
        n_entries = self._count("metadata entries", _MAX_ENTRIES)
        self.values: dict[str, Any] = {}
        for _ in range(n_entries):
            key = self._name("a key")
            if key in self.values:
                raise self._corrupt(f"the key '{key}' appears twice")
            self.values[key] = self._value(key, self._number("<I", f"the type of {key}"))
        found = [self._tensor() for _ in range(n_tensors)]
        self.tensors = self._placed(found)

    def _check_start(self) -> None:
        magic = self._take(4, "the file's first bytes")
        if magic != _MAGIC:
            if self._data[:7] == b"version":
                raise self._corrupt(
                    "it is a Git LFS pointer instead of the file; fetch it with `git lfs pull`"
                )
            raise self._corrupt(f"expected the bytes {_MAGIC!r} at its beginning, found {magic!r}")
        version = self._number("<I", "the version")
        if version not in _VERSIONS:
            kind = "for machines of the other byte order" if not version & 0xFFFF else f"of version {version}"
            raise UnsupportedModel(
                f"{self._path} is a GGUF file {kind}; versions {_VERSIONS[0]} and {_VERSIONS[1]} in "
                "little-endian order are read"
            )

    def _corrupt(self, what: str) -> CorruptFile:
        return CorruptFile(f"{self._path}: {what}")

    def _room(self, n: int, what: str) -> int:
        """Move over `n` bytes, and return where they begin. Raises CorruptFile where there are fewer."""
        start, left = self._at, len(self._data) - self._at
        if n > left:
            raise self._corrupt(
                f"{what}: expected {n} bytes at byte {start}, found {left}; it is truncated or damaged"
            )
        self._at += n
        return start

    def _take(self, n: int, what: str) -> bytes:
        start = self._room(n, what)
        return self._data[start : start + n]

    def _number(self, form: str, what: str) -> Any:
        return struct.unpack_from(form, self._data, self._room(struct.calcsize(form), what))[0]

    def _count(self, what: str, most: int) -> int:
        n = self._number("<Q", f"the number of {what}")
        if n > most:
            raise self._corrupt(f"expected at most {most} {what}, found {n}")
        return n

    def _name(self, what: str) -> str:
        n = self._number("<Q", f"the length of {what}")
        if n > _MAX_KEY_BYTES:
            raise self._corrupt(f"{what}: expected at most {_MAX_KEY_BYTES} bytes, found {n}")
        try:
            name = self._take(n, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._corrupt(f"{what} is not UTF-8: {shown(str(error))}") from None
        if not name.isprintable() or not name:
            raise self._corrupt(f"{what} is {shown(name)}; expected a printable name")
        return name

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            n = self._number("<Q", f"the length of {key}")
            start = self._room(n, key)
            return _Span(kind, start, n, start + n)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._corrupt(f"{key}: expected a type from 0 to 12, found {kind}")
        if kind == _BOOL:
            return self._number("<B", key) != 0
        value = self._number(_SCALARS[kind], key)
        return float(str(np.float32(value))) if kind == 6 else value

    def _array(self, key: str) -> _Span:
        kind = self._number("<I", f"the type of {key}")
        n = self._number("<Q", f"the length of {key}")
        if kind == _ARRAY:
            raise self._corrupt(f"{key} is an array of arrays, which is not expected")
        if kind != _STRING:
            if kind not in _SCALARS:
                raise self._corrupt(f"{key}: expected elements of a type from 0 to 12, found {kind}")
            start = self._room(n * np.dtype(_SCALARS[kind]).itemsize, key)
            return _Span(kind, start, n, self._at, is_array=True)
        self._n_strings += n
        if self._n_strings > _MAX_STRINGS or n > (len(self._data) - self._at) // 8:
            most = min(_MAX_STRINGS, (len(self._data) - self._at) // 8)
            raise self._corrupt(
                f"{key}: expected at most {most} texts, found {n}; it is truncated or damaged"
            )
        data, at, size = self._data, self._at, len(self._data)
        start, length = at, struct.Struct("<Q").unpack_from
        for i in range(n):
            at += 8 + length(data, at)[0] if at + 8 <= size else size
            if at > size:
                raise self._corrupt(
                    f"{key}: text {i} of {n} ends after the file does; it is truncated or damaged"
                )
        self._at = at
        return _Span(kind, start, n, at, is_array=True)

    def _tensor(self) -> GgufTensor:
        name = self._name("a tensor's name")
        rank = self._number("<I", f"tensor '{name}'")
        if not 1 <= rank <= _MAX_RANK:
            raise self._corrupt(f"tensor '{name}': expected 1 to {_MAX_RANK} axes, found {rank}")
        sizes = [self._number("<Q", f"tensor '{name}'") for _ in range(rank)]
        kind, offset = self._number("<I", f"tensor '{name}'"), self._number("<Q", f"tensor '{name}'")
        if kind not in _TYPES:
            raise self._corrupt(f"tensor '{name}': the type {kind} is not known")
        if _TYPES[kind] not in BLOCKS:
            raise UnsupportedModel(
                f"{self._path}: tensor '{name}' is of the type {_TYPES[kind]}; expected one of "
                f"{', '.join(BLOCKS)}. Use a file of the same model in one of them"
            )
        block, n_bytes = BLOCKS[_TYPES[kind]]
        n = 1
        for size in sizes:
            n *= size
        if not 0 < n < 1 << 62 or sizes[0] % block:
            rule = f", the first a multiple of {block}" if block > 1 else ""
            raise self._corrupt(
                f"tensor '{name}' of the type {_TYPES[kind]}: expected sizes above 0{rule}, found {sizes}"
            )
        return GgufTensor(
            self._path, name, _TYPES[kind], tuple(reversed(sizes)), offset, n // block * n_bytes
        )

    def _placed(self, found: list[GgufTensor]) -> dict[str, GgufTensor]:
        """The tensors by name, with offsets from the beginning of the file. None may overlap another."""
        alignment = self.values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._corrupt(f"general.alignment: expected a power of two, found {shown(alignment)}")
        start = -(-self._at // alignment) * alignment
        size, end = len(self._data) - start, 0
        tensors: dict[str, GgufTensor] = {}
        for one in sorted(found, key=lambda one: one.offset):
            if one.name in tensors:
                raise self._corrupt(f"tensor '{one.name}' appears twice")
            if one.offset < end or one.offset % alignment or one.offset + one.n_bytes > size:
                raise self._corrupt(
                    f"tensor '{one.name}': expected {one.n_bytes} bytes within the {max(0, size)} bytes of "
                    f"data, from a multiple of {alignment} not before {end}, found them at {one.offset}; it "
                    "is truncated or damaged"
                )
            end = one.offset + one.n_bytes
            tensors[one.name] = replace(one, offset=start + one.offset)
        return tensors
