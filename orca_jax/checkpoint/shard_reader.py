"""Reads parameters shard by shard: only each device's part of the stored data."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np

from orca_jax.errors import TensorMismatch

Box = tuple[tuple[int, int], ...]  # first and end along each axis
Place = jax.sharding.Sharding | None  # None: the default device, to which the array is not committed


class Stored(Protocol):
    """A vector or matrix on disk, of which any box can be read; `str` gives its location."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[n] or [rows, columns]."""
        ...

    @property
    def element(self) -> np.dtype:
        """The dtype of its elements."""
        ...

    @property
    def divisible(self) -> bool:
        """Whether reading a part is cheaper than reading the whole."""
        ...

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the elements of `box`, some rows at a time: the row within the box, and the piece."""
        ...


class Plane(Protocol):
    """An array of a weight on disk, of which each device's part is read alone: Parts, or a reader's class.

    `shape` is the array's own, such as `families.weight_form.HeldArray` has it, and a box is in its elements.
    """

    @property
    def divisible(self) -> bool:
        """Whether reading a part is cheaper than reading the whole."""
        ...

    def n_bytes(self, shape: tuple[int, ...], box: Box) -> int:
        """The bytes on disk of the part `box` of the array [shape]."""
        ...

    def read(self, shape: tuple[int, ...], dtype: np.dtype, box: Box) -> np.ndarray:
        """Read the part `box` of the array [shape] in `dtype`. Raises TensorMismatch or CorruptFile."""
        ...


# How a weight is read: its dense numbers, or each array of its form (WeightForm.arrays) by the array's name.
# A reader gives the second for weights that the checkpoint has in the form; the first are encoded in the
# weight's form after reading. Rows of the padded vocabulary beyond those of the file are zeros in each array.
Source = Plane | Mapping[str, Plane]


class MadeOf:
    """The name, dtype and divisibility of a Stored that is made of others, its `sources`."""

    @property
    def sources(self) -> tuple[Stored, ...]:
        """The other Stored; the first gives the name."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.sources[0])

    @property
    def element(self) -> np.dtype:
        """The dtype of all sources; float32 where they differ."""
        elements = {source.element for source in self.sources}
        return elements.pop() if len(elements) == 1 else np.dtype(np.float32)

    @property
    def divisible(self) -> bool:
        return all(source.divisible for source in self.sources)


