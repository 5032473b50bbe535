"""Reads safetensors files, which are not trusted: every claim of the header is checked before it is used.

A file has 8 bytes of header length (little endian), the header (a JSON object: name -> dtype, shape,
data_offsets), and the data. Offsets count from the start of the data, which the tensors cover without gaps or
overlaps. Unlike the format's library, this reader reads ranges instead of mapping the file: mapped pages
count as the process's memory until the tensor is freed, so the host would hold two tensors in addition to the
shards.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from orca_jax.checkpoint.shard_reader import Box
from orca_jax.errors import CorruptFile, NotACheckpoint, UnsafeFile
from orca_jax.families.strict_json import file_size, parse_object, shown

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_MAX_RANK = 16
_CHUNK_BYTES = 1 << 24

# The format's dtypes with a whole number of bytes, and the dtypes allowed for weights.
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
FP8 = "F8_E4M3"
BYTES = "U8"
INT8, WORDS = "I8", "I32"
PACKED_DTYPES = {
    FP8: np.dtype(ml_dtypes.float8_e4m3fn),
    BYTES: np.dtype(np.uint8),
    INT8: np.dtype(np.int8),
    WORDS: np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
WHOLE_NUMBERS = ("I64", WORDS)
FLOAT_DTYPES = {
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's location: `n_bytes` from byte `offset` of `file`; `dtype` is the format's name."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int

    def __str__(self) -> str:
        return f"{shown(self.file)}: tensor '{shown(self.name)}'"

    @property
    def element(self) -> np.dtype:
        """The dtype of its elements: a float, FP8, or whole numbers."""
        return PACKED_DTYPES.get(self.dtype) or FLOAT_DTYPES[self.dtype]

    @property
    def divisible(self) -> bool:
        """Always true: any part can be read separately."""
        return True

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box`, some rows at a time: the row within the box, and the piece.

        Reads only the box's bytes. Raises CorruptFile if the file has changed since its header was read.
        """
        (first, end), *inner = box
        begin, stop = inner[0] if inner else (0, 1)
        n_columns = self.shape[1] if inner else 1
        n_bytes = self.element.itemsize
        step = max(1, _CHUNK_BYTES // max(1, (stop - begin) * n_bytes))
        try:
            with self.file.open("rb", buffering=0) as file:
                for row in range(first, end, step):
                    n_rows = min(step, end - row)
                    piece = np.empty((n_rows, stop - begin) if inner else n_rows, self.element)
                    # A range of columns is a run of bytes in each row; all columns form a single run.
                    runs = piece.reshape(1 if stop - begin == n_columns else n_rows, -1).view(np.uint8)
                    start = self.offset + (row * n_columns + begin) * n_bytes
                    for i, run in enumerate(runs):
                        self._read(file.fileno(), run, start + i * n_columns * n_bytes)
                    yield row - first, piece
        except OSError as error:
            raise CorruptFile(f"{self} cannot be read: {error.strerror}") from error

    def _read(self, file: int, run: np.ndarray, offset: int) -> None:
        view, done = run.data, 0
        while done < len(view):
            n = os.preadv(file, [view[done:]], offset + done)
            if n == 0:
                raise CorruptFile(f"{self} cannot be read: the file ends at byte {offset + done}")
            done += n


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file: its tensors by name.

    Raises CorruptFile, which names the file, the tensor and the expected and found values, if the header
    contradicts itself or the file's size; UnsafeFile for a pickle with this name; NotACheckpoint if there is
    no file.
    """
    size = file_size(path)
    try:
        with path.open("rb") as file:
            start = file.read(8)
            header_bytes = int.from_bytes(start, "little")
            if len(start) < 8 or header_bytes > min(MAX_HEADER_BYTES, size - 8):
                raise _not_a_header(path, start, header_bytes, size)
            header = file.read(header_bytes)
    except OSError as error:
        raise NotACheckpoint(f"{shown(path)} cannot be read: {error.strerror}") from error
    if len(header) < header_bytes:
        raise CorruptFile(f"{shown(path)}: the header ends after {len(header)} of {header_bytes} bytes")
    entries = parse_object(header, path)
    _check_metadata(path, entries.pop("__metadata__", {}))
    data_start = 8 + header_bytes
    tensors = {name: _tensor(path, name, entry, data_start, size) for name, entry in entries.items()}
    _check_cover(path, tensors, data_start, size)
    return tensors


def _not_a_header(path: Path, start: bytes, header_bytes: int, size: int) -> CorruptFile | UnsafeFile:
    """The error for a file that does not start with a possible header length."""
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return UnsafeFile(
            f"{shown(path)} is a pickle or a zip archive of one, not a safetensors file; loading a pickle "
            "can run code, so it is refused. Save the model as safetensors"
        )
    if start == b"version ":
        return CorruptFile(
            f"{shown(path)} is a Git LFS pointer instead of the file; fetch the file with `git lfs pull`"
        )
    if len(start) < 8:
        return CorruptFile(
            f"{shown(path)} has {len(start)} bytes; a safetensors file starts with 8 bytes of header length"
        )
    return CorruptFile(
        f"{shown(path)}: header length: expected at most {min(MAX_HEADER_BYTES, size - 8)} bytes (the file "
        f"has {size}), found {header_bytes}; the file is truncated or not a safetensors file"
    )


def _check_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptFile(
            f"{shown(path)}: __metadata__: expected an object of strings, found {shown(metadata)}"
        )


def _tensor(path: Path, name: str, entry: object, data_start: int, size: int) -> StoredTensor:
    """Check one entry of the header, by itself and against the file's size."""
    where = f"{shown(path)}: tensor '{shown(name)}'"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CorruptFile(f"{where}: expected dtype, shape and data_offsets, found {shown(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise CorruptFile(f"{where}: dtype: expected one of {', '.join(_ITEM_BYTES)}, found {shown(dtype)}")
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not all(_is_size(n) for n in shape):
        raise CorruptFile(
            f"{where}: shape: expected at most {_MAX_RANK} whole numbers of at least 0, found {shown(shape)}"
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise CorruptFile(f"{where}: data_offsets: expected two whole numbers, found {shown(offsets)}")
    begin, end = offsets
    if not begin <= end <= size - data_start:
        raise CorruptFile(
            f"{where}: data_offsets: expected a range within the {size - data_start} bytes of data, "
            f"found {shown(offsets)}; the file is truncated or its header is wrong"
        )
    expected = math.prod(shape) * _ITEM_BYTES[dtype]  # Python's integers do not overflow
    if end - begin != expected:
        raise CorruptFile(
            f"{where}: expected {shown(expected)} bytes for {dtype} {shown(shape)}, found {end - begin} "
            f"(data_offsets {shown(offsets)})"
        )
    return StoredTensor(path, name, dtype, tuple(shape), data_start + begin, expected)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _check_cover(path: Path, tensors: dict[str, StoredTensor], data_start: int, size: int) -> None:
    """Check that every byte of the data belongs to exactly one tensor."""
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.n_bytes)):
        if tensor.offset != position:
            kind = "overlaps the previous tensor" if tensor.offset < position else "leaves a gap before it"
            raise CorruptFile(
                f"{tensor} {kind}: expected data from offset {position - data_start}, "
                f"found {tensor.offset - data_start}"
            )
        position += tensor.n_bytes
    if position != size:
        raise CorruptFile(
            f"{shown(path)}: expected {position} bytes according to its header, found {size}; "
            "there are bytes after the last tensor"
        )


def same_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Compare two matrices piece by piece.

    They are equal too if one in a narrower dtype is the other rounded.
    """
    if one.shape != other.shape or not {one.dtype, other.dtype} <= FLOAT_DTYPES.keys():
        return False
    wide, narrow = sorted((one, other), key=lambda tensor: -tensor.element.itemsize)
    for row, piece in wide.pieces(tuple((0, n) for n in wide.shape)):
        box = ((row, row + len(piece)), *((0, n) for n in wide.shape[1:]))
        same_rows = np.concatenate([part for _, part in narrow.pieces(box)])
        if wide.dtype != narrow.dtype:
            with np.errstate(over="ignore"):  # to infinity, which then differs
                piece = piece.astype(narrow.element)
        if not np.array_equal(piece, same_rows, equal_nan=True):
            return False
    return True
