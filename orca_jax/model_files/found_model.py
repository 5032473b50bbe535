"""A model by its name: the demo model, a directory, a name on the hub, or a preset with random weights."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orca_jax.config import EngineConfig, KVCacheDtype, LoadFormat, Rounding
from orca_jax.errors import (
    LIKELY,
    BadModelConfig,
    ConfigError,
    InvalidSamplingParameter,
    NotACheckpoint,
    closest,
)
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.presets import PRESETS
from orca_jax.families.quantization_config import rounded_forms
from orca_jax.families.strict_json import read_object, shown
from orca_jax.families.trainers.array_trees import has_array_tree
from orca_jax.families.trainers.orca_json import described_model
from orca_jax.gguf_file import GgufFile, is_gguf, open_gguf
from orca_jax.model_files.locate import find_directory
from orca_jax.model_files.sentence_pooling import stored_pooling
from orca_jax.model_files.weight_files import find_weight_files
from orca_jax.request.generation_defaults import NO_DEFAULTS, GenerationDefaults
from orca_jax.request.gguf_tokenizer import has_tokenizer
from orca_jax.request.pooling import Pooling
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.request.tokenizer_config import read_tokenizer_config

_TOKENIZER = "tokenizer.json"
DEMO_MODEL = Path(__file__).parents[1] / "demo_model"

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model whose weights are not read yet; a preset has neither tokenizer nor directory.

    `config` has all end-of-sequence tokens: config.json's, the generation defaults' and the tokenizer's.
    `text_directory` has the tokenizer's config and chat templates. `user_model` is a module of the user's
    own class (user_model/find.py). `note` names fields of config.json that are not used, to show at load.
    `pooling` is that of embeddings, if the user or the checkpoint says so.
    """

    name: str
    config: ModelConfig
    tokenizer: Tokenizer | None
    directory: Path | None
    generation: GenerationDefaults = NO_DEFAULTS
    text_directory: Path | None = None
    user_model: object | None = None
    note: str = ""
    pooling: Pooling | None = None


def find_model(
    model: str | Path | None,
    load_format: LoadFormat,
    generation_config: str | Path = "none",
    tokenizer: str | Path | None = None,
    quantization: Rounding | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    pooling: Pooling | None = None,
) -> FoundModel:
    """Find the model that `model` names; None is the demo model.

    `generation_config` is "auto" for generation_config.json in the model's directory, "none", or another
    directory with that file. `tokenizer` is a place as in `with_tokenizer`, to use instead of the model's.
    With `quantization` the matrices of its layers are rounded; its caches hold `kv_cache_dtype`. `pooling` is
    taken instead of the checkpoint's.

    Raises ConfigError or a CheckpointError.
    """
    found = _found(model, load_format, generation_config, quantization, tokenizer is None, pooling)
    found = replace(found, config=with_kv_cache(found.config, kv_cache_dtype))
    return found if tokenizer is None else with_tokenizer(found, tokenizer)


def _found(
    model: str | Path | None,
    load_format: LoadFormat,
    generation_config: str | Path,
    quantization: Rounding | None,
    needs_tokenizer: bool,
    pooling: Pooling | None,
) -> FoundModel:
    name = "the demo model" if model is None else str(model)
    if load_format == "dummy" and str(model) in PRESETS:
        generation = read_generation_defaults(None, generation_config)
        config = _with_end_tokens(_held(PRESETS[str(model)], load_format, quantization), generation, None)
        return FoundModel(name, config, None, None, generation, pooling=pooling)
    directory = _directory(model)
    generation = read_generation_defaults(directory, generation_config)
    described, note = described_model(directory)
    config = _with_end_tokens(_held(described, load_format, quantization), generation, None)
    pooling = stored_pooling(directory, instead=pooling)
    found = FoundModel(name, config, None, directory, generation, directory, note=note, pooling=pooling)
    if is_gguf(directory):  # whose tokenizer may be of a kind that is not read, and takes a second to make
        has_one = needs_tokenizer and has_tokenizer(open_gguf(directory))
    else:
        has_one = (directory / _TOKENIZER).exists()
    return with_tokenizer(found, directory) if has_one else found


