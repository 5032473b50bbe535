"""Reads and writes weights head by head, between a checkpoint's order of heads and ours.

families/stored_name.py says which head is where. Only a shard's heads are read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from orca_jax.checkpoint.shard_reader import Box, MadeOf, Stored, read_box
from orca_jax.families.attention_config import Attention
from orca_jax.families.parameters import FLAT_HEADS, Parameter
from orca_jax.families.stored_name import (
    HeadPlace,
    StoredName,
    flat_places,
    head_places,
    heads_of_tensors,
    size_of_heads,
)


def stored_shapes(parameter: Parameter, wanted: StoredName, attention: Attention) -> list[tuple[int, ...]]:
    """The expected shape of each tensor of a weight, as a vector or a matrix."""
    n_rows, *columns = parameter.stacked_shape
    if wanted.heads is None:
        # Without the order, grouped heads would be mixed up silently.
        has_heads = any("K" in axis for axis in parameter.axes)
        assert not has_heads or attention.group == attention.kv_repeats == 1, wanted
        shapes: list[tuple[int, ...]] = [(n_rows // len(wanted.names), *columns)] * len(wanted.names)
        for i in range(len(shapes) - wanted.n_scalars, len(shapes)):
            shapes[i] = ()
    else:
        size = size_of_heads(parameter, attention)
        widths = [n * size for n in heads_of_tensors(wanted.heads, attention)]
        shapes = [(n_rows, n) if parameter.takes_attention else (n, *columns) for n in widths]
    return [shape[::-1] for shape in shapes] if wanted.transpose and not wanted.forms else shapes


def shape_in_file(shape: tuple[int, ...], wanted: StoredName) -> tuple[int, ...]:
    """The shape of a tensor in Hugging Face's files, read as the vector or matrix `shape`."""
    if wanted.one_row:
        return 1, *shape
    return (shape[0], 1, *shape[1:]) if wanted.depthwise else shape


@dataclass(frozen=True, slots=True)
class HeadView(MadeOf):
    """A weight [slices, K D], [slices, K D, H] or [H, slices, K D], read from stored heads.

    `places` has the stored place of each slice's heads. With `in_columns` heads are columns of the weight,
    and with `transpose` tensors are stored [in, out]. A weight of one slice may lack the axis of slices.
    """

    tensors: tuple[Stored, ...]
    shape: tuple[int, ...]
    places: tuple[tuple[HeadPlace, ...], ...]
    head_size: int
    in_columns: bool
    transpose: bool
    _whole: dict[tuple[int, Box], np.ndarray] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls, tensors: Sequence[Stored], parameter: Parameter, wanted: StoredName, attention: Attention
    ) -> "HeadView":
        """View these tensors as `parameter`."""
        assert wanted.heads is not None
        places = tuple(tuple(heads) for heads in head_places(wanted.heads, attention))
        if parameter.axes[-1] == FLAT_HEADS:
            places = (flat_places(wanted.heads, attention),)
        in_columns = parameter.takes_attention
        size = size_of_heads(parameter, attention)
        return cls(tuple(tensors), parameter.shape, places, size, in_columns, wanted.transpose)

    @property
    def sources(self) -> tuple[Stored, ...]:
        return self.tensors

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the part `box`: the row within the box, and the piece. Raises CorruptFile."""
        self._whole.clear()
        yield from self._pieces(box)
        self._whole.clear()

    def _pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        if self.in_columns:
            yield 0, self._columns(box)
        elif len(self.shape) == 1:  # one slice of a vector
            yield 0, self._slice(0, box[0], ())
        else:
            (first, end), heads, *others = box
            for slice_ in range(first, end):
                yield slice_ - first, self._slice(slice_, heads, tuple(others))[None]

    def _slice(self, slice_: int, heads: tuple[int, int], others: Box) -> np.ndarray:
        """Read the elements `heads` of one slice, by `others`."""
        out = np.empty([end - first for first, end in (heads, *others)], self.element)
        for tensor, stored, at in self._runs(slice_, *heads):
            out[at - heads[0] : at - heads[0] + stored[1] - stored[0]] = self._read(tensor, stored, others)
        return out

    def _columns(self, box: Box) -> np.ndarray:
        rows, heads = box[0], box[-1]
        slices = range(*box[1]) if len(box) == 3 else range(1)
        parts = [self._slice(slice_, heads, (rows,)).T for slice_ in slices]
        return np.stack(parts, axis=1) if len(box) == 3 else parts[0]

    def _runs(self, slice_: int, first: int, end: int) -> Iterator[tuple[int, tuple[int, int], int]]:
        """Yield elements `first` to `end` of a slice as runs: a tensor, a run in it, and where it goes.

        Heads that are neighbours in the tensor too make one run.
        """
        size, at = self.head_size, first
        while at < end:
            k = at // size
            place = self.places[slice_][k]
            stop = k + 1
            while stop * size < end and self.places[slice_][stop] == HeadPlace(
                place.tensor, place.head + stop - k
            ):
                stop += 1
            n = min(stop * size, end) - at
            start = place.head * size + at % size
            yield place.tensor, (start, start + n), at
            at += n

    def _read(self, tensor: int, stored: tuple[int, int], others: Box) -> np.ndarray:
        """Read the elements `stored` of a tensor's axis of heads, by `others` of its other axis.

        A tensor with a single chunk is read once, not head by head.
        """
        if not self.tensors[tensor].divisible:
            if (tensor, others) not in self._whole:
                heads_last = bool(others) and self.transpose != self.in_columns
                all_heads = (0, self.tensors[tensor].shape[-1 if heads_last else 0])
                self._whole[tensor, others] = self._read_now(tensor, all_heads, others)
            return self._whole[tensor, others][stored[0] : stored[1]]
        return self._read_now(tensor, stored, others)

    def _read_now(self, tensor: int, stored: tuple[int, int], others: Box) -> np.ndarray:
        heads_last = bool(others) and self.transpose != self.in_columns
        box = (*others, stored) if heads_last else (stored, *others)
        out = read_box(self.tensors[tensor], box)
        return out.T if heads_last else out


def written_tensor(
    values: np.ndarray, first_slice: int, places: Sequence[Sequence[HeadPlace]], tensor: int, n_heads: int
) -> np.ndarray:
    """Make a checkpoint's tensor [n_heads D, ...] of slices [n, K D, ...] of our weight."""
    head_size = values.shape[1] // len(places[0])
    out = np.empty((n_heads * head_size, *values.shape[2:]), values.dtype)
    for slice_, heads in enumerate(places):
        for k, place in enumerate(heads):
            if place.tensor == tensor:
                target = out[place.head * head_size : (place.head + 1) * head_size]
                target[...] = values[slice_ - first_slice, k * head_size : (k + 1) * head_size]
    return out


def slices_of_tensor(places: Sequence[Sequence[HeadPlace]], tensor: int) -> tuple[int, int]:
    """The range of our weight's slices that are in a checkpoint's tensor: first and end."""
    slices = [i for i, heads in enumerate(places) if heads[0].tensor == tensor]
    return slices[0], slices[-1] + 1
