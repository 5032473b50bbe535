"""Boxes of an Orbax array, read straight from its chunks: what Orbax's own restore cannot do.

Orbax restores whole arrays of the shapes they have. A shard of ours may be a part of one transposed, or of
several taken as one, and the host is to hold little beside it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orca_jax.checkpoint.shard_reader import Box
from orca_jax.errors import CorruptFile
from orca_jax.families.strict_json import shown

_SECONDS = 600.0  # for one read of at most a few hundred megabytes
_PIECE_BYTES = 1 << 23  # read at once, where chunks are smaller


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
        """The part `box`, some chunks' rows at a time: the row within the box, and the piece.

        Raises CorruptFile where chunks are missing or broken.
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
        try:
            values = self.store[index].read().result(timeout=_SECONDS)
        except Exception as error:  # a ValueError, a KeyError and others, by the kind of failure
            raise CorruptFile(f"{self}: its data cannot be read: {reason(error)}") from error
        n_rows = math.prod(end - first for first, end in rows)
        return values.reshape(n_rows, -1) if columns else values.reshape(n_rows)


def runs(sizes: tuple[int, ...], first: int, end: int) -> Iterator[Box]:
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
            for box in runs(sizes[1:], offset, offset + stop - first):
                yield ((row, row + 1), *box)
            first = stop


def reason(error: Exception) -> str:
    """An error of Orbax or TensorStore in one line, without its list of source files."""
    return shown(" ".join(str(error).split(" [")[0].split())) or type(error).__name__
