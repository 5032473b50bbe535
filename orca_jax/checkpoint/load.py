"""A model by its name: the demo model, a directory, a name on the hub, or a preset with random weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from orca_jax.checkpoint.directory import load_directory, model_config
from orca_jax.checkpoint.locate import find_directory
from orca_jax.config import LoadFormat
from orca_jax.errors import ConfigError, NotACheckpoint
from orca_jax.execution.capacity import check_weights
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.presets import PRESETS
from orca_jax.model.gpt import Parameters
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.sharding.partition import StagePart
from orca_jax.sharding.random_parameters import padded_vocabulary, random_parameters

DEMO_MODEL = Path(__file__).parents[1] / "demo_model"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model before its weights are read, and what came with it; a preset has neither tokenizer nor
    directory.
    """

    name: str
    config: ModelConfig
    tokenizer: Tokenizer | None
    directory: Path | None


def find_model(model: str | Path | None, load_format: LoadFormat) -> FoundModel:
    """What `model` names: None is the demo model. Raises ConfigError or a CheckpointError."""
    place = DEMO_MODEL if model is None else model
    name = "the demo model" if model is None else str(model)
    if not isinstance(place, str | Path):
        raise ConfigError(f"model is {model!r}; it must be a directory, a name, or None for the demo model")
    if load_format == "dummy" and str(place) in PRESETS:
        return FoundModel(name, PRESETS[str(place)], None, None)
    try:
        directory = find_directory(place)
    except NotACheckpoint as error:
        if str(place) not in PRESETS:
            raise
        hint = f'{place} is also a preset: load_format="dummy" runs it with random weights'
        raise NotACheckpoint(f"{error}; {hint}") from error
    return FoundModel(name, model_config(directory), _tokenizer(directory), directory)


def find_config(model: str | Path | None) -> ModelConfig:
    """The shape of what `model` names: None is the demo model. No weights are read, nor fetched from the hub.

    Raises ConfigError or a CheckpointError.
    """
    if str(model) in PRESETS and not Path(str(model)).is_dir():
        return PRESETS[str(model)]
    return model_config(find_directory(DEMO_MODEL if model is None else model, weights=False))


def load_parameters(
    found: FoundModel,
    parts: Sequence[StagePart],
    *,
    load_format: LoadFormat,
    dtype: jnp.dtype,
    seed: int,
    n_devices: int,
    on_load: Callable[[int, int], None] | None = None,
) -> tuple[ModelConfig, Sequence[Parameters]]:
    """Load the weights of these stages onto their devices: the model as it lies there, and each one's.

    The vocabulary is padded so that a stage's devices share it evenly. `n_devices` are those of all stages,
    in whatever process; `seed` is for random weights. Raises ConfigError or a CheckpointError.
    """
    config = padded_vocabulary(found.config, parts[0])
    for part in parts:
        check_weights(config, dtype.itemsize, part, n_devices=n_devices)
    placements = [part.placement(config) for part in parts]
    if load_format == "dummy":
        return config, [random_parameters(config, seed, dtype, placement) for placement in placements]
    assert found.directory is not None
    checkpoint = load_directory(
        found.directory,
        dtype=dtype,
        vocab_multiple=config.vocab_multiple,
        placements=placements,
        on_bytes=on_load,
    )
    return config, checkpoint.stages


def _tokenizer(directory: Path) -> Tokenizer | None:
    path = directory / "tokenizer.json"
    return Tokenizer.from_file(path) if path.exists() else None
