# pyright: standard
"""Converts a trainer's arrays and adapters to our weights, on the devices that hold the arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.checkpoint.array_view import changed, halves
from orca_jax.families.attention_config import Attention
from orca_jax.families.parameters import Parameter
from orca_jax.families.stored_name import HeadOrder, head_places, heads_of_tensors, size_of_heads
from orca_jax.families.trainers.array_form import EXPERTS, LAYERS, ArrayForm
from orca_jax.sharding.random_parameters import in_order_of_heads


@dataclass(frozen=True, slots=True)
class Recipe:
    """Makes one of our weights from arrays of these `forms`; `sizes` are the axes' sizes by letter."""

    forms: tuple[ArrayForm, ...]
    heads: HeadOrder | None
    parameter: Parameter
    sizes: tuple[tuple[str, int], ...]
    attention: Attention

    def shape(self, i: int) -> tuple[int, ...]:
        """The shape that array `i` must have."""
        return self.forms[i].shape(dict(self.sizes))

    def into_and_out(self, i: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of array `i` that are the weight's inputs, and all others, in the array's order."""
        _, columns = self.forms[i].rows_and_columns(self.parameter)
        into = tuple(sorted(columns))
        return into, tuple(axis for axis in range(len(self.forms[i].letters)) if axis not in into)

    def weight(self, arrays: Sequence[jax.Array], layers: Sequence[jax.Array | int]) -> jax.Array:
        """The weight in the arrays' dtype; in stacks of layers `layers` replace the layers of `forms`."""
        parts = [
            _matrix(array, layer, form, self.parameter, dict(self.sizes))
            for array, layer, form in zip(arrays, layers, self.forms, strict=True)
        ]
        if self.parameter.axes[0] == EXPERTS:
            parts = [part.reshape(self.parameter.shape[0], -1, *part.shape[1:]) for part in parts]
            return jnp.concatenate(parts, axis=1).reshape(self.parameter.shape)
        joined = jnp.concatenate(parts, axis=1 if self.parameter.takes_attention else 0)
        if self.heads is None:
            return joined.reshape(self.parameter.shape)
        first = np.cumsum([0, *heads_of_tensors(self.heads, self.attention)])
        places = head_places(self.heads, self.attention)
        order = [[first[place.tensor] + place.head for place in slice_] for slice_ in places]
        size = size_of_heads(self.parameter, self.attention)
        return in_order_of_heads(joined, self.parameter, np.array(order), size)


@dataclass(frozen=True, slots=True)
class Rearranged:
    """A weight that is made when called, in the dtype of `arrays`."""

    arrays: tuple[Any, ...]
    recipe: Recipe

    def __call__(self) -> jax.Array:
        """Make the weight. The layer is an argument of the program, which so serves all layers of a stack."""
        pairs = [_one_layer(*pair) for pair in zip(self.arrays, self.recipe.forms, strict=True)]
        arrays = tuple(array for array, _ in pairs)
        layers = tuple(np.int32(form.layer) for _, form in pairs)
        forms = tuple(replace(form, layer=0) for _, form in pairs)
        return _weight(arrays, layers, recipe=replace(self.recipe, forms=forms))


@partial(jax.jit, static_argnames="recipe")
def _weight(arrays: tuple[jax.Array, ...], layers: tuple[jax.Array, ...], *, recipe: Recipe) -> jax.Array:
    return recipe.weight(arrays, layers)


@dataclass(frozen=True, slots=True)
class AdaptersChange:
    """The change that adapters make to one of our weights; `adapted` says which of its arrays have one.

    As in Qwix, `a` has the array's input axes, then the rank, and `b` the rank, then the other axes.
    """

    recipe: Recipe
    adapted: tuple[bool, ...]

    def __call__(self, pairs: Sequence[jax.Array]) -> jax.Array:
        """The change in float32; `pairs` has a and b of each adapted array in turn."""
        rest = iter(pairs)
        changes = [
            self._change(i, next(rest), next(rest))
            if adapted
            else jnp.zeros(self.recipe.shape(i), jnp.float32)
            for i, adapted in enumerate(self.adapted)
        ]
        forms = tuple(replace(form, add=0.0) for form in self.recipe.forms)
        return replace(self.recipe, forms=forms).weight(changes, [form.layer for form in forms])

    def factors(self, pairs: Sequence[jax.Array]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The change of each adapted array as b [*out, r] times a [r, *into], float32, and its rows [*out].

        The rows say which of the weight's outputs the array has.
        """
        rest = iter(pairs)
        found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for i, adapted in enumerate(self.adapted):
            if adapted:
                a, b = next(rest), next(rest)
                a, b = a.reshape(-1, a.shape[-1]), b.reshape(b.shape[0], -1)
                a, b, rows = _factors(jnp.asarray(a), jnp.asarray(b), change=self, i=i)
                found.append((np.asarray(a), np.asarray(b), np.asarray(rows) != 0))
        return found

    def first(self, i: int, axes: Sequence[int]) -> int:
        """The place, among these axes of array `i` in their order, of the weight's first element."""
        shape, index = self.recipe.shape(i), self.recipe.forms[i].index
        place = 0
        for axis in axes:
            at = index[axis]
            place = place * shape[axis] + (0 if isinstance(at, slice) else at)
        return place

    def placed(self, i: int, matrix: jax.Array, *, multiplied: bool) -> jax.Array:
        """The weight whose array `i` is a `matrix` [inputs, outputs], and whose other arrays are zero."""
        forms = [replace(form, add=0.0) for form in self.recipe.forms]
        if not multiplied:
            forms = [replace(form, multiply=1.0) for form in forms]
        recipe = replace(self.recipe, forms=tuple(forms))
        arrays = [jnp.zeros(recipe.shape(j), jnp.float32) for j in range(len(forms))]
        shape, (into, out) = recipe.shape(i), recipe.into_and_out(i)
        axes = (*into, *out)
        arrays[i] = matrix.reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes).tolist())
        return recipe.weight(arrays, [form.layer for form in forms])

    def _change(self, i: int, a: jax.Array, b: jax.Array) -> jax.Array:
        shape, (into, out) = self.recipe.shape(i), self.recipe.into_and_out(i)
        axes = (*into, *out)
        product = product_of(a.reshape(-1, a.shape[-1]), b.reshape(b.shape[0], -1))
        return product.reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes).tolist())


