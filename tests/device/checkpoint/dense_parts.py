"""The parts of a checkpoint whose weights are all dense."""

from pathlib import Path

from orca_jax.checkpoint.directory import find_parameters
from orca_jax.checkpoint.shard_reader import Parts
from orca_jax.families.model_config import ModelConfig


def dense_parts(directory: Path) -> tuple[ModelConfig, dict[str, Parts]]:
    """The model, and how each weight is read."""
    model, sources = find_parameters(directory)
    parts = {name: source for name, source in sources.items() if isinstance(source, Parts)}
    assert parts.keys() == sources.keys()
    return model, parts
