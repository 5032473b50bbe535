"""Reads one of our weights from a tensor of all experts, or from two packed ones, and writes such tensors.

families/stored_name.py has the forms of such tensors, families/trainers/array_form.py those of trainers'
arrays. Only a shard's part is read, an expert at a time.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from orca_jax.checkpoint.array_view import ArrayView, changed
from orca_jax.checkpoint.orbax_boxes import runs
from orca_jax.checkpoint.packed_safetensors import nibbles
from orca_jax.checkpoint.safetensors_reader import StoredTensor
from orca_jax.checkpoint.shard_reader import Box, MadeOf, MadeOfOne, Parts, Source, Stored, read_box
from orca_jax.errors import TensorMismatch
from orca_jax.families.mixtures.mxfp4 import BLOCK, GREATEST_SCALE, unpack
from orca_jax.families.packed_form import EXACT_MXFP4
from orca_jax.families.parameters import Parameter
from orca_jax.families.stored_name import StoredName


def expert_shapes(parameter: Parameter, wanted: StoredName) -> list[tuple[int, ...]]:
    """The expected shape of each tensor."""
    number, n_rows, *columns = _sizes(parameter)
    if wanted.mxfp4:
        n_blocks = -(-columns[0] // BLOCK)
        return [(number, n_rows, n_blocks, BLOCK // 2), (number, n_rows, n_blocks)]
    return [(number, *columns, n_rows) if wanted.transpose else (number, n_rows, *columns)]


def source_of_experts(tensors: Sequence[StoredTensor], parameter: Parameter, wanted: StoredName) -> Source:
    """The parts by which a parameter is read, from tensors of the expected shapes. Raises TensorMismatch."""
    number, n_rows, *columns = _sizes(parameter)
    stays_packed = parameter.form == EXACT_MXFP4
    if stays_packed and not wanted.mxfp4:
        raise TensorMismatch(f"{tensors[0]} is not packed in MXFP4, so it cannot stay packed")

    def viewed(stored: Stored, shape: tuple[int, ...]) -> Parts:
        if wanted.transpose or wanted.alternating:
            stored = ExpertView(stored, shape, wanted.transpose, wanted.alternating)
        return Parts((stored,))

    if wanted.mxfp4:
        blocks, scales = tensors
        if columns[0] % BLOCK:
            raise TensorMismatch(
                f"{blocks}: MXFP4 has blocks of {BLOCK} numbers, and {columns[0]} is no multiple of it"
            )
        n = number * n_rows
        blocks = replace(blocks, shape=(n, columns[0] // 2))
        scales = replace(scales, shape=(n, columns[0] // BLOCK))
        if not stays_packed:
            return viewed(PackedMatrix(blocks, scales), parameter.shape)
        planes: dict[str, Stored] = {"codes": BlockCodes(blocks), "scales": BlockScales(scales)}
        arrays = parameter.held_arrays(np.float32)
        return {name: viewed(plane, arrays[name].shape) for name, plane in planes.items()}
    first, *others = expert_shapes(parameter, wanted)[0][1:]
    return viewed(replace(tensors[0], shape=(number * first, *others)), parameter.shape)


def written_experts(values: np.ndarray, wanted: StoredName) -> np.ndarray:
    """Make the checkpoint's tensor of a whole parameter [X, ...]."""
    if wanted.alternating:
        values = values.swapaxes(1, 2)
        values = values.reshape(len(values), -1, *values.shape[3:])
    elif values.ndim == 4:
        values = values.reshape(len(values), -1, values.shape[3])
    return values.swapaxes(1, 2) if wanted.transpose else values


def _sizes(parameter: Parameter) -> tuple[int, ...]:
    """The number of experts, the rows of each, and for matrices its columns."""
    number, *inner = parameter.shape
    columns = inner[-1:] if parameter.use == "expert" else []
    return (number, math.prod(inner[: len(inner) - len(columns)]), *columns)


