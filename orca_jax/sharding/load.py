"""A model by its name: the demo model, a directory, a name on the hub, or a preset with random weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from orca_jax.config import LoadFormat, ModelConfig
from orca_jax.cost_model import weight_bytes_total
from orca_jax.errors import ConfigError, NotACheckpoint
from orca_jax.model.gpt import Parameters, init_parameters
from orca_jax.model.presets import PRESETS
from orca_jax.sharding.capacity import Device, check_memory
from orca_jax.sharding.checkpoint import find_directory, load_checkpoint
from orca_jax.sharding.hf_config import read_config
from orca_jax.tokenizer import Tokenizer

DEMO_MODEL = Path(__file__).parents[1] / "demo_model"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, and what came with it; a preset has neither tokenizer nor directory."""

    name: str
    config: ModelConfig
    parameters: Parameters
    tokenizer: Tokenizer | None
    directory: Path | None


def load_model(
    model: str | Path | None,
    load_format: LoadFormat,
    dtype: jnp.dtype,
    seed: int,
    device: Device,
    on_load: Callable[[int, int], None] | None,
) -> LoadedModel:
    """Load what `model` names; the arguments are those of `orca_jax.llm.LLM`.

    Raises ConfigError or a CheckpointError.
    """
    place = DEMO_MODEL if model is None else model
    name = "the demo model" if model is None else str(model)
    if not isinstance(place, str | Path):
        raise ConfigError(f"model is {model!r}; it must be a directory, a name, or None for the demo model")
    if load_format == "dummy":
        directory = None if str(place) in PRESETS else find_directory(place)
        config = PRESETS[str(place)] if directory is None else read_config(directory)
        tokenizer = None if directory is None else _tokenizer(directory)
        check_memory("the weights", weight_bytes_total(config, dtype.itemsize), device)
        parameters = init_parameters(config, jax.random.key(seed), dtype)
        return LoadedModel(name, config, parameters, tokenizer, directory)
    try:
        checkpoint = load_checkpoint(place, dtype=dtype, on_bytes=on_load)
    except NotACheckpoint as error:
        if str(place) not in PRESETS:
            raise
        hint = f'{place} is also a preset: load_format="dummy" runs it with random weights'
        raise NotACheckpoint(f"{error}; {hint}") from error
    directory = checkpoint.directory
    return LoadedModel(name, checkpoint.config, checkpoint.parameters, _tokenizer(directory), directory)


def _tokenizer(directory: Path) -> Tokenizer | None:
    path = directory / "tokenizer.json"
    return Tokenizer.from_file(path) if path.exists() else None
