"""Loads a found model's weights: from its directory, or random ones."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from orca_jax.checkpoint.directory import Placement, load_directory
from orca_jax.config import LoadFormat
from orca_jax.families.model_config import ModelConfig
from orca_jax.model.transformer import Parameters
from orca_jax.model_files.found_model import FoundModel
from orca_jax.sharding.random_parameters import random_parameters


def load_parameters(
    found: FoundModel,
    model: ModelConfig,
    placements: Sequence[Placement],
    *,
    load_format: LoadFormat,
    dtype: jnp.dtype,
    seed: int,
    on_load: Callable[[int, int], None] | None = None,
) -> Sequence[Parameters]:
    """Each stage's weights, on the devices of its placement.

    `model` is `found.config` as prepared for the devices (`for_devices`); random weights are drawn from
    `seed`. Raises ConfigError or a CheckpointError.
    """
    if load_format == "dummy":
        return [random_parameters(model, seed, dtype, placement) for placement in placements]
    assert found.directory is not None
    checkpoint = load_directory(
        found.directory,
        dtype=dtype,
        vocab_multiple=model.vocab_multiple,
        kv_repeats=model.attention.kv_repeats,
        packed=model.has_packed_experts,
        placements=placements,
        on_bytes=on_load,
    )
    return checkpoint.stages
