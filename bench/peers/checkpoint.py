"""The checkpoint that all engines of a comparison load."""

import json
from functools import partial
from pathlib import Path

import numpy as np

from orca_jax.checkpoint.safetensors_writer import Tensor, write_files
from orca_jax.families.decoders.gpt2 import GPT2
from orca_jax.families.hf_config import hf_config_of
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import Initial, parameter_table


def write_random_gpt2(
    directory: Path, model: ModelConfig, *, seed: int = 0, max_file_bytes: int = 1 << 30
) -> None:
    """Write random weights with GPT-2's layout and names in float32: normal with deviation 0.02, norms at 1
    and 0.
    """
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf_config_of(model)))
    rng = np.random.default_rng(seed)
    tensors: list[Tensor] = []
    for name, parameter in parameter_table(model).items():
        stored = GPT2.stored_name(name, GPT2.prefixes[0], model)
        shape = parameter.stacked_shape[:: -1 if stored.transpose else 1]
        read = partial(_draw, rng, parameter.initial, shape)
        tensors.append(Tensor(stored.names[0], shape, np.dtype("f4"), read))
    write_files(directory, tensors, max_file_bytes)


def _draw(rng: np.random.Generator, initial: Initial, shape: tuple[int, ...]) -> np.ndarray:
    if initial != "normal":
        return np.full(shape, float(initial == "ones"), np.float32)
    return rng.standard_normal(shape, np.float32) * np.float32(0.02)