@dataclass(frozen=True, slots=True)
class MadeOfOne(MadeOf):
    """A Stored that is made of one other, `stored`, with its shape unless a subclass has another."""

    stored: Stored

    @property
    def sources(self) -> tuple[Stored, ...]:
        return (self.stored,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape


def read_box(stored: Stored, box: Box) -> np.ndarray:
    """Read the elements of `box` into one array."""
    out = np.empty([end - first for first, end in box], stored.element)
    for row, piece in stored.pieces(box):
        out[row : row + len(piece)] = piece
    return out


@dataclass(frozen=True, slots=True)
class ComputedArray:
    """A weight that a checkpoint may lack, because it follows from the model's shape."""

    name: str
    values: np.ndarray

    def __str__(self) -> str:
        return self.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def element(self) -> np.dtype:
        return self.values.dtype

    @property
    def divisible(self) -> bool:
        return True

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box` in one piece, at row 0."""
        yield 0, self.values[tuple(slice(*each) for each in box)]


@dataclass(frozen=True, slots=True)
class Parts:
    """A parameter's stored vectors or matrices, stacked along the rows, possibly transposed.

    The parameter's leading axes are merged: `qkv` [3, H, H] is one matrix [3H, H] or three of [H, H]. Rows
    beyond the stored ones are zero.
    """

    tensors: tuple[Stored, ...]
    transpose: bool = False

    @property
    def divisible(self) -> bool:
        return all(tensor.divisible for tensor in self.tensors)

    def n_bytes(self, shape: tuple[int, ...], box: Box) -> int:
        """The bytes on disk of the part `box` of the parameter [shape]."""
        return sum(
            tensor.element.itemsize * math.prod(end - first for first, end in part)
            for _, tensor, part in self._segments(shape, box)
        )

    def read(self, shape: tuple[int, ...], dtype: np.dtype, box: Box) -> np.ndarray:
        """Read the part `box` of the parameter [shape] in `dtype`. Raises TensorMismatch or CorruptFile."""
        sizes = [end - first for first, end in box]
        while len(shape) > len(self.tensors[0].shape) and box[1] == (0, shape[1]):
            # All rows of a range of the leading axis form one run of the matrix: read it at once.
            (first, end), (_, n), *columns = box
            shape, box = (shape[0] * n, *shape[2:]), ((first * n, end * n), *columns)
        out = np.zeros([end - first for first, end in box], dtype)
        for where, tensor, part in self._segments(shape, box):
            target = out[where].T if self.transpose else out[where]
            for row, piece in tensor.pieces(part):
                assign(target[row : row + len(piece)], piece, tensor)
        return out.reshape(sizes)

    def _segments(self, shape: tuple[int, ...], box: Box) -> Iterator[tuple[Any, Stored, Box]]:
        """Yield the segments of a box: an index into it, a tensor, and the tensor's box for that index."""
        rank = len(self.tensors[0].shape)
        n_leading = len(shape) - rank
        leading, (first, end), columns = box[:n_leading], box[n_leading], box[n_leading + 1 :]
        heights = (tensor.shape[-1] if self.transpose else tensor.shape[0] for tensor in self.tensors)
        tops = [0, *accumulate(heights)]
        for at in np.ndindex(*(stop - start for start, stop in leading)):
            above = 0
            for i, (start, _), n in zip(at, leading, shape[:n_leading], strict=True):
                above = above * n + start + i
            row = above * shape[n_leading] + first  # counted over all tensors
            one, past = bisect_right(tops, row) - 1, bisect_left(tops, row + end - first)
            for tensor, top, bottom in zip(
                self.tensors[one:past], tops[one:past], tops[one + 1 : past + 1], strict=False
            ):
                begin, stop = max(row, top), min(row + end - first, bottom)
                if begin < stop:
                    rows = (begin - top, stop - top)
                    part = (*columns, rows) if self.transpose else (rows, *columns)
                    yield (*at, slice(begin - row, stop - row)), tensor, part


@dataclass(frozen=True, slots=True)
class ReadPlane:
    """An array that was read whole into host memory."""

    values: np.ndarray

    @property
    def divisible(self) -> bool:
        return True

    def n_bytes(self, shape: tuple[int, ...], box: Box) -> int:
        return 0

    def read(self, shape: tuple[int, ...], dtype: np.dtype, box: Box) -> np.ndarray:
        assert (shape, dtype) == (self.values.shape, self.values.dtype)
        return self.values[tuple(slice(*each) for each in box)]


def read_whole(plane: Plane, shape: tuple[int, ...], dtype: np.dtype) -> ReadPlane:
    """Read the array [shape] in `dtype` into host memory. Raises TensorMismatch or CorruptFile."""
    return ReadPlane(plane.read(shape, dtype, tuple((0, n) for n in shape)))


def bytes_read(parts: Plane, shape: tuple[int, ...], places: Sequence[Place]) -> int:
    """The bytes on disk that `put` reads, each counted once."""
    return sum(parts.n_bytes(shape, box) for box in _boxes_of(shape, places))


def _boxes_of(shape: tuple[int, ...], places: Sequence[Place]) -> dict[Box, list[tuple[int, Any]]]:
    """The distinct parts that places need, each with its users: the place's index and the device."""
    wanted: dict[Box, list[tuple[int, Any]]] = {}
    for i, place in enumerate(places):
        if place is None:
            wanted.setdefault(tuple((0, n) for n in shape), []).append((i, None))
            continue
        for device, index in place.addressable_devices_indices_map(shape).items():
            assert index is not None
            box = tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))
            wanted.setdefault(box, []).append((i, device))
    return wanted


def put(parts: Plane, shape: tuple[int, ...], dtype: np.dtype, places: Sequence[Place]) -> list[jax.Array]:
    """Read a parameter part by part onto each of `places`; a part that several devices hold is read once.

    The host holds one part at a time, or the hull of all parts if parts cannot be read separately.
    """
    wanted = _boxes_of(shape, places)
    arrays: list[list[jax.Array]] = [[] for _ in places]
    axes = zip(*wanted, strict=True)
    hull: Box = tuple((min(a for a, _ in axis), max(b for _, b in axis)) for axis in axes)
    at_once = len(wanted) > 1 and not parts.divisible
    whole = parts.read(shape, dtype, hull) if at_once else None
    for box, users in wanted.items():
        if whole is None:
            values = parts.read(shape, dtype, box)
        else:
            values = whole[tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(box, hull, strict=True))]
        for i, device in users:
            arrays[i].append(jax.device_put(values, device))
        jax.block_until_ready(arrays)
    return [
        one[0] if place is None else jax.make_array_from_single_device_arrays(shape, place, one)
        for one, place in zip(arrays, places, strict=True)
    ]


def assign(target: np.ndarray, piece: np.ndarray, tensor: object) -> None:
    """Convert `piece` into `target`; raises TensorMismatch, which names `tensor`, for numbers too large."""
    if target.dtype == np.float16 and piece.dtype == ml_dtypes.bfloat16:
        piece = piece.astype(np.float32)  # bfloat16's own cast would silently turn large numbers into inf
    try:
        with np.errstate(over="raise", invalid="ignore"):
            target[...] = piece
    except FloatingPointError as error:
        raise TensorMismatch(
            f"{tensor} holds numbers too large for {target.dtype.name}; use bfloat16 or float32"
        ) from error
