"""Weights as a device holds them: a dense one is an array, any other a FormedWeight of several arrays.

layers.Matmul is the one place that computes with weights, and it asks a FormedWeight to compute. A new form
is a families.weight_form.WeightForm, which says what is stored, and a subclass here with its products.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from orca_jax.families.packed_form import Joined, PackedForm
from orca_jax.families.parameters import Parameter
from orca_jax.families.weight_form import Dense, HeldArray, WeightForm
from orca_jax.model.packed import Grouped, grouped_unpacked
from orca_jax.model.packed_weight import (
    encoded_planes,
    product_unpacked,
    rounded,
    rounded_to_float8,
    unpacked,
)

# x [T, in], a form, the planes of a weight [*out, in], and the number of real tokens [1] (None: all) give
# [T, out]; None if the form or the sizes are not supported.
PackedProduct = Callable[[Array, PackedForm, Mapping[str, Array], Array | None], Array | None]
# The same for groups of rows, of the given sizes [X], and a weight [X, *out, in].
PackedGrouped = Callable[[Array, PackedForm, Mapping[str, Array], Array], Array | None]


class Products(Protocol):
    """The products that forms are computed with: layers.Matmul."""

    def __call__(self, x: Array, weight: Array) -> Array:
        """x [T, in] times a dense weight [*out, *in]: [T, out]."""
        ...

    @property
    def grouped(self) -> Grouped:
        """layers.grouped_matmul with dense weights."""
        ...

    @property
    def packed(self) -> PackedProduct | None:
        """The product with packed weights; without it weights are unpacked first."""
        ...

    @property
    def packed_grouped(self) -> PackedGrouped | None:
        """The grouped product with packed weights."""
        ...

    @property
    def n_tokens(self) -> Array | None:
        """The number of real tokens, [1] int32; None if all are."""
        ...


_KINDS: dict[type, type["FormedWeight"]] = {}


class FormedWeight:
    """A weight in a form that is not dense: a pytree whose leaves are its arrays, by name.

    The leaves may be anything that describes an array: shapes, shardings, host copies.
    """

    def __init__(self, form: WeightForm, arrays: Mapping[str, Any]) -> None:
        self.form, self.arrays = form, dict(arrays)

    def __init_subclass__(cls, *, form: type) -> None:
        """Register `cls` as the class of weights of `form`."""
        _KINDS[form] = cls
        jax.tree_util.register_pytree_with_keys(cls, cls._flatten, cls._unflatten)

    def _flatten(self) -> tuple[list[tuple[Any, Any]], tuple[WeightForm, tuple[str, ...]]]:
        children = [(jax.tree_util.DictKey(name), array) for name, array in self.arrays.items()]
        return children, (self.form, tuple(self.arrays))

    @classmethod
    def _unflatten(cls, aux: tuple[WeightForm, tuple[str, ...]], children: Any) -> Self:
        form, names = aux
        return cls(form, dict(zip(names, children, strict=True)))

    def product(self, x: Array, products: Products) -> Array:
        """x [T, in] times this weight [*out, in]: [T, out]; `products` multiplies by dense weights."""
        raise AssertionError(f"{self.form} is not for linear layers")

    def by_expert(self, x: Array, sizes: Array, products: Products) -> Array:
        """layers.grouped_matmul with this weight [X, *out, in]."""
        raise AssertionError(f"{self.form} is not for experts")

    def rows(self, at: Array, dtype: DTypeLike) -> Array:
        """The dense rows `at` [T] of a table [V, E] in `dtype`: [T, E]; `at` is clipped to its rows."""
        raise AssertionError(f"{self.form} is not for embeddings")

    @classmethod
    def encoded(cls, form: WeightForm, dense: Array) -> "FormedWeight":
        """Convert a dense weight [*out, in] to this form. Traced."""
        raise AssertionError(f"{form} is not made of dense weights")


class PackedWeight(FormedWeight, form=PackedForm):
    """A weight [*out, in] in planes."""

    form: PackedForm

    def _prepared(self, x: Array) -> tuple[Array, dict[str, Array]]:
        """The activations in the planes' order, rounded to FP8 if the form says so, and the other planes."""
        planes = dict(self.arrays)
        if self.form.ordered:
            x = x[:, planes.pop("order")]
        if self.form.float_inputs:
            static = planes.pop("input_scales", None)
            x = rounded_to_float8(x, None if static is None else static.reshape(-1)[0])
        return x, planes

    def product(self, x: Array, products: Products) -> Array:
        """x [T, in] times this weight: [T, out]."""
        x, planes = self._prepared(x)
        if products.packed is not None and not self.form.exact:
            y = products.packed(x, self.form, planes, products.n_tokens)
            if y is not None:
                return y
        return product_unpacked(x, self.form, planes, products)

    def by_expert(self, x: Array, sizes: Array, products: Products) -> Array:
        """layers.grouped_matmul with this weight [X, *out, in]."""
        x, held = self._prepared(x)
        if products.packed_grouped is not None and not self.form.exact:
            y = products.packed_grouped(x, self.form, held, sizes)
            if y is not None:
                return y
        if self.form.integer_inputs:
            x = rounded(x)

        def experts(at: Array) -> Array:
            planes = {name: plane.at[at].get(mode="clip") for name, plane in held.items()}
            found = unpacked(self.form, planes, x.dtype)
            return found.reshape(*at.shape, -1, found.shape[-1])

        n_out = math.prod(self.arrays["codes"].shape[1:-1])
        return grouped_unpacked(x, experts, n_out, sizes, products.grouped)

    def rows(self, at: Array, dtype: DTypeLike) -> Array:
        """The dense rows `at` [T] of a table [V, E]."""
        planes = {name: plane.at[at].get(mode="clip") for name, plane in self.arrays.items()}
        return unpacked(self.form, planes, dtype)

    @classmethod
    def encoded(cls, form: Any, dense: Array) -> "PackedWeight":
        """Round a dense weight to the nearest numbers of the form; scales fit the greatest number."""
        return cls(form, encoded_planes(form, dense))


