"""Whether a directory is an Orbax checkpoint, and the model that its JSON describes."""

import os
from pathlib import Path

from orca_jax.families.hf_config import read_hf_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.trainers.orca_json import ORCA_JSON, TREE, latest_step, read_description

COMMIT = "_CHECKPOINT_METADATA"
UNFINISHED = ".orbax-checkpoint-tmp"  # in a directory's name until Orbax renames it
MANIFEST = "manifest.ocdbt"


def is_orbax(directory: Path) -> bool:
    """Whether Orbax wrote this directory or steps below it, or began to, or it has an orca.json."""
    if any(os.path.exists(directory / name) for name in (ORCA_JSON, TREE, COMMIT, MANIFEST)):
        return True
    if UNFINISHED in directory.name or os.path.exists(directory / "ocdbt.process_0"):
        return True
    return not any(directory.glob("*.safetensors")) and latest_step(directory) is not None


def model_config(directory: Path) -> ModelConfig:
    """The model that a directory's JSON describes, with or without weights. Raises a CheckpointError."""
    return described_model(directory)[0]


def described_model(directory: Path) -> tuple[ModelConfig, str]:
    """The model, and a line about what its config.json has that is not used, or empty."""
    found = read_description(directory) if is_orbax(directory) else read_hf_config(directory)
    return found.model, found.note