@partial(jax.jit, static_argnames=("change", "i"))
def _factors(
    a: jax.Array, b: jax.Array, *, change: AdaptersChange, i: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Bring a [inputs, r] and b [r, outputs] of array `i` into the weight's order, by moving whole weights.

    Of a weight with one input that is not zero the sum over inputs is a column, and so for outputs; a head
    of several places counts in each.
    """
    parameter = change.recipe.parameter
    n_out = len(parameter.axes) - parameter.n_in
    outputs, inputs = tuple(range(n_out)), tuple(range(n_out, len(parameter.axes)))
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    into, out = change.recipe.into_and_out(i)
    one_in = jnp.zeros(len(a)).at[change.first(i, into)].set(1)
    one_out = jnp.zeros(b.shape[1]).at[change.first(i, out)].set(1)

    def of_inputs(column: jax.Array) -> jax.Array:
        return change.placed(i, jnp.outer(column, one_out), multiplied=False).sum(axis=outputs)

    def of_outputs(row: jax.Array) -> jax.Array:
        return change.placed(i, jnp.outer(one_in, row), multiplied=True).sum(axis=inputs)

    placed = jax.lax.map(of_inputs, a.T) / of_inputs(jnp.ones(len(a)))
    return placed, jnp.moveaxis(jax.lax.map(of_outputs, b), 0, -1), of_outputs(jnp.ones(b.shape[1]))


def product_of(one: jax.Array, other: jax.Array) -> jax.Array:
    """[..., r] times [r, ...], in float32."""
    one, other = one.astype(jnp.float32), other.astype(jnp.float32)
    return jnp.tensordot(one, other, 1, precision=jax.lax.Precision.HIGHEST)


def _one_layer(array: Any, form: ArrayForm) -> tuple[Any, ArrayForm]:
    """Take one layer of a stack in host memory, so that the others do not go to a device."""
    if not isinstance(array, np.ndarray) or LAYERS not in form.letters:
        return array, form
    axis = form.letters.index(LAYERS)
    return array.take([form.layer], axis), replace(form, layer=0, n_layers=1)


def _matrix(
    array: jax.Array, layer: jax.Array | int, form: ArrayForm, parameter: Parameter, sizes: Mapping[str, int]
) -> jax.Array:
    """The part of the array that `form` selects, as a vector or matrix; see checkpoint/array_view.py."""
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
