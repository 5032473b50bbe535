"""Reads quantized matrices of safetensors plane by plane, in the order of families/packed_form.py.

A checkpoint's linear layer has its codes in bytes or in 32-bit words, scales, perhaps zeros, and with GPTQ's
act-order the group of each input; families/quantization_config.py says how. A `PackedMatrix` checks names,
shapes and dtypes of these tensors, and gives each plane as a `Stored`, of which any shard's part is read
alone. Where a matrix is not held packed, `dense` gives its numbers instead.

Words have their first code in their lowest bits, but for AWQ's, whose order is 0, 2, 4, 6, 1, 3, 5, 7.
Codes along a row (compressed-tensors) are signed, with 8 or 128 added; GPTQ's and AWQ's are not, and their
matrices are stored [in, out].
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from orca_jax.checkpoint.head_view import HeadView
from orca_jax.checkpoint.safetensors_reader import FLOAT_DTYPES, FP8, INT8, WORDS, StoredTensor
from orca_jax.checkpoint.shard_reader import Box, MadeOf, MadeOfOne, Parts, Stored, read_box
from orca_jax.errors import TensorMismatch
from orca_jax.families.attention_config import Attention
from orca_jax.families.packed_form import Joined, PackedForm, Scale
from orca_jax.families.parameters import Parameter
from orca_jax.families.quantization_config import StoredMatrix, form_of_weight
from orca_jax.families.stored_name import StoredName, head_places, size_of_heads
from orca_jax.families.strict_json import shown
from orca_jax.families.weight_form import DENSE, WeightForm

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_STEP = 512  # rows that are unpacked at a time


def unpack_words(words: np.ndarray, bits: int, axis: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """Codes of `bits` in int32 words [a, b], uint8 [a n, b] or [a, b n]: those of a word along `axis`.

    The i-th bits from the lowest are code order[i] of a word, by default code i.
    """
    codes = np.ascontiguousarray(words, "<i4").view(np.uint8).reshape(*words.shape, 4)
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*words.shape, 8)
    if order:
        codes = codes[..., np.argsort(order)]
    if axis == 1:
        return codes.reshape(len(words), -1)
    return codes.swapaxes(1, 2).reshape(-1, words.shape[1])


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes of four bits [rows, n], in a plane's order [rows, n / 2]."""
    runs = codes.reshape(len(codes), -1, 2, 16)
    return (runs[:, :, 0] | runs[:, :, 1] << 4).reshape(len(codes), -1)


