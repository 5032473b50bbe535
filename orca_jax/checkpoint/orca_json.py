"""Reads orca.json, which describes the model in an Orbax directory.

    {"model": {"vocab_size": 256, ...},             families/gpt_config.py or config_json.py
     "checkpoint": "40/default",                    the arrays' directory below this one; default "."
     "names": {"layers.{i}.up.weight": {"name": "blocks.{i}.up.kernel", "transpose": true}, ...},
     "ignore": ["opt_state.*"]}                     arrays that are not weights

Omit `names` if the arrays have our names. docs/checkpoints.md is the user documentation.
"""

import fnmatch
import os.path
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, get_args

from orca_jax.errors import BadModelConfig, ConfigError, NotACheckpoint
from orca_jax.families.config_json import config_from_json
from orca_jax.families.gpt_config import gpt_config
from orca_jax.families.hf_config import check_tokenizer, read_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import in_layers, parameter_table
from orca_jax.families.stored_name import HeadOrder, StoredName, own_order
from orca_jax.families.strict_json import read_object, shown

ORCA_JSON = "orca.json"
_MAX_BYTES = 1_000_000

# The type of each field; ModelConfig checks the values.
_FIELDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(
        ("vocab_size", "n_positions", "hidden_size", "n_layers", "n_heads", "ffn_size"),
        ((int,), "a whole number"),
    ),
    **dict.fromkeys(("position_offset", "embedding_size"), ((int,), "a whole number")),
    **dict.fromkeys(("activation", "norm"), ((str,), "text")),
    **dict.fromkeys(("final_norm", "use_bias", "tie_embeddings"), ((bool,), "true or false")),
    "layer_norm_eps": ((int, float), "a number"),
    "bos_token_id": ((int, type(None)), "a token id or null"),
    "eos_token_ids": ((list,), "a list of token ids"),
}
_NEEDED = ("vocab_size", "n_positions", "hidden_size", "n_layers", "n_heads", "ffn_size")


@dataclass(frozen=True, slots=True)
class Description:
    """A model in an Orbax directory: its shape, and the directory and names of its arrays."""

    path: Path  # the file with this description
    model: ModelConfig
    checkpoint: Path
    names: dict[str, StoredName]
    ignore: tuple[str, ...] = ()

    def ignores(self, name: str) -> bool:
        """Whether an array is declared not to be a weight."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignore)


def read_description(directory: Path) -> Description:
    """Read orca.json, or config.json if there is no orca.json.

    Raises NotACheckpoint if neither exists, CorruptFile, BadModelConfig or UnsupportedModel.
    """
    path = directory / ORCA_JSON
    if not os.path.exists(path):
        if not os.path.exists(directory / "config.json"):
            raise NotACheckpoint(
                f"{shown(directory)} is an Orbax checkpoint, but has neither {ORCA_JSON} nor config.json to "
                "describe its model"
            )
        model = read_config(directory)
        return Description(directory / "config.json", model, directory, _same_names(model))
    values = read_object(path, _MAX_BYTES)
    _known(path, "", values, {"model", "checkpoint", "names", "ignore"})
    model = _model(path, values.get("model"))
    check_tokenizer(model, path, directory / "tokenizer.json")
    names = _same_names(model) if "names" not in values else _names(path, model, values["names"])
    ignore = values.get("ignore", [])
    if not isinstance(ignore, list) or not all(isinstance(pattern, str) for pattern in ignore):
        raise _bad(path, "ignore", "a list of patterns", ignore)
    where = values.get("checkpoint", ".")
    if not isinstance(where, str) or "\0" in where or not _is_below(where):
        raise _bad(path, "checkpoint", "the path of a directory below this one", where)
    return Description(path, model, directory / where, names, tuple(ignore))


def _is_below(where: str) -> bool:
    path = PurePosixPath(where)
    return not path.is_absolute() and ".." not in path.parts


def _bad(path: Path, name: str, rule: str, value: object) -> BadModelConfig:
    return BadModelConfig(f"{shown(path)}: {shown(name)}: expected {rule}, found {shown(value)}")


def _known(path: Path, where: str, values: dict[str, Any], allowed: set[str]) -> None:
    for name in values:
        if name not in allowed:
            raise _bad(path, where + name, f"one of {', '.join(sorted(allowed))}", name)


def _model(path: Path, values: object) -> ModelConfig:
    if not isinstance(values, dict):
        raise _bad(path, "model", f"an object with {', '.join(_NEEDED)} at least", values)
    if "layers" in values:
        try:
            return config_from_json(values, partial(_bad, path))
        except ConfigError as error:
            raise BadModelConfig(f"{shown(path)}: model: {shown(str(error))}") from error
    _known(path, "model.", values, set(_FIELDS))
    for name in _NEEDED:
        if name not in values:
            raise _bad(path, f"model.{name}", "a whole number", None)
    fields: dict[str, Any] = {}
    for name, value in values.items():
        kinds, rule = _FIELDS[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise _bad(path, f"model.{name}", rule, value)
        fields[name] = tuple(value) if isinstance(value, list) else value
    if fields.get("embedding_size", 1) < 1:  # 0 would mean the hidden size
        raise _bad(path, "model.embedding_size", "at least 1", fields["embedding_size"])
    try:
        return gpt_config(**fields)
    except ConfigError as error:
        raise BadModelConfig(f"{shown(path)}: model: {shown(str(error))}") from error


def _same_names(model: ModelConfig) -> dict[str, StoredName]:
    return {
        name: StoredName((name,), heads=own_order(parameter, model.attention))
        for name, parameter in parameter_table(model).items()
    }


def _names(path: Path, model: ModelConfig, values: object) -> dict[str, StoredName]:
    """The stored name of each parameter, from its own entry or from its pattern for all layers."""
    if not isinstance(values, dict):
        raise _bad(path, "names", "an object of our names and the checkpoint's", values)
    names: dict[str, StoredName] = {}
    used: set[str] = set()
    table = parameter_table(model)
    for parameter in table:
        pattern, layer = in_layers(parameter)
        key = parameter if parameter in values else pattern
        if key not in values:
            raise _bad(path, "names", f"an entry for {pattern}", sorted(values))
        stored = _stored(path, key, values[key]).in_layer(layer)
        heads = stored.heads or own_order(table[parameter], model.attention)
        if heads == "slices" and len(stored.names) == 3:
            heads = "separate"
        names[parameter] = replace(stored, heads=heads)
        used.add(key)
    for key in values:
        if key not in used:
            raise _bad(path, "names", "only names of this model's parameters", key)
    return names


def _stored(path: Path, key: str, value: object) -> StoredName:
    entry: dict[str, Any] = value if isinstance(value, dict) else {"name": value}
    _known(path, f"names.{key}.", entry, {"name", "transpose", "reshape", "heads"})
    named = entry.get("name")
    listed: list[Any] = named if isinstance(named, list) else [named]
    if not listed or not all(isinstance(name, str) for name in listed):
        raise _bad(path, f"names.{key}", "a name or a list of names", named)
    for option in ("transpose", "reshape"):
        if not isinstance(entry.get(option, False), bool):
            raise _bad(path, f"names.{key}.{option}", "true or false", entry[option])
    heads = entry.get("heads")
    if heads is not None and heads not in get_args(HeadOrder):
        raise _bad(path, f"names.{key}.heads", f"one of {', '.join(get_args(HeadOrder))}", heads)
    return StoredName(tuple(listed), entry.get("transpose", False), entry.get("reshape", False), heads)
