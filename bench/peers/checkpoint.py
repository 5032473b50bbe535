"""The checkpoint that all engines of a comparison load."""

import json
from functools import partial
from pathlib import Path

import numpy as np

from orca_jax.checkpoint.expert_view import expert_shapes
from orca_jax.checkpoint.head_view import shape_in_file, stored_shapes
from orca_jax.checkpoint.safetensors_writer import Tensor, write_files
from orca_jax.families.hf_config import hf_config_of
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import Initial, attention_of, parameter_table
from orca_jax.families.registry import FAMILIES


def write_random_checkpoint(
    directory: Path, model: ModelConfig, *, seed: int = 0, max_file_bytes: int = 1 << 30
) -> None:
    """Write random weights in float32, with the layout and names of the model's Hugging Face family.

    Weights are normal with deviation 0.02; norms have scale 1 and bias 0. Raises UnsupportedModel if no
    family can describe the model.
    """
    config = hf_config_of(model)
    family = FAMILIES[config["model_type"]]
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}  # layers may share one
    for name, parameter in parameter_table(model).items():
        stored = family.stored_name(name, family.prefixes[0], model)
        if stored.by_expert:
            shapes = expert_shapes(parameter, stored)
        else:
            of_heads = stored_shapes(parameter, stored, attention_of(model, name))
            shapes = [shape_in_file(shape, stored) for shape in of_heads]
        for tensor, shape in zip(stored.names, shapes, strict=True):
            read = partial(_draw, rng, parameter.initial, shape)
            tensors.setdefault(tensor, Tensor(tensor, shape, np.dtype("f4"), read))
    write_files(directory, [*tensors.values()], max_file_bytes)


def _draw(rng: np.random.Generator, initial: Initial, shape: tuple[int, ...]) -> np.ndarray:
    if initial != "normal":
        return np.full(shape, float(initial == "ones"), np.float32)
    return rng.standard_normal(shape, np.float32) * np.float32(0.02)
