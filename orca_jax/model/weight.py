"""Weights as a device holds them: a dense one is an array, any other a FormedWeight of several arrays.

layers.Matmul is the one place that computes with weights, and it asks a FormedWeight to compute. A new form
is a families.weight_form.WeightForm, which says what is stored, and a subclass here with its products.
"""

from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from orca_jax.families.mixtures.mxfp4 import BIAS, BLOCK, BLOCK_BYTES, Mxfp4
from orca_jax.families.parameters import Parameter
from orca_jax.families.weight_form import Dense, HeldArray, WeightForm
from orca_jax.model.packed import Grouped, packed_grouped

Product = Callable[[Array, Array], Array]  # x [T, in] times a dense weight [*out, *in]: [T, out]

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

    def product(self, x: Array, dense: Product) -> Array:
        """x [T, in] times this weight [*out, *in]: [T, out]. `dense` multiplies by a dense weight."""
        raise AssertionError(f"{self.form} is not for linear layers")

    def by_expert(self, x: Array, sizes: Array, grouped: Grouped) -> Array:
        """layers.grouped_matmul with this weight [X, *out, in]; `grouped` multiplies by dense ones."""
        raise AssertionError(f"{self.form} is not for experts")

    @classmethod
    def encoded(cls, form: WeightForm, dense: Array, n_in: int) -> "FormedWeight":
        """Convert a dense weight, whose last `n_in` axes are inputs, to this form. Traced."""
        raise AssertionError(f"{form} is not made of dense weights")

    @classmethod
    def drawn(cls, form: WeightForm, parameter: Parameter, key: Array, dense: Callable[[], Array]) -> Any:
        """A random weight; `dense` draws a dense one. Traced."""
        return cls.encoded(form, dense(), parameter.n_in)


class PackedExperts(FormedWeight, form=Mxfp4):
    """Experts [X, *out, in] in MXFP4."""

    def by_expert(self, x: Array, sizes: Array, grouped: Grouped) -> Array:
        """Multiply by the experts, unpacked as they are needed."""
        packed = self.arrays["packed"]
        return packed_grouped(x, packed.reshape(packed.shape[0], -1, packed.shape[-1]), sizes, grouped)

    @classmethod
    def drawn(
        cls, form: WeightForm, parameter: Parameter, key: Array, dense: Callable[[], Array]
    ) -> "PackedExperts":
        """Random bytes, with all scales 2 ** -7."""
        shape = parameter.held_arrays(jnp.float32)["packed"].shape
        is_number = jnp.arange(shape[-1]) < shape[-1] // BLOCK_BYTES * (BLOCK // 2)
        bits = jnp.where(is_number, jax.random.bits(key, shape, jnp.uint8), jnp.uint8(BIAS - 7))
        return cls(form, {"packed": bits})


def kind_of(form: WeightForm) -> type[FormedWeight]:
    """The FormedWeight class of a form that is not dense."""
    return _KINDS[type(form)]


def held(parameter: Parameter, dtype: Any, make: Callable[[HeldArray], Any]) -> Any:
    """A weight of `parameter` in a model of `dtype`, each of whose arrays is made by `make`."""
    form, arrays = parameter.form, parameter.held_arrays(dtype)
    if isinstance(form, Dense):
        return make(arrays[""])
    return kind_of(form)(form, {name: make(array) for name, array in arrays.items()})


def model_dtype(parameters: Mapping[str, Any]) -> Any:
    """The model's dtype: that of its first dense parameter, which is never kept in an exact dtype."""
    return next(one.dtype for one in parameters.values() if not isinstance(one, FormedWeight))
