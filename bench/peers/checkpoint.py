"""The checkpoint that all engines of a comparison load."""

import json
from functools import partial
from pathlib import Path

import numpy as np

from orca_jax.checkpoint.safetensors_writer import Tensor, write_files
from orca_jax.checkpoint.shard_reader import stacked_shape
from orca_jax.families.hf_config import hf_config_of
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.tensor_names import PREFIXES, source
from orca_jax.model.gpt import parameter_shapes


def write_random_gpt2(directory: Path, model: ModelConfig, *, seed: int = 0) -> None:
    """GPT-2's layout and names, float32: normal with deviation 0.02, norms at 1 and 0, as initialised."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf_config_of(model)))
    rng = np.random.default_rng(seed)
    tensors: list[Tensor] = []
    for name, shape in parameter_shapes(model).items():
        wanted = source(name, "gpt2", PREFIXES["gpt2"][0])
        theirs = stacked_shape(name, shape)[:: -1 if wanted.transpose else 1]
        read = partial(_draw, rng, name, theirs)
        tensors.append(Tensor(wanted.names[0], theirs, np.dtype("f4"), read))
    write_files(directory, tensors, 1 << 30)


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith((".scale", ".bias")):
        return np.full(shape, float(name.endswith(".scale")), np.float32)
    return rng.standard_normal(shape, np.float32) * np.float32(0.02)