class JoinedWeight(FormedWeight, form=Joined):
    """A weight whose first axis has parts in several forms."""

    form: Joined

    def parts(self) -> list[Any]:
        """The weight of each form."""
        found: list[Any] = []
        for i, form in enumerate(self.form.forms):
            own = {
                name.partition(".")[2]: array
                for name, array in self.arrays.items()
                if name.partition(".")[0] == str(i)
            }
            found.append(own[""] if isinstance(form, Dense) else kind_of(form)(form, own))
        return found

    def product(self, x: Array, products: Products) -> Array:
        """The parts' products, side by side."""
        y = [
            part.product(x, products) if isinstance(part, FormedWeight) else products(x, part)
            for part in self.parts()
        ]
        return jnp.concatenate(y, axis=1)

    @classmethod
    def encoded(cls, form: Any, dense: Array) -> "JoinedWeight":
        """Encode each part in its form."""
        arrays: dict[str, Array] = {}
        first, n = 0, dense.shape[0] - len(form.forms) + 1
        for i, own in enumerate(form.forms):
            part = dense[first : first + n]
            first, n = first + n, 1
            if isinstance(own, Dense):
                arrays[str(i)] = part
            else:
                encoded = kind_of(own).encoded(own, part)
                arrays |= {f"{i}.{name}": array for name, array in encoded.arrays.items()}
        return cls(form, arrays)


def kind_of(form: WeightForm) -> type[FormedWeight]:
    """The FormedWeight class of a form that is not dense."""
    return _KINDS[type(form)]


def held(parameter: Parameter, dtype: Any, make: Callable[[HeldArray], Any]) -> Any:
    """A weight of `parameter` in a model of `dtype`, each of whose arrays is made by `make`."""
    form, arrays = parameter.form, parameter.held_arrays(dtype)
    if isinstance(form, Dense):
        return make(arrays[""])
    return kind_of(form)(form, {name: make(array) for name, array in arrays.items()})


def rows_of(table: Any, at: Array, dtype: DTypeLike) -> Array:
    """The rows `at` [T] of a table [V, E] in any form; `at` is clipped to its rows."""
    if isinstance(table, FormedWeight):
        return table.rows(at, dtype)
    return table.at[at].get(mode="clip")


def model_dtype(parameters: Mapping[str, Any]) -> Any:
    """The model's dtype: that of its first dense parameter, which is never kept in an exact dtype."""
    return next(one.dtype for one in parameters.values() if not isinstance(one, FormedWeight))