@dataclass(frozen=True, slots=True)
class _Words(MadeOf):
    """The codes in a matrix of words, packed along its `axis`: uint8 [shape], transposed if so stored.

    The words may have room for more codes than the shape has. `add` is added to each word as a whole, which
    is how GPTQ's second version was made of its first.
    """

    words: StoredTensor
    bits: int
    axis: int
    shape: tuple[int, int]
    transpose: bool = False
    order: tuple[int, ...] = ()
    add: int = 0
    _kept: dict[tuple[int, int], np.ndarray] = field(
        default_factory=dict[tuple[int, int], np.ndarray], compare=False, repr=False
    )

    @property
    def sources(self) -> tuple[Stored, ...]:
        return (self.words,)

    @property
    def element(self) -> np.dtype:
        return np.dtype(np.uint8)

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box`, some rows at a time. Raises CorruptFile."""
        (first, end), columns = box
        if self.transpose:
            # A few rows are a few bytes of each row of the file: all are read once, and kept up to the last.
            if columns not in self._kept:
                self._kept.clear()
                self._kept[columns] = self._read((0, self.shape[0]), columns)
            yield 0, self._kept[columns][first:end]
            if end == self.shape[0]:
                self._kept.clear()
            return
        for row in range(first, end, _STEP):
            yield row - first, self._read((row, min(row + _STEP, end)), columns)

    def _read(self, rows: tuple[int, int], columns: tuple[int, int]) -> np.ndarray:
        n = 32 // self.bits
        part = [columns, rows] if self.transpose else [rows, columns]
        low, high = part[self.axis]
        part[self.axis] = low // n, -(-high // n)
        words = read_box(self.words, tuple(part))
        if self.add:
            words = (words.view(np.uint32) + np.uint32(self.add)).view(np.int32)
        codes = unpack_words(words, self.bits, self.axis, self.order)
        begin = low - low // n * n
        codes = codes[begin : begin + high - low] if self.axis == 0 else codes[:, begin : begin + high - low]
        return codes.T if self.transpose else codes


@dataclass(frozen=True, slots=True)
class _Changed:
    """A matrix whose numbers are changed one by one, to the dtype `element`."""

    stored: Stored
    element: np.dtype
    change: Callable[[np.ndarray], np.ndarray]

    def __str__(self) -> str:
        return str(self.stored)

    @property
    def divisible(self) -> bool:
        return self.stored.divisible

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box`, some rows at a time. Raises CorruptFile or TensorMismatch."""
        for row, piece in self.stored.pieces(box):
            yield row, self.change(piece)


@dataclass(frozen=True, slots=True)
class _Nibbles(MadeOfOne):
    """Codes of four bits [rows, n] as a plane [rows, n / 2]."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[0], self.stored.shape[1] // 2

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box`, which begins and ends at whole runs of 32 inputs."""
        rows, (low, high) = box
        assert low % 16 == high % 16 == 0, box
        for row, codes in self.stored.pieces((rows, (2 * low, 2 * high))):
            yield row, nibbles(codes)


@dataclass(frozen=True, slots=True)
class _Groups:
    """The group of each input by GPTQ's g_idx [in]: inputs sorted by group, or checked to be in order."""

    g_idx: StoredTensor
    group: int
    _order: list[np.ndarray] = field(default_factory=list[np.ndarray], compare=False, repr=False)

    @property
    def order(self) -> np.ndarray:
        """The stored place of each sorted input, int32 [in]. Raises CorruptFile or TensorMismatch."""
        if not self._order:
            groups = read_box(self.g_idx, ((0, self.g_idx.shape[0]),))
            order = np.argsort(groups, kind="stable").astype(np.int32)
            if not np.array_equal(groups[order], np.arange(len(groups)) // self.group):
                raise TensorMismatch(
                    f"{self.g_idx}: expected {self.group} inputs in each group, found another number"
                )
            self._order.append(order)
        return self._order[0]

    @property
    def in_order(self) -> bool:
        """Whether inputs are sorted as they are stored."""
        return bool(np.array_equal(self.order, np.arange(len(self.order))))


@dataclass(frozen=True, slots=True)
class _Sorted(MadeOfOne):
    """A matrix with its columns sorted by group, or with `ordered` False checked to be so."""

    groups: _Groups
    ordered: bool

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box`. Raises CorruptFile or TensorMismatch."""
        if self.groups.in_order:
            yield from self.stored.pieces(box)
            return
        if not self.ordered:
            raise TensorMismatch(
                f"{self.groups.g_idx} sorts its inputs in another order, but the config says desc_act false"
            )
        rows, (low, high) = box
        for row, piece in self.stored.pieces((rows, (0, self.shape[1]))):
            yield row, piece[:, self.groups.order[low:high]]


@dataclass(frozen=True, slots=True)
class _Order(MadeOf):
    """The stored place of each sorted input, int32 [in]; the same for each of `every`."""

    every: tuple[_Groups, ...]

    @property
    def sources(self) -> tuple[Stored, ...]:
        return tuple(each.g_idx for each in self.every)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.every[0].g_idx.shape

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box`. Raises CorruptFile or TensorMismatch."""
        first, *others = self.every
        for other in others:
            if not np.array_equal(other.order, first.order):
                raise TensorMismatch(
                    f"{other.g_idx} differs from {first.g_idx}; matrices of one product that order their "
                    "inputs differently are not supported"
                )
        yield 0, first.order[slice(*box[0])]


