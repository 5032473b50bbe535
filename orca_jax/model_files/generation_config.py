"""Reads generation_config.json: the sampling defaults and end-of-sequence tokens that a model recommends."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orca_jax.errors import BadModelConfig, ConfigError, InvalidSamplingParameter
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.strict_json import read_object, shown
from orca_jax.gguf_file import GgufFile, is_gguf
from orca_jax.request.generation_defaults import NO_DEFAULTS, GenerationDefaults
from orca_jax.request.sampling_params import SamplingParams

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
            return _of_gguf(GgufFile(directory))
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
