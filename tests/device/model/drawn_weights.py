"""Random weights for tests."""

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import parameter_table


def drawn(model: ModelConfig, seed: int) -> dict[str, jax.Array]:
    """Weights wide enough that greedy tokens vary, with no bias or scale at its initial value."""
    rng = np.random.default_rng(seed)
    values: dict[str, jax.Array] = {}
    for name, parameter in parameter_table(model).items():
        value = rng.standard_normal(parameter.shape).astype("f4")
        value *= 0.1 if parameter.use in ("norm", "bias") else 1.2 / np.sqrt(parameter.stacked_shape[-1])
        values[name] = jnp.asarray(value + (1 if parameter.initial == "ones" else 0))
    return values
