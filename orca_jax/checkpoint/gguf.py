"""Finds our parameters in a GGUF file, and reads their numbers block by block.

families/gguf_models.py says what the tensors are called and how they differ from a Hugging Face checkpoint's;
gguf_planes.py has the types. A weight that stays packed is read plane by plane. Only the rows that are needed
are read, some at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np

from orca_jax.checkpoint.array_view import halves
from orca_jax.checkpoint.gguf_planes import plane, plane_of_block, split, unpacked
from orca_jax.checkpoint.head_view import HeadView, stored_shapes
from orca_jax.checkpoint.safetensors_reader import StoredTensor
from orca_jax.checkpoint.shard_reader import Box, MadeOf, Parts, Plane, Source, Stored, read_box
from orca_jax.errors import TensorMismatch
from orca_jax.families.attention_config import Attention
from orca_jax.families.gguf_models import Architecture, read_architecture
from orca_jax.families.hf_config import read_hf_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.packed_form import Joined
from orca_jax.families.parameters import Parameter, parameter_table
from orca_jax.families.stored_name import StoredName
from orca_jax.families.strict_json import shown
from orca_jax.families.weight_form import Dense, WeightForm
from orca_jax.gguf_file import BLOCKS, GgufFile, GgufTensor, open_gguf

_FLOATS = {
    **{"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)},
}


def find_parameters(
    path: Path, kv_repeats: int = 1, forms: Mapping[str, WeightForm] | None = None
) -> tuple[ModelConfig, dict[str, Source]]:
    """Find the model and the tensors of each parameter; all must be present and fit, and none left over.

    The model has each K/V head `kv_repeats` times, and its weights in `forms`, by default the file's. A
    weight is read plane by plane where it stays in the file's form. Reads no weight. Raises a
    CheckpointError.
    """
    file, hf_config = open_gguf(path), read_hf_config(path)
    family, stored = hf_config.family, hf_config.model.weight_forms
    model = hf_config.model if forms is None else hf_config.model.with_forms(forms)
    held = model.with_kv_heads(kv_repeats)
    tensors = _Tensors(file, read_architecture(file)[0], held.attention)
    found: dict[str, Source] = {}
    for name, parameter in parameter_table(held).items():
        wanted = family.stored_name(name, "", held, file.tensors)
        as_stored = not isinstance(parameter.form, Dense) and parameter.form == stored.get(name)
        found[name] = (tensors.planes if as_stored else tensors.numbers)(parameter, wanted)
    left = [name for name in file.tensors if name not in tensors.used and not family.is_buffer(name, "")]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise TensorMismatch(
            f"{shown(path)}: tensor '{shown(left[0])}'{more}: expected no such tensor in a model of "
            f"{family.title}; a model with this tensor computes something else"
        )
    return held, found


class _Tensors:
    """The tensors of a file as parameters of its model; `used` has the names of those that were asked for."""

    def __init__(self, file: GgufFile, architecture: Architecture, attention: Attention) -> None:
        self._file, self._architecture, self._attention = file, architecture, attention
        self.used: set[str] = set()

    def numbers(self, parameter: Parameter, wanted: StoredName) -> Parts:
        """The parts by which a parameter's numbers are read. Raises TensorMismatch."""
        if parameter.axes == ("NM", "C") and len(wanted.names) > 1:
            return Parts((self._keys_and_values(parameter, wanted),))
        views = self._views(parameter, wanted)
        if self._architecture.shifted and parameter.use == "norm":
            views = [replace(each, add=-1.0) for each in views]
        if wanted.heads is not None:
            return Parts((HeadView.of(views, parameter, wanted, self._attention),))
        return self._stacked(views, parameter, wanted)

    def _keys_and_values(self, parameter: Parameter, wanted: StoredName) -> "KeysAndValues":
        """Latent attention's matrix of two tensors (gguf_models.KEYS_AND_VALUES). Raises TensorMismatch."""
        latent, rank = self._attention.latent, parameter.shape[1]
        assert latent is not None
        n, plain, value = self._attention.n_heads, latent.plain_size, latent.value_size
        keys, values = (
            replace(self._view(name, (n, rows, columns)), shape=(n * rows, columns))
            for name, rows, columns in zip(wanted.names, (rank, value), (plain, rank), strict=True)
        )
        return KeysAndValues(keys, values, n)

    def planes(self, parameter: Parameter, wanted: StoredName) -> dict[str, Plane]:
        """The parts by which each array of a parameter in the file's form is read. Raises TensorMismatch."""
        views, form, n = self._views(parameter, wanted), parameter.form, parameter.shape[0]
        if not isinstance(form, Joined):
            return self._planes_of(form, slice(0, n), views, parameter, wanted)
        first = n - len(form.forms) + 1
        ends = range(first, n + 1)
        found: dict[str, Plane] = {}
        for i, (part, end) in enumerate(zip(form.forms, ends, strict=True)):
            of_part = self._planes_of(part, slice(end - 1 if i else 0, end), views, parameter, wanted)
            found |= {f"{i}.{name}" if name else str(i): plane for name, plane in of_part.items()}
        return found

    def _planes_of(
        self,
        form: WeightForm,
        matrices: slice,
        views: Sequence["GgufArray"],
        parameter: Parameter,
        wanted: StoredName,
    ) -> dict[str, Plane]:
        """The planes of a run of matrices along a parameter's first axis, which have the form `form`."""
        shape = (matrices.stop - matrices.start, *parameter.shape[1:])
        found: dict[str, Plane] = {}
        for name, array in form.arrays(shape, np.float32).items():
            if wanted.heads is not None and not parameter.takes_attention:
                whole = HeadView.of(views, parameter, wanted, self._attention)
                places = whole.places[matrices]
                mine = {place.tensor for heads in places for place in heads}
                # The other tensors have another form, and no head of these matrices.
                arrays = tuple(one.plane(name) if i in mine else one for i, one in enumerate(views))
                only = next(iter(mine))
                arrays = tuple(one if i in mine else arrays[only] for i, one in enumerate(arrays))
                found[name] = Parts((replace(whole, tensors=arrays, shape=array.shape, places=places),))
                continue
            mine = views[matrices] if isinstance(parameter.form, Joined) else views
            found[name] = self._stacked([one.plane(name) for one in mine], parameter, wanted)
        return found

    def _stacked(self, views: Sequence["GgufArray"], parameter: Parameter, wanted: StoredName) -> Parts:
        if wanted.by_expert and len(views) > 1:
            return Parts((ByExpert(tuple(views), parameter.shape[0]),))
        return Parts(tuple(views))

    def _views(self, parameter: Parameter, wanted: StoredName) -> list["GgufArray"]:
        """The tensors of a parameter as matrices or vectors of numbers."""
        if wanted.by_expert:
            number, *inner = parameter.shape
            inner = inner[1:] if len(wanted.names) > 1 else inner
            found = [self._view(name, (number, *inner)) for name in wanted.names]
            return [replace(each, shape=(number * inner[0], *inner[1:])) for each in found]
        shapes = stored_shapes(parameter, wanted, self._attention)
        found = [self._view(name, shape) for name, shape in zip(wanted.names, shapes, strict=True)]
        if self._architecture.paired and wanted.heads == "separate":
            found[:2] = [replace(each, head_size=self._attention.head_size) for each in found[:2]]
        return found

    def _view(self, name: str, shape: tuple[int, ...]) -> "GgufArray":
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
        return GgufArray(tensor, shape)


