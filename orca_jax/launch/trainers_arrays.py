# pyright: standard
"""Arrays as a trainer holds them, made into our weights where they are: on their devices or the host."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.checkpoint.array_view import changed, halves
from orca_jax.families.attention_config import Attention
from orca_jax.families.parameters import Parameter
from orca_jax.families.stored_name import HeadOrder, StoredName, head_places, heads_of_tensors
from orca_jax.families.trainers.array_form import LAYERS, ArrayForm
from orca_jax.sharding.random_parameters import in_order_of_heads


@dataclass(frozen=True, slots=True)
class Rearranged:
    """One of our weights: calling it makes a new array, in the dtype of `arrays`.

    `arrays` are those that `stored` names, which fit its forms with the `sizes` of their axes.
    """

    arrays: tuple[Any, ...]
    stored: StoredName
    parameter: Parameter
    sizes: Mapping[str, int]
    attention: Attention

    def __call__(self) -> jax.Array:
        """One program makes the same weight of all layers: which layer of a stack is an argument."""
        given = [_own_layer(*pair) for pair in zip(self.arrays, self.stored.forms, strict=True)]
        return _rearranged(
            tuple(array for array, _ in given),
            tuple(np.int32(form.layer) for _, form in given),
            forms=tuple(replace(form, layer=0) for _, form in given),
            heads=self.stored.heads,
            parameter=self.parameter,
            sizes=tuple(self.sizes.items()),
            attention=self.attention,
        )


def _own_layer(array: Any, form: ArrayForm) -> tuple[Any, ArrayForm]:
    """Of a stack in host memory the one layer, so that only that goes to a device."""
    if not isinstance(array, np.ndarray) or LAYERS not in form.letters:
        return array, form
    axis = form.letters.index(LAYERS)
    return array.take([form.layer], axis), replace(form, layer=0, n_layers=1)


@partial(jax.jit, static_argnames=("forms", "heads", "parameter", "sizes", "attention"))
def _rearranged(
    arrays: tuple[jax.Array, ...],
    layers: tuple[jax.Array, ...],
    *,
    forms: tuple[ArrayForm, ...],
    heads: HeadOrder | None,
    parameter: Parameter,
    sizes: tuple[tuple[str, int], ...],
    attention: Attention,
) -> jax.Array:
    parts = [
        _matrix(array, layer, form, parameter, dict(sizes))
        for array, layer, form in zip(arrays, layers, forms, strict=True)
    ]
    joined = jnp.concatenate(parts, axis=1 if parameter.takes_attention else 0)
    if heads is None:
        return joined.reshape(parameter.shape)
    first = np.cumsum([0, *heads_of_tensors(heads, attention)])
    order = [[first[at.tensor] + at.head for at in slice_] for slice_ in head_places(heads, attention)]
    return in_order_of_heads(joined, parameter, np.array(order), attention.head_size)


def _matrix(
    array: jax.Array, layer: jax.Array, form: ArrayForm, parameter: Parameter, sizes: Mapping[str, int]
) -> jax.Array:
    """The vector or matrix that `form` has in the array, as checkpoint/array_view.py reads it."""
    letters = form.letters
    if LAYERS in letters:
        array = jax.lax.dynamic_slice_in_dim(array, layer, 1, letters.index(LAYERS))
    if "V" in letters:  # may be padded
        array = jax.lax.slice_in_dim(array, 0, sizes["V"], axis=letters.index("V"))
    rows, columns = form.rows_and_columns(parameter)
    axes = (*rows, *columns)
    values, left = array[form.index], sorted(axes)
    shape = [int(np.prod([array.shape[i] for i in each])) for each in (rows, columns) if each]
    values = values.transpose([left.index(i) for i in axes]).reshape(shape)
    if form.interleaved:
        values = halves(values, array.shape[rows[-1]])
    return changed(values, form.multiply, form.add)
