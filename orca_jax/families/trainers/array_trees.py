"""Finds the trees of arrays that trainers save: Orbax's, and Zarr arrays without Orbax.

Orbax lists the arrays of a tree in _METADATA. Levanter and EasyDeL keep each array as a Zarr array, whose
path is its name ("model/lm_head/weight"), or all of them in one OCDBT database, and write a JSON file when
all are there: metadata.json, and checkpoint_metadata.json for EasyDeL.
"""

import os.path
import re
from pathlib import Path

from orca_jax.errors import CheckpointError
from orca_jax.families.strict_json import read_object

TREE = "_METADATA"  # Orbax writes it last
COMMIT = "_CHECKPOINT_METADATA"
UNFINISHED = ".orbax-checkpoint-tmp"  # in a directory's name until Orbax renames it
MANIFEST = "manifest.ocdbt"
STEP_JSON = "metadata.json"  # Levanter writes it last
INDEX = "tensorstore_index.json"  # EasyDeL's list of arrays
COMPLETE = "checkpoint_metadata.json"  # EasyDeL writes it last
# JSON beside the arrays, which describes them; the last two hold pickles, which are not read.
TREE_FILES = (STEP_JSON, INDEX, COMPLETE, "model_structure.json", "tx_structure.json")
# An item with a step's weights: of Tunix, MaxText, a manager with one item, others.
_ITEMS = ("model_params", "items", "default", "params", "state", "model", ".")
_STEP = re.compile(r"(?:(?:step|run)-)?(\d{1,18})")
_MAX_BYTES = 1_000_000


def has_array_tree(directory: Path) -> bool:
    """Whether a trainer wrote or began to write arrays into this directory or steps in it.

    A directory with orca.json counts.
    """
    if any(os.path.exists(directory / name) for name in ("orca.json", TREE, COMMIT, MANIFEST, INDEX)):
        return True
    if UNFINISHED in directory.name or os.path.exists(directory / "ocdbt.process_0"):
        return True
    return not any(directory.glob("*.safetensors")) and (
        is_zarr_tree(directory) or latest_step(directory) is not None
    )


def is_zarr_tree(directory: Path) -> bool:
    """Whether Levanter or EasyDeL wrote this directory, and all of it."""
    if os.path.exists(directory / INDEX):
        return os.path.exists(directory / COMPLETE)
    if os.path.exists(directory / TREE) or not os.path.exists(directory / STEP_JSON):
        return False
    try:
        return {"step", "timestamp"} <= read_object(directory / STEP_JSON, _MAX_BYTES).keys()
    except CheckpointError:  # another program's file
        return False


def is_step(path: Path) -> bool:
    """Whether a directory is named as a step of a training run is: `40`, `step-40` or `run-40`."""
    return _STEP.fullmatch(path.name) is not None


def latest_step(directory: Path) -> Path | None:
    """Find the weights of the last step that a trainer saved in `directory`; None where there are no steps.

    A step is a directory with a number, in which the weights are one of the items.
    """
    if os.path.exists(directory / TREE) or is_zarr_tree(directory):
        return None
    try:
        steps = [
            (int(match[1]), path) for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))
        ]
    except OSError:
        return None
    for _, step in sorted(steps, reverse=True):
        weights = _weights_of(step)
        if weights is not None:
            return weights
    return None


def weights_in(directory: Path) -> Path:
    """Find the weights of a step, or of the last step in a directory, or the directory itself has them."""
    return latest_step(directory) or _weights_of(directory) or directory


def _weights_of(step: Path) -> Path | None:
    found = next((step / item for item in _ITEMS if os.path.exists(step / item / TREE)), None)
    return step if found is None and is_zarr_tree(step) else found