@dataclass(frozen=True, slots=True)
class _Scales(MadeOfOne):
    """Scales or zeros [out, groups], each stored one for `rows` outputs, None: for all."""

    n_out: int
    rows: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.n_out, self.stored.shape[1]

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box` in one piece."""
        (first, end), columns = box
        rows = self.rows or self.n_out
        low = first // rows
        found = read_box(self.stored, ((low, -(-end // rows)), columns))
        yield 0, found[np.arange(first, end) // rows - low]


@dataclass(frozen=True, slots=True)
class _Transposed(MadeOfOne):
    """A stored matrix [in, out] as [out, in]."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[::-1]

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box` in one piece."""
        yield 0, read_box(self.stored, box[::-1]).T


@dataclass(frozen=True, slots=True)
class _WithZeros(MadeOfOne):
    """Scales whose zeros are all the one that a symmetric matrix has, which is checked as they are read."""

    zeros: Stored
    zero: int

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box`. Raises CorruptFile or TensorMismatch."""
        found = read_box(self.zeros, box)
        if not (found == self.zero).all():
            raise TensorMismatch(
                f"{self.zeros}: expected zeros of {self.zero}, because the config says that it is symmetric; "
                f"found {found[found != self.zero].flat[0]}"
            )
        yield from self.stored.pieces(box)


