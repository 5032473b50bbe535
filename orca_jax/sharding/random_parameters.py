"""Random weights, drawn directly on their devices."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.families.attention_config import Attention
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import Parameter, attention_of, parameter_table, runs_of, share_rows
from orca_jax.families.stored_name import engine_order, head_places, size_of_heads
from orca_jax.families.weight_form import DENSE
from orca_jax.model.transformer import Parameters, init_parameter
from orca_jax.sharding.partition import Placement
from orca_jax.sharding.pieces import Box, Part


def random_parameters(config: ModelConfig, seed: int, dtype: jnp.dtype, placement: Placement) -> Parameters:
    """Draw parameters on the devices of `placement`; the values do not depend on how the model is split."""
    stored = config.as_stored()
    table = parameter_table(stored)
    keys = dict(zip(table, jax.random.split(jax.random.key(seed), len(table)), strict=True))

    @cache
    def drawing(
        parameter: Parameter,
        attention: Attention | None,
        rows: tuple[int, ...] | None,
        places: tuple[Any, ...],
        tree: Any,
    ) -> Callable[..., Any]:
        """One program for equal parameters of all layers.

        K/V heads are repeated as in `attention`, and rows are in the order of `rows`.
        """
        arranged = attention and partial(with_repeated_heads, parameter=parameter, attention=attention)
        if rows is not None:
            arranged = itemgetter(np.array(rows))

        def draw(key: jax.Array) -> Any:
            return init_parameter(parameter, key, dtype, arranged)

        return jax.jit(draw, out_shardings=jax.tree.unflatten(tree, places))

    def draw(name: str, places: Any) -> Any:
        parameter = table[name]
        own = attention_of(config, name)
        repeats = engine_order(parameter, own.repeated(1)) is not None and own.kv_repeats > 1
        if parameter.form == DENSE and not repeats:  # its axes do not matter then
            parameter = Parameter((), parameter.shape, parameter.initial, "linear")
        leaves, tree = jax.tree.flatten(places)
        rows = share_rows(config, name)
        return drawing(parameter, own if repeats else None, rows, tuple(leaves), tree)(keys[name])

    return {name: draw(name, places) for name, places in placement.items()}


def with_repeated_heads(value: jax.Array, parameter: Parameter, attention: Attention) -> jax.Array:
    """Repeat the K/V heads of a parameter, which has each head once, as `attention` says."""
    order = engine_order(parameter, attention.repeated(1))
    assert order is not None
    places = head_places(order, attention)
    heads = np.array([[place.head for place in slice_] for slice_ in places])  # [slices, K]
    return in_order_of_heads(value, parameter, heads, size_of_heads(parameter, attention))


def parts_of_heads(parameter: Parameter, attention: Attention, *, flat: bool) -> tuple[list[Part], int]:
    """Heads, perhaps repeated, as parts of the stored array, one for each that is held; the axis of slices.

    They make what `with_repeated_heads` makes; if `flat` all are in one slice, in a checkpoint's order, so
    that they make what `with_flat_heads` makes once that axis is left out.
    """
    stored = parameter.shape
    size = size_of_heads(parameter, attention)
    order = engine_order(parameter, attention.repeated(1))
    assert order is not None
    places = head_places(order, attention)
    first = 1 if parameter.takes_attention else 0  # the axis of heads, or before it that of their slices
    has_slices = order != "keys"
    n_axes = 1 + has_slices
    before, after = [(0, n) for n in stored[:first]], [(0, n) for n in stored[first + n_axes :]]
    per_slice = stored[first + n_axes - 1] // size

    def box(slice_: int | None, head: int) -> Box:
        within = [] if slice_ is None else [(slice_, slice_ + 1)]
        return (*before, *within, (head * size, (head + 1) * size), *after)

    parts: list[Part] = []
    for i, row in enumerate(places):
        for k, place in enumerate(row):
            from_slice, from_head = divmod(place.head, per_slice)
            to_slice, to_head = (0, k * len(places) + i) if flat else (i, k)
            to = box(to_slice if has_slices else None, to_head)
            parts.append((to, box(from_slice if has_slices else None, from_head)))
    return parts, first


def parts_of_rows(rows: Sequence[int], shape: tuple[int, ...]) -> list[Part]:
    """Rows in another order (parameters.share_rows) as parts of the stored array of this shape."""
    others = [(0, n) for n in shape[1:]]
    return [(((at, at + n), *others), ((first, first + n), *others)) for at, first, n in runs_of(rows)]


def with_flat_heads(value: jax.Array, parameter: Parameter, attention: Attention) -> jax.Array:
    """Arrange the inputs of `value` [H, G, K D] in a checkpoint's order of heads, [H, K G D]."""
    by_head = value.reshape(*value.shape[:2], -1, size_of_heads(parameter, attention))
    return by_head.swapaxes(1, 2).reshape(len(value), -1)


def in_order_of_heads(value: jax.Array, parameter: Parameter, heads: np.ndarray, size: int) -> jax.Array:
    """Arrange `heads` [slices, K] of `value`, each of `size` elements, as the parameter's slices.

    Heads are the rows of `value`, or the columns if the parameter takes what attention returns.
    """
    if len(heads) == 1:
        heads = heads[0]
    if parameter.takes_attention:
        stored = value.reshape(len(value), -1, size)  # [H, heads, D]
        return stored[:, heads].reshape(len(value), *heads.shape[:-1], -1)
    others = parameter.stacked_shape[1:]
    stored = value.reshape(-1, size, *others)
    return stored[heads].reshape(*heads.shape[:-1], heads.shape[-1] * size, *others)
