"""Loads the weights of stages, after checking that they fit."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import EngineConfig
from orca_jax.execution.capacity import check_weights
from orca_jax.families.model_config import ModelConfig
from orca_jax.model.transformer import Parameters
from orca_jax.model_files.found_model import FoundModel
from orca_jax.sharding.partition import StagePart
from orca_jax.sharding.random_parameters import random_parameters


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
    placements = [part.placement(model) for part in parts]
    if config.load_format == "dummy":
        return model, [random_parameters(model, config.seed or 0, dtype, each) for each in placements]
    assert found.directory is not None
    checkpoint = load_checkpoint(
        found.directory,
        dtype=dtype,
        vocab_multiple=model.vocab_multiple,
        kv_repeats=model.attention.kv_repeats,
        packed=model.has_packed_experts,
        linear_form=model.linear_form,
        placements=placements,
        on_bytes=on_load,
    )
    return model, checkpoint.stages