@dataclass(frozen=True, slots=True)
class PackedMatrix(MadeOf):
    """A matrix in MXFP4, read as bfloat16: `blocks` [rows, columns / 2] and `scales` [rows, columns / 32]."""

    blocks: StoredTensor
    scales: StoredTensor

    @property
    def sources(self) -> tuple[Stored, ...]:
        return self.blocks, self.scales

    @property
    def shape(self) -> tuple[int, ...]:
        return self.blocks.shape[0], 2 * self.blocks.shape[1]

    @property
    def element(self) -> np.dtype:
        return np.dtype(ml_dtypes.bfloat16)

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box`, reading whole blocks. Raises CorruptFile or TensorMismatch."""
        (first, _), (begin, end) = box
        low, high = begin // BLOCK, -(-end // BLOCK)
        half = BLOCK // 2
        for row, blocks in self.blocks.pieces((box[0], (half * low, half * high))):
            rows = (first + row, first + row + len(blocks))
            numbers = unpack(blocks, _scales(self.scales, (rows, (low, high)))).view(self.element)
            yield row, numbers[:, begin - BLOCK * low : end - BLOCK * low]


class BlockCodes(MadeOfOne):
    """The plane `codes`: a block's byte has two neighbours in the file, and two that are 16 apart here."""

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box`, which has whole blocks. Raises CorruptFile."""
        for row, blocks in self.stored.pieces(box):
            codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(len(blocks), -1)
            yield row, nibbles(codes)


class BlockScales(MadeOfOne):
    """The plane `scales`, checked."""

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box` in one piece. Raises CorruptFile or TensorMismatch."""
        yield 0, _scales(self.stored, box)


def _scales(stored: Stored, box: Box) -> np.ndarray:
    scales = read_box(stored, box)
    if scales.size and scales.max() > GREATEST_SCALE:
        most = f"expected at most {GREATEST_SCALE}, or numbers are infinite"
        raise TensorMismatch(f"{stored}: a scale: {most}; found {scales.max()}")
    return scales


@dataclass(frozen=True, slots=True)
class ExpertView(MadeOf):
    """A weight [X, 2, F, H], [X, 2, F] or [X, H, F], read from `stored`, which stacks the experts' rows.

    With `transpose` each expert is stored [in, out], and with `alternating` its outputs are gate, up, gate,
    ..., otherwise those of gate before those of up.
    """

    stored: Stored
    shape: tuple[int, ...]
    transpose: bool
    alternating: bool

    @property
    def sources(self) -> tuple[Stored, ...]:
        return (self.stored,)

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box` by experts: the expert's number within the box, and its part."""
        (first, end), *inner = box
        kinds = inner.pop(0) if self.alternating or len(self.shape) == 4 else None
        rows, *columns = inner
        for x in range(first, end):
            if kinds is None:
                values = self._of_expert(x, rows, columns)
            elif self.alternating:
                values = self._of_expert(x, (2 * rows[0], 2 * rows[1]), columns)
                values = values.reshape(-1, 2, *values.shape[1:]).swapaxes(0, 1)[slice(*kinds)]
            else:
                starts = [kind * self.shape[2] for kind in range(*kinds)]
                values = np.stack([self._of_expert(x, (n + rows[0], n + rows[1]), columns) for n in starts])
            yield x - first, values[None]

    def _of_expert(self, x: int, rows: tuple[int, int], columns: Sequence[tuple[int, int]]) -> np.ndarray:
        """Read some outputs of the expert `x` and their columns, the outputs first."""
        each = self.stored.shape[0] // self.shape[0]  # of the tensor's rows
        (low, high), *others = (*columns, rows) if self.transpose else (rows, *columns)
        values = read_box(self.stored, ((x * each + low, x * each + high), *others))
        return values.T if self.transpose else values


@dataclass(frozen=True, slots=True)
class StackedExperts(MadeOf):
    """A weight [X, 2, F, H], [X, 2, F], [X, H, F] or [X, H], read from a trainer's arrays of all experts.

    `views` has an array for gate and one for up, or a single array; experts are the first row axis of each.
    As for other tensors, the weight's leading axes are merged into rows.
    """

    views: tuple[ArrayView, ...]

    @property
    def sources(self) -> tuple[Stored, ...]:
        return self.views

    @property
    def shape(self) -> tuple[int, ...]:
        n_rows, *columns = self.views[0].shape
        return (len(self.views) * n_rows, *columns)

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box` by experts and arrays. Raises CorruptFile."""
        (first, end), *columns = box
        number, each = (self.views[0].sizes[i] for i in self.views[0].rows)
        row = 0
        for experts, arrays, rows in runs((number, len(self.views), each), first, end):
            for x in range(*experts):
                for view in self.views[slice(*arrays)]:
                    values = view.read(((x, x + 1), rows), columns)
                    yield row, changed(values, view.form.multiply, view.form.add)
                    row += len(values)
