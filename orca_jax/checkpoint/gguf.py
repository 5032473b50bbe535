"""Finds our parameters in a GGUF file, and reads their numbers block by block.

families/gguf_models.py says what the tensors are called and how they differ from a Hugging Face checkpoint's;
gguf_planes.py has the types. Only the rows that are needed are read, some at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np

from orca_jax.checkpoint.array_view import halves
from orca_jax.checkpoint.gguf_planes import split, unpacked
from orca_jax.checkpoint.head_view import HeadView, stored_shapes
from orca_jax.checkpoint.safetensors_reader import StoredTensor
from orca_jax.checkpoint.shard_reader import Box, MadeOf, Parts, Stored, read_box
from orca_jax.errors import TensorMismatch
from orca_jax.families.gguf_models import Architecture, read_architecture
from orca_jax.families.hf_config import read_hf_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import Parameter, parameter_table
from orca_jax.families.stored_name import StoredName
from orca_jax.families.strict_json import shown
from orca_jax.gguf_file import BLOCKS, GgufFile, GgufTensor

_FLOATS = {
    **{"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)},
}


def find_parameters(path: Path, kv_repeats: int = 1) -> tuple[ModelConfig, dict[str, Parts]]:
    """Find the model and the tensors of each parameter; all must be present and fit, and none left over.

    The model has each K/V head `kv_repeats` times. Reads no weight. Raises a CheckpointError.
    """
    file, hf_config = GgufFile(path), read_hf_config(path)
    model, family = hf_config.model.with_kv_heads(kv_repeats), hf_config.family
    tensors = _Tensors(file, read_architecture(file)[0], model)
    parts = {
        name: tensors.parts(parameter, family.stored_name(name, "", model, file.tensors))
        for name, parameter in parameter_table(model).items()
    }
    left = [name for name in file.tensors if name not in tensors.used and not family.is_buffer(name, "")]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise TensorMismatch(
            f"{shown(path)}: tensor '{shown(left[0])}'{more}: expected no such tensor in a model of "
            f"{family.title}; a model with this tensor computes something else"
        )
    return hf_config.model, parts


class _Tensors:
    """The tensors of a file as parameters of its model; `used` has the names of those that were asked for."""

    def __init__(self, file: GgufFile, architecture: Architecture, model: ModelConfig) -> None:
        self._file, self._architecture, self._model = file, architecture, model
        self.used: set[str] = set()

    def parts(self, parameter: Parameter, wanted: StoredName) -> Parts:
        """How a parameter is read. Raises TensorMismatch."""
        attention = self._model.attention
        if wanted.by_expert:
            return self._of_experts(parameter, wanted)
        shapes = stored_shapes(parameter, wanted, attention)
        found = [self._view(name, shape) for name, shape in zip(wanted.names, shapes, strict=True)]
        if self._architecture.paired and wanted.heads == "separate":
            found[:2] = [replace(each, head_size=attention.head_size) for each in found[:2]]
        if self._architecture.shifted and parameter.use == "norm":
            found = [replace(each, add=-1.0) for each in found]
        if wanted.heads is None:
            return Parts(tuple(found))
        return Parts((HeadView.of(found, parameter, wanted, attention),))

    def _of_experts(self, parameter: Parameter, wanted: StoredName) -> Parts:
        """One tensor [X, ...], or for gate and up two of them."""
        number, *inner = parameter.shape
        if len(wanted.names) == 2:
            inner = inner[1:]
        found = [self._view(name, (number, *inner)) for name in wanted.names]
        stacked = [replace(each, shape=_merged(each.shape, parameter)) for each in found]
        return Parts((stacked[0] if len(stacked) == 1 else ByExpert(tuple(stacked), number),))

    def _view(self, name: str, shape: tuple[int, ...]) -> "GgufNumbers":
        tensor = self._file.tensors.get(name)
        where = f"{shown(self._file.path)}: tensor '{shown(name)}'"
        if tensor is None:
            raise TensorMismatch(f"{where} is missing: expected {list(shape)} according to the metadata")
        own = tensor.shape
        while len(own) > len(shape) and own[0] == 1:
            own = own[1:]
        if own != shape:
            raise TensorMismatch(
                f"{where}: expected shape {list(shape)} according to the metadata, found {list(tensor.shape)}"
            )
        self.used.add(name)
        return GgufNumbers(tensor, shape)


def _merged(shape: tuple[int, ...], parameter: Parameter) -> tuple[int, ...]:
    """The shape with its experts merged into the rows of matrices, or the elements of vectors."""
    first, second, *columns = shape
    assert len(columns) == (parameter.use == "expert"), parameter
    return (first * second, *columns)


@dataclass(frozen=True, slots=True)
class GgufNumbers:
    """The numbers of a tensor, as a vector or a matrix: in its own dtype, or unpacked to float32.

    With a `head_size` its rows are heads whose halves are stored in pairs (Architecture.paired). `add` is
    added to each number.
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    head_size: int = 0
    add: float = 0.0

    def __str__(self) -> str:
        return f"{shown(self.tensor.path)}: tensor '{shown(self.tensor.name)}'"

    @property
    def element(self) -> np.dtype:
        return _FLOATS.get(self.tensor.type, np.dtype(np.float32))

    @property
    def divisible(self) -> bool:
        return True

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box`, some rows at a time, reading whole blocks. Raises CorruptFile."""
        (first, end), *columns = box
        low, high = first, end
        if self.head_size:
            low, high = first - first % self.head_size, -(-end // self.head_size) * self.head_size
            values = np.concatenate([piece for _, piece in self._stored(low, high, columns)])
            yield 0, halves(values, self.head_size)[first - low : end - low]
            return
        for row, piece in self._stored(low, high, columns):
            yield row, (piece + np.float32(self.add)).astype(self.element) if self.add else piece

    def _stored(
        self, first: int, end: int, columns: list[tuple[int, int]]
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield rows in the file's order: the row within the box, and the piece."""
        kind = self.tensor.type
        if kind in _FLOATS:
            yield from self._bytes(kind, self.shape).pieces(((first, end), *columns))
            return
        block, n_bytes = BLOCKS[kind]
        # A vector is read whole: as one row of blocks.
        n_columns = self.shape[-1]
        rows, (begin, stop) = ((first, end), columns[0]) if columns else ((0, 1), (first, end))
        begin_block, stop_block = begin // block, -(-stop // block)
        stored = self._bytes("U8", (-1, n_columns // block * n_bytes))
        for row, piece in stored.pieces((rows, (begin_block * n_bytes, stop_block * n_bytes))):
            numbers = unpacked(kind, split(kind, piece))
            numbers = numbers[:, begin - begin_block * block : stop - begin_block * block]
            yield row, numbers if columns else numbers[0]

    def _bytes(self, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
        tensor = self.tensor
        return StoredTensor(tensor.path, tensor.name, dtype, shape, tensor.offset, tensor.n_bytes)


@dataclass(frozen=True, slots=True)
class ByExpert(MadeOf):
    """Rows [X, parts, rows] of a weight, of several tensors [X, rows] each; vectors likewise."""

    tensors: tuple[Stored, ...]
    number: int

    @property
    def sources(self) -> tuple[Stored, ...]:
        return self.tensors

    @property
    def shape(self) -> tuple[int, ...]:
        n_rows, *columns = self.tensors[0].shape
        return (len(self.tensors) * n_rows, *columns)

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box` by experts and tensors. Raises CorruptFile."""
        (first, end), *columns = box
        each = self.tensors[0].shape[0] // self.number
        row = first
        while row < end:
            part, within = divmod(row, each)
            n = min(end - row, each - within)
            expert, which = divmod(part, len(self.tensors))
            begin = expert * each + within
            yield row - first, read_box(self.tensors[which], ((begin, begin + n), *columns))
            row += n
