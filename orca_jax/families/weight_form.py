"""How the numbers of a weight are held: dense, or in several arrays, such as packed numbers and their scales.

A form says which arrays a device holds for a weight; bytes, sharding, loading, updates and memory plans ask
it. What computes with the arrays is a subclass of model/weight.py's FormedWeight, which `product` knows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class HeldArray:
    """One array of a weight's form; `axes` has for each of its axes the weight's axis that it runs along.

    It is split over devices along the axis of the weight that is; without that axis each has the whole.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axes: tuple[int, ...]


class WeightForm(Protocol):
    """A form of weights; a frozen dataclass, so that forms are equal and hashable by their fields."""

    @property
    def stored(self) -> bool:
        """Whether checkpoints have the form's own bytes; else dense weights are encoded on the devices."""
        ...

    @property
    def fixed(self) -> str | None:
        """Why a weight in this form cannot be replaced by new numbers; None if it can."""
        ...

    def arrays(self, shape: tuple[int, ...], n_in: int, dtype: npt.DTypeLike) -> Mapping[str, HeldArray]:
        """The arrays of a weight of `shape`, or of a device's part, whose last `n_in` axes are inputs.

        `dtype` is the model's, or only of the size of the model's where bytes are counted.
        """
        ...


def form_bytes(form: WeightForm, shape: tuple[int, ...], n_in: int, itemsize: int) -> int:
    """The bytes of a weight of `shape` in a model whose dtype has `itemsize` bytes."""
    arrays = form.arrays(shape, n_in, np.dtype((np.void, itemsize)))
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays.values())


@dataclass(frozen=True, slots=True)
class Dense:
    """One array of the weight's own shape, in the model's dtype; `exact` ones are float32 in every model."""

    exact: bool = False
    stored: bool = True
    fixed: str | None = None

    def dtype(self, dtype: npt.DTypeLike) -> np.dtype[Any]:
        """The dtype of the array in a model of `dtype`."""
        return np.dtype(np.float32 if self.exact else dtype)

    def arrays(self, shape: tuple[int, ...], n_in: int, dtype: npt.DTypeLike) -> Mapping[str, HeldArray]:
        """The array itself, which has no name."""
        return {"": HeldArray(shape, self.dtype(dtype), tuple(range(len(shape))))}


DENSE, EXACT = Dense(), Dense(exact=True)
