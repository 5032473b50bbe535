"""A model by its name: the demo model, a directory, a name on the hub, or a preset with random weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from orca_jax.config import LoadFormat, ModelConfig
from orca_jax.errors import ConfigError, NotACheckpoint
from orca_jax.model.gpt import Parameters, init_parameter, parameter_shapes
from orca_jax.model.presets import PRESETS
from orca_jax.sharding.capacity import check_weights
from orca_jax.sharding.checkpoint import find_directory, load_checkpoint, model_config
from orca_jax.sharding.partition import StagePart
from orca_jax.tokenizer import Tokenizer

DEMO_MODEL = Path(__file__).parents[1] / "demo_model"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its devices, and what came with it; a preset has neither tokenizer nor directory.

    `parameters` are those of each of `parts`.
    """

    name: str
    config: ModelConfig
    parts: tuple[StagePart, ...]
    parameters: Sequence[Parameters]
    tokenizer: Tokenizer | None
    directory: Path | None


def load_model(
    model: str | Path | None,
    load_format: LoadFormat,
    dtype: jnp.dtype,
    seed: int,
    split: Callable[[ModelConfig], tuple[StagePart, ...]],
    on_load: Callable[[int, int], None] | None,
) -> LoadedModel:
    """Load what `model` names onto the devices of the stages that `split` cuts it into.

    The other arguments are those of `orca_jax.llm.LLM`. Raises ConfigError or a CheckpointError.
    """
    place = DEMO_MODEL if model is None else model
    name = "the demo model" if model is None else str(model)
    if not isinstance(place, str | Path):
        raise ConfigError(f"model is {model!r}; it must be a directory, a name, or None for the demo model")
    if load_format == "dummy" and str(place) in PRESETS:
        config, directory = PRESETS[str(place)], None
    else:
        try:
            directory = find_directory(place)
        except NotACheckpoint as error:
            if str(place) not in PRESETS:
                raise
            hint = f'{place} is also a preset: load_format="dummy" runs it with random weights'
            raise NotACheckpoint(f"{error}; {hint}") from error
        config = model_config(directory)
    parts = split(config)
    config = replace(config, vocab_multiple=math.lcm(config.vocab_multiple, len(parts[0].group)))
    placements = [part.placement(config) for part in parts]
    check_weights(config, dtype.itemsize, parts)
    if load_format == "dummy":
        parameters = [random_parameters(config, seed, dtype, placement) for placement in placements]
    else:
        assert directory is not None
        parameters = load_checkpoint(
            directory,
            dtype=dtype,
            vocab_multiple=config.vocab_multiple,
            placements=placements,
            on_bytes=on_load,
        ).stages
    tokenizer = None if directory is None else _tokenizer(directory)
    return LoadedModel(name, config, parts, parameters, tokenizer, directory)


def random_parameters(
    config: ModelConfig, seed: int, dtype: jnp.dtype, placement: Mapping[str, jax.sharding.Sharding]
) -> Parameters:
    """Those of `placement`, drawn where they lie; the numbers are the same however the model is split."""
    shapes = parameter_shapes(config)
    keys = dict(zip(shapes, jax.random.split(jax.random.key(seed), len(shapes)), strict=True))

    def draw(name: str, sharding: jax.sharding.Sharding) -> jax.Array:
        make = partial(init_parameter, name, shapes[name], dtype=dtype)
        return jax.jit(make, out_shardings=sharding)(keys[name])

    return {name: draw(name, sharding) for name, sharding in placement.items()}


def _tokenizer(directory: Path) -> Tokenizer | None:
    path = directory / "tokenizer.json"
    return Tokenizer.from_file(path) if path.exists() else None
