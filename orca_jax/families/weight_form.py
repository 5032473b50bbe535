"""The form of a weight: dense, or in several arrays, such as packed numbers and their scales.

A form says which arrays a device holds for a weight; bytes, sharding, loading, updates and memory plans ask
the form. A subclass of FormedWeight (model/weight.py) computes with the arrays.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class HeldArray:
    """One array of a weight's form; `axes` has the weight's axis that each of the array's axes runs along.

    The array is split along the axis on which the weight is split; without that axis each device holds it
    whole.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axes: tuple[int, ...]


class WeightForm(Protocol):
    """A form of weights. Implementations are frozen dataclasses, so that equal forms compare equal.

    A form is the same whether a checkpoint has its arrays, or dense weights are encoded on the devices.
    """

    @property
    def multiple(self) -> int:
        """The number of inputs that a device holds is a multiple of this."""
        ...

    @property
    def fixed(self) -> str | None:
        """Why a weight in this form cannot be replaced by new numbers; None if it can."""
        ...

    def arrays(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Mapping[str, HeldArray]:
        """The arrays of a weight of `shape`, or of a device's part.

        Inputs are the last axis, for attention's output projection heads in a checkpoint's order. A dense
        weight has them as parameters.py says. `dtype` is the model's, or where bytes are counted any dtype of
        that size.
        """
        ...


def form_bytes(form: WeightForm, shape: tuple[int, ...], itemsize: int) -> int:
    """The bytes of a weight of `shape` in a model whose dtype has `itemsize` bytes."""
    arrays = form.arrays(shape, np.dtype((np.void, itemsize)))
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays.values())


@dataclass(frozen=True, slots=True)
class Dense:
    """One array of the weight's own shape, in the model's dtype; `exact` ones are float32 in every model."""

    exact: bool = False
    multiple: int = 1
    fixed: str | None = None

    def dtype(self, dtype: npt.DTypeLike) -> np.dtype[Any]:
        """The dtype of the array in a model of `dtype`."""
        return np.dtype(np.float32 if self.exact else dtype)

    def arrays(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Mapping[str, HeldArray]:
        """The only array, whose name is empty."""
        return {"": HeldArray(shape, self.dtype(dtype), tuple(range(len(shape))))}


DENSE, EXACT = Dense(), Dense(exact=True)

# The forms of a layer's weights by their names in it, or of weights outside of layers; others are dense.
Forms = tuple[tuple[str, WeightForm], ...]


def form_of(forms: Forms, name: str) -> WeightForm:
    """The form of a weight among `forms`."""
    return next((form for named, form in forms if named == name), DENSE)
