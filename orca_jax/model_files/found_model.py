"""A model by its name: the demo model, a directory, a name on the hub, or a preset with random weights."""

from dataclasses import dataclass, replace
from pathlib import Path

from orca_jax.config import LoadFormat
from orca_jax.errors import BadModelConfig, ConfigError, NotACheckpoint
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.presets.by_name import PRESETS
from orca_jax.families.strict_json import shown
from orca_jax.model_files.description import model_config
from orca_jax.model_files.generation_config import read_generation_defaults
from orca_jax.model_files.locate import find_directory
from orca_jax.request.generation_defaults import NO_DEFAULTS, GenerationDefaults
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.request.tokenizer_config import read_tokenizer_config

_TOKENIZER = "tokenizer.json"
DEMO_MODEL = Path(__file__).parents[1] / "demo_model"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model whose weights are not read yet; a preset has neither tokenizer nor directory.

    `config` has all end-of-sequence tokens: config.json's, the generation defaults' and the tokenizer's.
    `text_directory` has the files beside the tokenizer: its config and chat templates. `own` is the module of
    a model that a user wrote (launch/own_model.py).
    """

    name: str
    config: ModelConfig
    tokenizer: Tokenizer | None
    directory: Path | None
    generation: GenerationDefaults = NO_DEFAULTS
    text_directory: Path | None = None
    own: object | None = None


def find_model(
    model: str | Path | None, load_format: LoadFormat, generation_config: str = "none"
) -> FoundModel:
    """Find the model that `model` names; None is the demo model.

    `generation_config` is "auto" for the generation_config.json of the model's directory, "none", or another
    directory that has one. Raises ConfigError or a CheckpointError.
    """
    place = DEMO_MODEL if model is None else model
    name = "the demo model" if model is None else str(model)
    if not isinstance(place, str | Path):
        raise ConfigError(f"model is {model!r}; it must be a directory, a name, or None for the demo model")
    if load_format == "dummy" and str(place) in PRESETS:
        generation = read_generation_defaults(None, generation_config)
        config = _with_end_tokens(PRESETS[str(place)], generation, None)
        return FoundModel(name, config, None, None, generation)
    try:
        directory = find_directory(place)
    except NotACheckpoint as error:
        if str(place) not in PRESETS:
            raise
        hint = f'{place} is also a preset: load_format="dummy" runs it with random weights'
        raise NotACheckpoint(f"{error}; {hint}") from error
    generation = read_generation_defaults(directory, generation_config)
    config = _with_end_tokens(_held(model_config(directory), load_format), generation, None)
    found = FoundModel(name, config, None, directory, generation, directory)
    return with_tokenizer(found, directory) if (directory / _TOKENIZER).exists() else found


def with_tokenizer(found: FoundModel, place: str | Path) -> FoundModel:
    """The model with the tokenizer at `place`, a tokenizer.json or the directory that has one.

    Its end-of-sequence token ends the model's outputs too. Raises ConfigError or a CheckpointError.
    """
    path = Path(place)
    path = path / _TOKENIZER if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"tokenizer is {shown(str(place))}; it must be a {_TOKENIZER}, or a directory that has one"
        )
    tokenizer = Tokenizer.from_file(path)
    end_name = read_tokenizer_config(path.parent).special_tokens.get("eos_token")
    end = None if end_name is None else tokenizer.token_id(end_name)
    config = _with_end_tokens(found.config, found.generation, end)
    return replace(found, config=config, tokenizer=tokenizer, text_directory=path.parent)


def find_config(model: str | Path | None, load_format: LoadFormat = "auto") -> ModelConfig:
    """The config of the model that `model` names; None is the demo model. Reads and fetches no weights.

    With the `load_format` packed its experts are packed in MXFP4.

    Raises ConfigError or a CheckpointError.
    """
    if str(model) in PRESETS and not Path(str(model)).is_dir():
        return _held(PRESETS[str(model)], load_format)
    found = model_config(find_directory(DEMO_MODEL if model is None else model, weights=False))
    return _held(found, load_format)


def _held(model: ModelConfig, load_format: LoadFormat) -> ModelConfig:
    """The model as its devices hold it."""
    return model.with_packed_experts() if load_format == "packed" else model


def _with_end_tokens(config: ModelConfig, generation: GenerationDefaults, end: int | None) -> ModelConfig:
    """`config` with the end-of-sequence tokens of the generation defaults and the tokenizer added."""
    more = (*generation.eos_token_ids, *([] if end is None else [end]))
    try:
        return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))
    except ConfigError as error:
        raise BadModelConfig(
            f"{generation.source or 'the tokenizer'} does not fit the model (vocab_size "
            f"{config.vocab_size}): {error}"
        ) from error
