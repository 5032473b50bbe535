"""Composition: loads the weights of stages after checking that they fit."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from orca_jax.checkpoint.load import load_parameters
from orca_jax.config import EngineConfig
from orca_jax.execution.capacity import check_weights
from orca_jax.families.model_config import ModelConfig
from orca_jax.model.transformer import Parameters
from orca_jax.model_files.found_model import FoundModel
from orca_jax.sharding.partition import StagePart


def load_stages(
    found: FoundModel,
    parts: Sequence[StagePart],
    config: EngineConfig,
    dtype: jnp.dtype,
    on_load: Callable[[int, int], None] | None = None,
) -> tuple[ModelConfig, Sequence[Parameters]]:
    """Load the weights of these stages onto their devices; return the padded model and each stage's weights.

    `ModelConfig.for_devices` says how the devices of a stage share the model. Raises ConfigError before
    loading if the weights do not fit, or a CheckpointError.
    """
    model = found.config.for_devices(len(parts[0].group))
    for part in parts:
        check_weights(model, dtype.itemsize, part, n_devices=config.n_devices)
    parameters = load_parameters(
        found,
        model,
        [part.placement(model) for part in parts],
        load_format=config.load_format,
        dtype=dtype,
        seed=config.seed or 0,
        on_load=on_load,
    )
    return model, parameters