def with_tokenizer(found: FoundModel, place: str | Path) -> FoundModel:
    """Add the tokenizer at `place`: a tokenizer.json, a directory with one, or a GGUF file.

    Its end-of-sequence token is added to the model's. Raises ConfigError or a CheckpointError.
    """
    path = _tokenizer_file(place)
    tokenizer = Tokenizer.from_file(path)
    directory = path if is_gguf(path) else path.parent
    end_name = read_tokenizer_config(directory).special_tokens.get("eos_token")
    end = None if end_name is None else tokenizer.token_id(end_name)
    if end is not None and end >= found.config.vocab_size:
        end = None  # the model never generates an added token without an embedding
    config = _with_end_tokens(found.config, found.generation, end)
    if config.ranker and config.embedding.n_segments > 1:
        separator = read_tokenizer_config(directory).special_tokens.get("sep_token", "[SEP]")
        embedding = replace(config.embedding, separator=tokenizer.token_id(separator))
        config = replace(config, embedding=embedding)
    return replace(found, config=config, tokenizer=tokenizer, text_directory=directory)


def find_config(
    model: str | Path | None,
    load_format: LoadFormat = "auto",
    quantization: Rounding | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> ModelConfig:
    """Find the config of the model that `model` names, without its weights; None is the demo model.

    With the `load_format` packed its experts are in MXFP4; with `quantization` its matrices are rounded; its
    caches hold `kv_cache_dtype`.

    Raises ConfigError or a CheckpointError.
    """
    if str(model) in PRESETS and not Path(str(model)).is_dir():
        found = PRESETS[str(model)]
    else:
        found = described_model(_directory(model, weights=False))[0]
    return with_kv_cache(_held(found, load_format, quantization), kv_cache_dtype)


def with_kv_cache(model: ModelConfig, dtype: KVCacheDtype) -> ModelConfig:
    """The model whose caches hold `dtype`. Raises ConfigError."""
    return model if dtype == "auto" else model.with_kv_code(dtype)


def check_model(engine: EngineConfig, *, weights: bool = True) -> None:
    """Raise the error of loading this engine's model, as far as file names and JSON tell.

    Only JSON is fetched from the hub. Without `weights` the weights' files may be missing. A function that
    makes a model is not checked, because its module would import JAX.
    """
    model, load_format = engine.model, engine.load_format
    if engine.tokenizer is not None:
        _tokenizer_file(engine.tokenizer)
    if is_function(model):
        check_rounded(engine)
        return
    if load_format == "dummy" and str(model) in PRESETS:
        with_kv_cache(_held(PRESETS[str(model)], load_format, engine.quantization), engine.kv_cache_dtype)
        read_generation_defaults(None, engine.generation_config)
        return
    directory = _directory(model, weights=False)
    held = _held(described_model(directory)[0], load_format, engine.quantization)
    with_kv_cache(held, engine.kv_cache_dtype)
    read_generation_defaults(directory, engine.generation_config)
    is_here = model is None or Path(model).expanduser() == directory
    of_its_own = has_array_tree(directory) or is_gguf(directory)
    if weights and is_here and load_format != "dummy" and not of_its_own:
        find_weight_files(directory)


def _tokenizer_file(place: str | Path) -> Path:
    path = Path(place)
    path = path / _TOKENIZER if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"tokenizer is {shown(str(place))}; it must be a {_TOKENIZER}, a directory that has one, or a "
            "GGUF file"
        )
    return path


def is_function(model: object) -> bool:
    """Whether a model is named by a function that makes it, "package.file:function"."""
    return isinstance(model, str) and _FUNCTION.fullmatch(model) is not None


def _directory(model: object, *, weights: bool = True) -> Path:
    """Find the model's directory; an error has a hint where the name is close to a preset's."""
    if model is None:
        return DEMO_MODEL
    if not isinstance(model, str | Path):
        raise ConfigError(f"model is {model!r}; it must be a directory, a name, or None for the demo model")
    try:
        return find_directory(model, weights=weights)
    except NotACheckpoint as error:
        preset = closest(str(model), PRESETS, at_least=LIKELY)
        if preset is None:
            raise
        is_one = f"{model} is also a preset" if preset == str(model) else f"there is a preset {preset}"
        raise NotACheckpoint(f'{error}; {is_one}: load_format="dummy" runs it with random weights') from error


def check_rounded(engine: EngineConfig) -> None:
    """Raise ConfigError if a user's model is to be rounded."""
    if engine.quantization is not None:
        raise ConfigError("quantization rounds checkpoints; a model of your own holds its weights itself")


