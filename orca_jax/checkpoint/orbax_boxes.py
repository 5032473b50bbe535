"""Reads boxes of an Orbax array directly from its chunks, which Orbax's own restore cannot do.

Orbax restores whole arrays in their stored shapes. A shard of ours may be part of a transposed array or of
several stacked ones, and the host should hold little more than a shard.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orca_jax.checkpoint.shard_reader import Box
from orca_jax.errors import CorruptFile
from orca_jax.families.strict_json import shown

_SECONDS = 600.0  # timeout of one read of at most a few hundred megabytes
_PIECE_BYTES = 1 << 23  # read at once if chunks are smaller


@dataclass(frozen=True, slots=True)
class OrbaxArray:
    """An array of the checkpoint, viewed as a vector or a matrix with merged neighbouring axes."""

    where: str
    store: Any  # a ts.TensorStore
    axes: tuple[tuple[int, ...], ...]  # sizes of the stored axes that merge into each axis of the view

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
        """Whether it has several chunks; a single chunk is always read whole."""
        return self._chunk != tuple(self.store.shape)

    @property
    def _chunk(self) -> tuple[int, ...]:
        return tuple(self.store.chunk_layout.read_chunk.shape)

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the rows of `box` a few chunks at a time: the row within the box, and the piece.

        Raises CorruptFile if chunks are missing or corrupt.
        """
        (first, end), *inner = box
        rows = math.prod(self.axes[0])
        step = max(1, rows * self._chunk[0] // max(1, self.store.shape[0]))
        step_bytes = step * self.element.itemsize * math.prod(stop - start for start, stop in inner)
        step *= max(1, _PIECE_BYTES // max(1, step_bytes))
        for start in range(first - first % step, end, step):
            low, high = max(first, start), min(end, start + step)
            row = low
            for part in runs(self.axes[0], low, high):
                columns = [self._read(part, other) for other in self._inner_boxes(inner)]
                piece = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
                yield row - first, piece
                row += len(piece)

    def _inner_boxes(self, inner: Sequence[tuple[int, int]]) -> list[Box]:
        return [()] if not inner else [*runs(self.axes[1], *inner[0])]

    def _read(self, rows: Box, columns: Box) -> np.ndarray:
        index = tuple(slice(first, end) for first, end in (*rows, *columns))
        values = read_box(self.store, index, str(self))
        n_rows = math.prod(end - first for first, end in rows)
        return values.reshape(n_rows, -1) if columns else values.reshape(n_rows)


def read_box(store: Any, index: tuple[int | slice, ...], where: str) -> np.ndarray:
    """Read a part of an array, which errors call `where`. Raises CorruptFile for an unusable chunk."""
    try:
        return store[index].read().result(timeout=_SECONDS)
    except Exception as error:  # ValueError, KeyError and others, depending on the failure
        raise CorruptFile(f"{where}: its data cannot be read: {reason(error)}") from error


def runs(sizes: tuple[int, ...], first: int, end: int) -> Iterator[Box]:
    """Yield elements `first` to `end` of merged axes of these sizes as boxes, in order."""
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
            for box in runs(sizes[1:], offset, offset + stop - first):
                yield ((row, row + 1), *box)
            first = stop


def reason(error: Exception) -> str:
    """Shorten an error of Orbax or TensorStore to one line, without its list of source files."""
    return shown(" ".join(str(error).split(" [")[0].split())) or type(error).__name__