@dataclass(frozen=True, slots=True)
class _Numbers(MadeOfOne):
    """The numbers of a quantized matrix, float32 [out, in]."""

    scales: Stored
    zeros: Stored | None
    zero: int
    group: int
    groups: _Groups | None

    @property
    def element(self) -> np.dtype:
        return np.dtype(np.float32)

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box`, some rows at a time. Raises CorruptFile or TensorMismatch."""
        (first, _), (low, high) = box
        of_input = np.arange(self.shape[1]) // self.group
        if self.groups is not None:
            of_input[self.groups.order] = np.arange(self.shape[1]) // self.group
        of_input = of_input[low:high]
        every = (0, self.scales.shape[1])
        for row, codes in self.stored.pieces(box):
            rows = (first + row, first + row + len(codes))
            numbers = codes.astype(np.float32)
            if self.zeros is not None:
                numbers -= read_box(self.zeros, (rows, every)).astype(np.float32)[:, of_input]
            elif self.zero:
                numbers -= np.float32(self.zero)
            scales = read_box(self.scales, (rows, every)).astype(np.float32)
            yield row, numbers * scales[:, of_input]


@dataclass(frozen=True, slots=True)
class _Flat(MadeOfOne):
    """A matrix of one column as a vector."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[:1]

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box`."""
        for row, piece in self.stored.pieces((*box, (0, 1))):
            yield row, piece[:, 0]


# How a plane's elements follow from stored ones: their dtype and the change.
_Change = tuple[np.dtype, Callable[[np.ndarray], np.ndarray]]
_AS_INT8: _Change = np.dtype(np.int8), lambda codes: codes.view(np.int8)
_LESS_128: _Change = np.dtype(np.int8), lambda codes: (codes ^ np.uint8(128)).view(np.int8)
_AS_FLOAT: _Change = np.dtype(np.float32), lambda scales: scales.astype(np.float32)
_BITS: _Change = np.dtype(np.uint8), lambda codes: codes.view(np.uint8)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The tensors of one quantized matrix [out, in], checked against how the config says it is stored."""

    how: StoredMatrix
    shape: tuple[int, int]
    tensors: Mapping[str, StoredTensor]  # by the last part of their names, the scales as "scales"
    form: WeightForm  # in which devices may hold it

    @classmethod
    def find(
        cls,
        module: str,
        how: StoredMatrix,
        shape: tuple[int, int],
        stored: Mapping[str, StoredTensor],
        scales: Scale,
    ) -> "PackedMatrix":
        """Find the tensors of a module. Raises TensorMismatch, which names what is missing or different."""
        expected = _expected(how, shape)
        names = [name for name in how.scale_names if f"{module}.{name}" in stored]
        scale_name = names[0] if names else how.scale_names[0]
        found: dict[str, StoredTensor] = {}
        for leaf, (dtypes, shapes) in expected.items():
            name = f"{module}.{scale_name if leaf == 'scales' else leaf}"
            tensor = stored.get(name)
            if tensor is None:
                if leaf == "g_idx" and not how.ordered:
                    continue
                raise TensorMismatch(
                    f"tensor '{shown(name)}' is missing: the layer is quantized according to "
                    f"quantization_config, so expected {' or '.join(dtypes)} {list(shapes[0])}, found none"
                )
            if tensor.dtype not in dtypes or tensor.shape not in shapes:
                raise TensorMismatch(
                    f"{tensor}: expected {' or '.join(dtypes)} {list(shapes[0])} according to "
                    f"quantization_config, found {tensor.dtype} {shown(list(tensor.shape))}"
                )
            found[leaf] = tensor
        matrix = cls(how, shape, found, how.form(shape[1], scales))
        matrix._check_shape(stored.get(f"{module}.weight_shape"))
        return matrix

    def _check_shape(self, tensor: StoredTensor | None) -> None:
        """Check the shape that compressed-tensors stores beside words."""
        if self.how.layout != "words":
            return
        if tensor is None or (tensor.dtype, tensor.shape) != ("I64", (2,)):
            raise TensorMismatch(f"{self}: expected weight_shape, I64 [2], beside it")
        found = read_box(tensor, ((0, 2),)).tolist()
        if tuple(found) != self.shape:
            raise TensorMismatch(f"{tensor}: expected {list(self.shape)}, found {shown(found)}")

    def __str__(self) -> str:
        return str(next(iter(self.tensors.values())))

    @property
    def names(self) -> set[str]:
        """The names of all of its tensors."""
        names = {tensor.name for tensor in self.tensors.values()}
        return names | {f"{name.rpartition('.')[0]}.weight_shape" for name in names}

    @property
    def n_groups(self) -> int:
        return 1 if self.how.group is None else -(-self.shape[1] // self.how.group)

    @property
    def groups(self) -> _Groups | None:
        """The groups by g_idx, where it is stored."""
        g_idx = self.tensors.get("g_idx") or self.tensors.get("weight_g_idx")
        return None if g_idx is None else _Groups(g_idx, self.how.group or self.shape[1])

    @property
    def zero(self) -> int:
        """The code that means 0 where the matrix is symmetric."""
        return 0 if self.how.layout in ("int8", "fp8") else 1 << self.how.bits - 1

    @property
    def codes(self) -> Stored:
        """The codes as stored: uint8, int8 or float8_e4m3fn [out, in]."""
        bits, (n_out, n_in) = self.how.bits, self.shape
        match self.how.layout:
            case "words":
                return _Words(self.tensors["weight_packed"], bits, 1, (n_out, n_in))
            case "gptq":
                return _Words(self.tensors["qweight"], bits, 0, (n_out, n_in), transpose=True)
            case "awq":
                words = self.tensors["qweight"]
                return _Words(words, bits, 1, (n_out, n_in), transpose=True, order=_AWQ_ORDER)
            case "int8" | "fp8":
                return self.tensors["weight"]

    @property
    def zeros(self) -> Stored | None:
        """The codes that mean 0, as stored, [out, groups]; None without a tensor of them."""
        bits, shape = self.how.bits, (self.shape[0], self.n_groups)
        match self.how.layout:
            case "words" if self.how.zeros:
                return _Words(self.tensors["weight_zero_point"], bits, 0, shape)
            case "gptq":
                ones = sum(1 << bits * i for i in range(32 // bits)) if self.how.less_one else 0
                return _Words(self.tensors["qzeros"], bits, 1, shape, transpose=True, add=ones)
            case "awq":
                return _Words(self.tensors["qzeros"], bits, 1, shape, transpose=True, order=_AWQ_ORDER)
            case "int8" if self.how.zeros:
                return _Scales(self._rows("weight_zero_point"), self.shape[0], self.how.rows)
            case _:
                return None

    def _rows(self, leaf: str) -> StoredTensor:
        """A tensor of scales or zeros as a matrix [rows, groups]."""
        tensor = self.tensors[leaf]
        return replace(tensor, shape=(_n_rows(self.how, self.shape[0]), self.n_groups))

    @property
    def scales(self) -> Stored:
        """The scales as stored, [out, groups], with the zeros of a symmetric matrix checked."""
        if self.how.layout not in ("gptq", "awq"):
            return _Scales(self._rows("scales"), self.shape[0], self.how.rows)
        scales, zeros = _Transposed(self.tensors["scales"]), self.zeros
        if self.how.zeros or zeros is None:
            return scales
        return _WithZeros(scales, zeros, self.zero)

    def dense(self) -> Stored:
        """The matrix's numbers, float32 [out, in], in the stored order of inputs."""
        zeros = self.zeros if self.how.zeros else None
        group = self.how.group or self.shape[1]
        return _Numbers(self.codes, self.scales, zeros, self.zero, group, self.groups)

    def plane(self, name: str, form: PackedForm) -> Stored:
        """One plane of the matrix, but `order`, in a form of its kind."""
        if name == "codes":
            return self._codes_plane()
        if name == "input_scales":
            one = replace(self.tensors["input_scale"], shape=(1, 1))
            plane = _Changed(_Scales(one, self.shape[0], None), *_AS_FLOAT)
            return _Flat(plane)
        if name == "scales":
            plane = _Changed(self.scales, *_scale_dtype(form, self))
        else:
            assert name == "zeros", name
            plane = self._zeros_plane()
        return _Flat(plane) if form.block is None else plane

    def _zeros_plane(self) -> Stored:
        zeros = self.zeros
        assert zeros is not None, self
        if self.how.layout == "int8":
            return zeros
        return _Changed(zeros, *(_AS_INT8 if self.how.bits == 4 else _LESS_128))

    def _codes_plane(self) -> Stored:
        codes, groups = self.codes, self.groups
        if groups is not None:
            codes = _Sorted(codes, groups, self.how.ordered)
        match self.how.layout:
            case "fp8":
                return _Changed(codes, *_BITS)
            case "int8":
                return codes
            case _:
                return _Nibbles(codes) if self.how.bits == 4 else _Changed(codes, *_LESS_128)


def _scale_dtype(form: PackedForm, matrix: PackedMatrix) -> _Change:
    """The dtype of a plane of scales, and how stored ones become it: exactly, or with a TensorMismatch."""
    bfloat = form.scale == "bfloat16"
    target = np.dtype(ml_dtypes.bfloat16 if bfloat else form.scale)

    def change(scales: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", under="ignore"):
            found = scales.astype(target)
        if not np.array_equal(found.astype(np.float64), scales.astype(np.float64)):
            raise TensorMismatch(f"{matrix}: its scales are not numbers of {target.name}, as expected here")
        return found.view(np.uint16) if bfloat else found

    return np.dtype(np.uint16) if bfloat else target, change


def _n_rows(how: StoredMatrix, n_out: int) -> int:
    """Rows of stored scales."""
    return 1 if how.rows is None else -(-n_out // how.rows)


def _expected(
    how: StoredMatrix, shape: tuple[int, int]
) -> dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]]:
    """The dtypes and the shapes, the usual one first, that each tensor of a matrix may have."""
    n_out, n_in = shape
    n = 32 // how.bits
    n_groups = 1 if how.group is None else -(-n_in // how.group)
    floats, words = tuple(name for name in FLOAT_DTYPES if name != "F64"), (WORDS,)
    n_rows = _n_rows(how, n_out)
    by_rows: tuple[tuple[int, ...], ...] = ((n_rows, n_groups),)
    if how.group is None:
        by_rows = (*by_rows, (n_rows,), *([()] if n_rows == 1 else []))
    expected: dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]] = {}
    match how.layout:
        case "words":
            expected["weight_packed"] = words, ((n_out, -(-n_in // n)),)
            expected["scales"] = floats, by_rows
            if how.zeros:
                expected["weight_zero_point"] = words, ((-(-n_out // n), n_groups),)
            if how.ordered:
                expected["weight_g_idx"] = words, ((n_in,),)
        case "int8" | "fp8":
            expected["weight"] = (FP8 if how.layout == "fp8" else INT8,), (shape,)
            expected["scales"] = floats, by_rows
            if how.zeros:
                expected["weight_zero_point"] = (INT8,), by_rows
            if how.ordered:
                expected["weight_g_idx"] = words, ((n_in,),)
        case "gptq":
            expected["qweight"] = words, ((-(-n_in // n), n_out),)
            expected["qzeros"] = words, ((n_groups, -(-n_out // n)),)
            expected["scales"] = floats, ((n_groups, n_out),)
            expected["g_idx"] = words, ((n_in,),)
        case "awq":
            expected["qweight"] = words, ((n_in, -(-n_out // n)),)
            expected["qzeros"] = words, ((n_groups, -(-n_out // n)),)
            expected["scales"] = floats, ((n_groups, n_out),)
    if how.inputs == "fp8 static":
        expected["input_scale"] = floats, ((1,), ())
    return expected


def stored_form(tensors: Sequence[PackedMatrix | StoredTensor], parameter: Parameter) -> WeightForm:
    """The form of a weight that is stored as these tensors."""
    forms = [tensor.form if isinstance(tensor, PackedMatrix) else DENSE for tensor in tensors]
    return form_of_weight(forms, parameter)


def planes(
    tensors: Sequence[PackedMatrix | StoredTensor],
    parameter: Parameter,
    wanted: StoredName,
    attention: Attention,
) -> Mapping[str, Parts]:
    """The parts of each plane of a weight whose form is that of the tensors. Raises TensorMismatch."""
    form = parameter.form
    forms = form.forms if isinstance(form, Joined) else (form,)
    n_first = parameter.shape[0] - len(forms) + 1
    places = (
        None if wanted.heads is None or parameter.takes_attention else head_places(wanted.heads, attention)
    )
    found: dict[str, Parts] = {}
    for i, one in enumerate(forms):
        # The matrices of the weight's first axis that have this form, and the tensors that have them.
        low, high = (0, n_first) if i == 0 else (n_first + i - 1, n_first + i)
        if places is not None:
            numbers = sorted({place.tensor for heads in places[low:high] for place in heads})
        else:
            numbers = [*(range(low, high) if len(forms) > 1 else range(len(tensors)))]
        shape = (high - low, *parameter.shape[1:]) if len(forms) > 1 else parameter.shape
        for plane, array in one.arrays(shape, np.float32).items():
            views = _views([tensors[number] for number in numbers], plane, one)
            if places is not None and plane != "order":
                slices = tuple(
                    tuple(replace(place, tensor=numbers.index(place.tensor)) for place in heads)
                    for heads in places[low:high]
                )
                size = size_of_heads(parameter, attention)
                views = [HeadView(tuple(views), array.shape, slices, size, False, False)]
            name = f"{i}.{plane}" if plane else str(i)
            found[name if len(forms) > 1 else plane] = Parts(tuple(views))
    return found


def _views(tensors: Sequence[PackedMatrix | StoredTensor], plane: str, form: WeightForm) -> list[Stored]:
    """A plane of each of the tensors, or of all of them."""
    if plane == "order":
        groups = [tensor.groups for tensor in tensors if isinstance(tensor, PackedMatrix)]
        return [_Order(tuple(each for each in groups if each is not None))]
    if not isinstance(form, PackedForm):
        return [tensor.dense() if isinstance(tensor, PackedMatrix) else tensor for tensor in tensors]
    matrices = [tensor for tensor in tensors if isinstance(tensor, PackedMatrix)]
    if plane == "input_scales":
        _check_same([matrix.tensors["input_scale"] for matrix in matrices])
    return [matrix.plane(plane, form) for matrix in matrices]


def _check_same(scales: Sequence[StoredTensor]) -> None:
    """Check that the inputs of one product have one scale."""
    first, *others = ((one, float(read_box(replace(one, shape=(1,)), ((0, 1),))[0])) for one in scales)
    for one, scale in others:
        if scale != first[1]:
            raise TensorMismatch(
                f"{one} is {scale}, but {first[0]} is {first[1]}; matrices of one product that round "
                "their inputs differently are not supported"
            )
