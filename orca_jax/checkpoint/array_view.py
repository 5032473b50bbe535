"""Reads one of our weights from an array of a trainer's checkpoint, and writes it into such an array.

families/trainers/array_form.py says which axes of the array are which of the weight's. Moving numbers keeps
their bits; a form that adds or multiplies computes in float32, and rounds once to the array's dtype.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from orca_jax.checkpoint.orbax_boxes import read_box, runs
from orca_jax.checkpoint.shard_reader import Box
from orca_jax.families.parameters import Parameter
from orca_jax.families.trainers.array_form import ArrayForm


@dataclass(frozen=True, slots=True)
class ArrayView:
    """The vector or matrix that `form` describes in an array, whose axes are its `rows` and `columns`."""

    where: str
    store: Any  # a ts.TensorStore
    form: ArrayForm
    sizes: tuple[int, ...]  # of the array's axes, as the model has them
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def __str__(self) -> str:
        return self.where

    @property
    def shape(self) -> tuple[int, ...]:
        axes = (self.rows, self.columns) if self.columns else (self.rows,)
        return tuple(math.prod(self.sizes[i] for i in each) for each in axes)

    @property
    def element(self) -> np.dtype:
        return self.store.dtype.numpy_dtype

    @property
    def divisible(self) -> bool:
        """Whether an axis of shards or heads has several chunks."""
        chunk = self.store.chunk_layout.read_chunk.shape
        split = [i for i, letter in enumerate(self.form.letters) if letter[0] in "NKFVX"] or self.rows[:1]
        return any(chunk[i] < self.sizes[i] for i in split)

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield `box` in one piece, at row 0. Raises CorruptFile."""
        (first, end), *inner = box
        pair = self.sizes[self.rows[-1]] if self.form.interleaved else 1
        low, high = first - first % pair, -(-end // pair) * pair
        values = np.concatenate([self.read(rows, inner) for rows in runs(self._of(self.rows), low, high)])
        if self.form.interleaved:
            values = halves(values, pair)
        yield 0, changed(values[first - low : end - low], self.form.multiply, self.form.add)

    def _of(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.sizes[i] for i in axes)

    def read(self, rows: Box, inner: list[tuple[int, int]]) -> np.ndarray:
        """Read a box of the row axes, and `inner` of the columns, as stored. Raises CorruptFile."""
        parts: list[np.ndarray] = []
        for columns in runs(self._of(self.columns), *inner[0]) if inner else [()]:
            wanted = dict(zip((*self.rows, *self.columns), (*rows, *columns), strict=True))
            index = tuple(slice(*wanted[i]) if i in wanted else at for i, at in enumerate(self.form.index))
            values = read_box(self.store, index, str(self))
            left = sorted(wanted)
            values = values.transpose([left.index(i) for i in (*self.rows, *self.columns)])
            n_rows = math.prod(end - first for first, end in rows)
            parts.append(values.reshape(n_rows, -1) if inner else values.reshape(n_rows))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def put_into(target: np.ndarray, values: np.ndarray, form: ArrayForm, parameter: Parameter) -> None:
    """Put the matrix or vector `values` of `parameter` into the array `target`, as `form` says."""
    rows, columns = form.rows_and_columns(parameter)
    axes = (*rows, *columns)
    if form.interleaved:
        values = _neighbours(values, target.shape[rows[-1]])
    values = values.reshape([target.shape[i] for i in axes])
    if form.add != 0 or form.multiply != 1:
        values = ((values.astype(np.float32) - form.add) / form.multiply).astype(target.dtype)
    left = sorted(axes)
    target[form.index] = values.transpose([axes.index(i) for i in left])


def view(
    where: str, store: Any, form: ArrayForm, parameter: Parameter, sizes: Mapping[str, int]
) -> ArrayView:
    """View an open array whose shape fits `form`."""
    rows, columns = form.rows_and_columns(parameter)
    return ArrayView(where, store, form, form.shape(sizes), rows, columns)


def changed(values: Any, multiply: float, add: float) -> Any:
    """A NumPy or JAX array times `multiply`, plus `add`, in its dtype."""
    if multiply == 1 and add == 0:
        return values
    return (values.astype(np.float32) * np.float32(multiply) + np.float32(add)).astype(values.dtype)


def halves(values: Any, size: int) -> Any:
    """Reorder rows of heads of `size` elements: pairs of neighbours become pairs half a head apart."""
    pairs = values.reshape(-1, size // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _neighbours(values: np.ndarray, size: int) -> np.ndarray:
    pairs = values.reshape(-1, 2, size // 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