def _held(model: ModelConfig, load_format: LoadFormat, quantization: Rounding | None) -> ModelConfig:
    """The model as its devices hold it."""
    held = model.with_packed_experts() if load_format == "packed" else model
    return held if quantization is None else held.with_forms(rounded_forms(held, quantization))


def _with_end_tokens(config: ModelConfig, generation: GenerationDefaults, end: int | None) -> ModelConfig:
    """Add the end-of-sequence tokens of the generation defaults and the tokenizer."""
    more = (*generation.eos_token_ids, *([] if end is None else [end]))
    try:
        return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))
    except ConfigError as error:
        raise BadModelConfig(
            f"{generation.source or 'the tokenizer'} does not fit the model (vocab_size "
            f"{config.vocab_size}): {error}"
        ) from error


NAME = "generation_config.json"
_MAX_BYTES = 1_000_000
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# llama.cpp's names of the same in a GGUF file.
_GGUF_PREFIX = "general.sampling."
_GGUF_SAMPLING: Mapping[str, str] = {
    **{"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"},
    "penalty_repeat": "repetition_penalty",
}
# Parameters that transformers applies and the engine does not, with the value that changes nothing.
_NOT_APPLIED: Mapping[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "length_penalty": 1.0,
    "penalty_alpha": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "exponential_decay_length_penalty": None,
    "sequence_bias": None,
    "guidance_scale": None,
    "watermarking_config": None,
    "min_length": 0,
    "min_new_tokens": None,
    "stop_strings": None,
}


def read_generation_defaults(directory: Path | None, choice: str | Path) -> GenerationDefaults:
    """Read the defaults in `directory` or a GGUF file for "auto", in another directory, or none for "none".

    `do_sample: false` means greedy decoding, and becomes temperature 0. Raises ConfigError for a directory
    without the file, NotACheckpoint, CorruptFile, or BadModelConfig for a value out of its range.
    """
    if choice == "none":
        return NO_DEFAULTS
    if choice == "auto":
        if directory is not None and is_gguf(directory):
            return _of_gguf(open_gguf(directory))
        path = None if directory is None else directory / NAME
        if path is None or not path.exists():
            return NO_DEFAULTS
    else:
        path = Path(choice).expanduser() / NAME
        if not path.exists():
            raise ConfigError(
                f"generation_config is {shown(str(choice))}; it must be auto, none, or a directory with "
                f"{NAME}"
            )
    values = read_object(path, _MAX_BYTES)
    fields = ConfigFields(path, values)
    sampling = {name: values[name] for name in _SAMPLING if values.get(name) is not None}
    if not fields.flag("do_sample", True):
        sampling["temperature"] = 0.0
    length = {} if values.get("max_new_tokens") is None else {"max_tokens": values["max_new_tokens"]}
    _check(path, {**sampling, **length})
    return GenerationDefaults(
        source=shown(path),
        sampling=sampling,
        max_tokens=length.get("max_tokens"),
        eos_token_ids=fields.token_ids("eos_token_id") or (),
        ignored=tuple(
            name
            for name, neutral in _NOT_APPLIED.items()
            if values.get(name) not in (None, [], {}, False) and values[name] != neutral
        ),
    )


def _of_gguf(file: GgufFile) -> GenerationDefaults:
    """Read llama.cpp's defaults for sampling, which a file may have."""
    ours = {name: each for name in _GGUF_SAMPLING if (each := f"{_GGUF_PREFIX}{name}") in file}
    if not ours:
        return NO_DEFAULTS
    sampling = {_GGUF_SAMPLING[name]: file.number(key) for name, key in ours.items()}
    _check(file.path, sampling)
    others = [key for key in file.keys if key.startswith(_GGUF_PREFIX) and key not in ours.values()]
    return GenerationDefaults(source=shown(file.path), sampling=sampling, ignored=tuple(others))


def _check(path: Path, values: Mapping[str, Any]) -> None:
    """Raise BadModelConfig for a value out of its range."""
    try:
        SamplingParams(**values)
    except InvalidSamplingParameter as error:
        message = str(error).replace("max_tokens", "max_new_tokens")
        raise BadModelConfig(
            f"{shown(path)}: {message}; correct it, or ignore the file with --generation-config none"
        ) from error