@dataclass(frozen=True, slots=True)
class GgufArray:
    """The numbers of a tensor, as a vector or a matrix: in its own dtype, or unpacked to float32.

    With `of` it is that plane of a matrix's blocks instead (gguf_planes.py). With a `head_size` rows are
    heads whose halves are stored in pairs (Architecture.paired). `add` is added to each number.
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    head_size: int = 0
    add: float = 0.0
    of: str = ""

    def plane(self, name: str) -> "GgufArray":
        """The plane of this name; the numbers for an empty one, as a dense part of a weight has it."""
        if not name:
            return self
        per_block, _ = plane_of_block(self.tensor.type, name)
        n_rows, n_inputs = self.shape
        return replace(self, of=name, shape=(n_rows, n_inputs // BLOCKS[self.tensor.type][0] * per_block))

    def __str__(self) -> str:
        return f"{shown(self.tensor.path)}: tensor '{shown(self.tensor.name)}'"

    @property
    def element(self) -> np.dtype:
        if self.of:
            return plane_of_block(self.tensor.type, self.of)[1]
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
        per_block = plane_of_block(kind, self.of)[0] if self.of else block
        # A vector is read whole: as one row of blocks.
        rows, (begin, stop) = ((first, end), columns[0]) if columns else ((0, 1), (first, end))
        low, high = begin // per_block, -(-stop // per_block)
        stored = self._bytes("U8", (-1, self.tensor.shape[-1] // block * n_bytes))
        for row, piece in stored.pieces((rows, (low * n_bytes, high * n_bytes))):
            values = plane(kind, self.of, piece) if self.of else unpacked(kind, split(kind, piece))
            values = values[:, begin - low * per_block : stop - low * per_block]
            yield row, values if columns else values[0]

    def _bytes(self, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
        tensor = self.tensor
        return StoredTensor(tensor.path, tensor.name, dtype, shape, tensor.offset, tensor.n_bytes)


@dataclass(frozen=True, slots=True)
class KeysAndValues(MadeOf):
    """Rows of keys and values for each head, of tensors [heads * rank, keys] and [heads * values, rank]."""

    keys: Stored
    values: Stored
    n_heads: int

    @property
    def sources(self) -> tuple[Stored, ...]:
        return self.keys, self.values

    @property
    def _rows(self) -> tuple[int, int]:
        """A head's rows of keys, and of values."""
        return self.keys.shape[1], self.values.shape[0] // self.n_heads

    @property
    def shape(self) -> tuple[int, ...]:
        return self.n_heads * sum(self._rows), self.values.shape[1]

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box`, a head's keys or values at a time. Raises CorruptFile."""
        ((first, end), (low, high)), (n_keys, n_values), rank = box, self._rows, self.shape[1]
        row = first
        while row < end:
            head, within = divmod(row, n_keys + n_values)
            if within < n_keys:
                n = min(end - row, n_keys - within)
                stored = (head * rank + low, head * rank + high), (within, within + n)
                yield row - first, read_box(self.keys, stored).T
            else:
                n = min(end - row, n_keys + n_values - within)
                at = head * n_values + within - n_keys
                yield row - first, read_box(self.values, ((at, at + n), (low, high)))
            row += n


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
