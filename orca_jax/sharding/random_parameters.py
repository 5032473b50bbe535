"""Random weights, drawn directly on their devices."""

from collections.abc import Callable, Mapping
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.families.attention_config import Attention
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import Initial, Parameter, parameter_table
from orca_jax.families.stored_name import head_places, own_order, size_of_heads
from orca_jax.model.transformer import Parameters, init_parameter


def random_parameters(
    config: ModelConfig, seed: int, dtype: jnp.dtype, placement: Mapping[str, jax.sharding.Sharding]
) -> Parameters:
    """Draw parameters on the devices of `placement`; the values do not depend on how the model is split."""
    stored = config.with_kv_heads(1)
    table = parameter_table(stored)
    keys = dict(zip(table, jax.random.split(jax.random.key(seed), len(table)), strict=True))

    @cache
    def drawing(
        initial: Initial,
        shape: tuple[int, ...],
        dtype: jnp.dtype,
        sharding: jax.sharding.Sharding,
        repeated: Parameter | None,
    ) -> Callable[..., jax.Array]:
        """One program for equal parameters of all layers; of `repeated` each K/V head is needed often."""

        def draw(key: jax.Array) -> jax.Array:
            value = init_parameter(initial, shape, key, dtype)
            return value if repeated is None else with_repeated_heads(value, repeated, config.attention)

        return jax.jit(draw, out_shardings=sharding)

    def draw(name: str, sharding: jax.sharding.Sharding) -> jax.Array:
        parameter = table[name]
        has_heads = own_order(parameter, stored.attention) is not None and config.attention.kv_repeats > 1
        kind = (parameter.initial, parameter.held_shape, parameter.held_dtype(dtype))
        program = drawing(*kind, sharding, parameter if has_heads else None)
        return program(keys[name])

    return {name: draw(name, sharding) for name, sharding in placement.items()}


def with_repeated_heads(value: jax.Array, parameter: Parameter, attention: Attention) -> jax.Array:
    """A parameter in which each K/V head is once, as `attention` has it, which repeats them."""
    order = own_order(parameter, attention.repeated(1))
    assert order is not None
    places = head_places(order, attention)
    heads = np.array([[place.head for place in slice_] for slice_ in places])  # [slices, K]
    return in_order_of_heads(value, parameter, heads, size_of_heads(parameter, attention))


def in_order_of_heads(value: jax.Array, parameter: Parameter, heads: np.ndarray, size: int) -> jax.Array:
    """The parameter whose slices have these `heads` [slices, K] of `value`, with `size` elements each.

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
