"""Random weights, drawn directly on their devices."""

from collections.abc import Callable, Mapping
from functools import cache, partial

import jax
import jax.numpy as jnp

from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import Initial, parameter_table
from orca_jax.model.gpt import Parameters, init_parameter


def random_parameters(
    config: ModelConfig, seed: int, dtype: jnp.dtype, placement: Mapping[str, jax.sharding.Sharding]
) -> Parameters:
    """Draw parameters on the devices of `placement`; the values do not depend on how the model is split."""
    table = parameter_table(config)
    keys = dict(zip(table, jax.random.split(jax.random.key(seed), len(table)), strict=True))

    @cache
    def drawing(
        initial: Initial, shape: tuple[int, ...], sharding: jax.sharding.Sharding
    ) -> Callable[..., jax.Array]:
        """One program for equal parameters of all layers."""
        return jax.jit(partial(init_parameter, initial, shape, dtype=dtype), out_shardings=sharding)

    def draw(name: str, sharding: jax.sharding.Sharding) -> jax.Array:
        return drawing(table[name].initial, table[name].shape, sharding)(keys[name])

    return {name: draw(name, sharding) for name, sharding in placement.items()}
