"""Reads orca.json, which describes the model in an Orbax directory.

    {"model": {"vocab_size": 256, ...},             families/gpt_config.py or config_json.py
     "checkpoint": "40/default",                    the arrays' directory below this one; default "."
     "names": {"layers.{i}.up.weight": {"name": "blocks.{i}.up.kernel", "transpose": true}, ...},
     "ignore": ["opt_state.*"],                     arrays that are not weights
     "rotary": "interleaved"}                       which of MaxText's two orders a checkpoint of its has

Omit `model` where config.json is beside it or give a preset's name, and `names` if the arrays have our names
or those of a known trainer. docs/checkpoints.md is the user documentation.
"""

import fnmatch
import math
import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, get_args

from orca_jax.errors import BadModelConfig, ConfigError, NotACheckpoint
from orca_jax.families.config_json import config_from_json
from orca_jax.families.gpt_config import gpt_config
from orca_jax.families.hf_config import check_tokenizer, read_hf_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import in_layers, layers_with, parameter_table
from orca_jax.families.presets.by_name import PRESETS
from orca_jax.families.stored_name import HeadOrder, StoredName, own_order
from orca_jax.families.strict_json import read_object, shown
from orca_jax.families.trainers.array_form import EXPERTS, LETTERS, ArrayForm

ORCA_JSON = "orca.json"
TREE = "_METADATA"  # Orbax writes it last
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
_FORM: Mapping[str, tuple[tuple[type, ...], str]] = {
    "axes": ((str,), f"letters of {LETTERS} and at most one number, with spaces between"),
    "part": ((int,), "a whole number"),
    "permute_rope": ((bool,), "true or false"),
    "multiply": ((int, float), "a number"),
    "add": ((int, float), "a number"),
}
_ROTARY = {"halves": False, "interleaved": True}
_ITEMS = ("model_params", "items", "default", "params", ".")  # Tunix, MaxText, a manager's only one, others
_NEEDED = ("vocab_size", "n_positions", "hidden_size", "n_layers", "n_heads", "ffn_size")


@dataclass(frozen=True, slots=True)
class Description:
    """A model in an Orbax directory: its shape, and the directory and names of its arrays."""

    path: Path  # the file with the model
    model: ModelConfig
    checkpoint: Path
    names: dict[str, StoredName] | None  # None: ours, or a trainer's
    ignore: tuple[str, ...] = ()
    interleaved: bool | None = None  # of a trainer's rotary positions; None: as the trainer has such a model
    note: str = ""  # as HFConfig's

    def ignores(self, name: str) -> bool:
        """Whether an array is declared not to be a weight."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignore)


def read_description(directory: Path) -> Description:
    """Read orca.json, or config.json if there is no orca.json.

    Raises NotACheckpoint if neither exists, CorruptFile, BadModelConfig or UnsupportedModel.
    """
    path = directory / ORCA_JSON
    if not os.path.exists(path):
        if not _has_description(directory):
            described = next((each for each in directory.parents[:2] if _has_description(each)), None)
            what_to_do = "write one (docs/checkpoints.md), or copy the config.json of its model there"
            if described is not None:
                what_to_do = f"name {shown(described)}, which has one"
            raise NotACheckpoint(
                f"{shown(directory)} is an Orbax checkpoint, but has neither {ORCA_JSON} nor config.json to "
                f"describe its model; {what_to_do}"
            )
        hf = read_hf_config(directory)
        return Description(hf.path, hf.model, latest_step(directory) or directory, None, note=hf.note)
    values = read_object(path, _MAX_BYTES)
    _known(path, "", values, {"model", "checkpoint", "names", "ignore", "rotary"})
    hf = None if "model" in values else read_hf_config(directory)
    model = _model(path, values["model"]) if hf is None else hf.model
    check_tokenizer(model, path, directory / "tokenizer.json")
    names = None if "names" not in values else _names(path, model, values["names"])
    ignore = values.get("ignore", [])
    if not isinstance(ignore, list) or not all(isinstance(pattern, str) for pattern in ignore):
        raise _bad(path, "ignore", "a list of patterns", ignore)
    rotary = values.get("rotary")
    if "rotary" in values and rotary not in _ROTARY:
        raise _bad(path, "rotary", f"one of {', '.join(_ROTARY)}", rotary)
    place = latest_step(directory) or directory
    if "checkpoint" in values:
        where = values["checkpoint"]
        if not isinstance(where, str) or "\0" in where or not _is_below(where):
            raise _bad(path, "checkpoint", "the path of a directory below this one", where)
        place = directory / where
    source, note = (path, "") if hf is None else (hf.path, hf.note)
    interleaved = None if rotary is None else _ROTARY[rotary]
    return Description(source, model, place, names, tuple(ignore), interleaved, note)


def _has_description(directory: Path) -> bool:
    return any(os.path.exists(directory / name) for name in (ORCA_JSON, "config.json"))


def latest_step(directory: Path) -> Path | None:
    """The weights of the last step that a trainer saved in `directory`; None where there are no steps.

    A step is a directory with a number, in which the weights are one of the items.
    """
    if os.path.exists(directory / TREE):
        return None
    try:
        steps = [path for path in directory.iterdir() if re.fullmatch(r"\d{1,18}", path.name)]
    except OSError:
        return None
    for step in sorted(steps, key=lambda path: int(path.name), reverse=True):
        for item in _ITEMS:
            if os.path.exists(step / item / TREE):
                return step / item
    return None


def same_names(model: ModelConfig) -> dict[str, StoredName]:
    """The arrays of a checkpoint with our own names."""
    return {
        name: StoredName((name,), heads=own_order(parameter, model.attention))
        for name, parameter in parameter_table(model).items()
    }


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
    if isinstance(values, str):
        if values not in PRESETS:
            raise _bad(path, "model", f"an object, or one of {', '.join(PRESETS)}", values)
        return PRESETS[values]
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
        if table[parameter].axes[0] == EXPERTS and not all(_has_experts(form) for form in stored.forms):
            rule = "an axis X alone for experts, and no permute_rope"
            raise _bad(path, f"names.{key}.axes", rule, values[key])
        if layer:
            n_layers = len(layers_with(model, parameter))
            forms = (replace(form, layer=int(layer), n_layers=n_layers) for form in stored.forms)
            stored = replace(stored, forms=tuple(forms))
        heads = stored.heads or own_order(table[parameter], model.attention)
        if heads == "slices" and len(stored.names) == 3:
            heads = "separate"
        names[parameter] = replace(stored, heads=heads)
        used.add(key)
    for key in values:
        if key not in used:
            raise _bad(path, "names", "only names of this model's parameters", key)
    return names


def _has_experts(form: ArrayForm) -> bool:
    return EXPERTS in form.letters and not form.interleaved


def _stored(path: Path, key: str, value: object) -> StoredName:
    entry: dict[str, Any] = value if isinstance(value, dict) else {"name": value}
    _known(path, f"names.{key}.", entry, {"name", "transpose", "reshape", "heads", *_FORM})
    named = entry.get("name")
    listed: list[Any] = named if isinstance(named, list) else [named]
    parts = [part if isinstance(part, dict) else {"name": part} for part in listed]
    if not parts or not all(isinstance(part.get("name"), str) for part in parts):
        raise _bad(path, f"names.{key}", "a name or a list of names", named)
    for option in ("transpose", "reshape"):
        if not isinstance(entry.get(option, False), bool):
            raise _bad(path, f"names.{key}.{option}", "true or false", entry[option])
    heads = entry.get("heads")
    if heads is not None and heads not in get_args(HeadOrder):
        raise _bad(path, f"names.{key}.heads", f"one of {', '.join(get_args(HeadOrder))}", heads)
    general = {option: entry[option] for option in _FORM if option in entry}
    forms = tuple(_form(path, f"names.{key}.", general | part) for part in parts)
    if not any(forms):
        forms = ()
    elif not all(forms) or "transpose" in entry or "reshape" in entry:
        raise _bad(path, f"names.{key}", "axes for every name, instead of transpose and reshape", named)
    names = tuple(part["name"] for part in parts)
    return StoredName(
        names,
        entry.get("transpose", False),
        entry.get("reshape", False),
        heads,
        tuple(form for form in forms if form is not None),
    )


def _form(path: Path, where: str, entry: dict[str, Any]) -> ArrayForm | None:
    """How an array has a weight, from its entry in `names`; None without `axes`."""
    _known(path, where, entry, {"name", *_FORM})
    options = {option: value for option, value in entry.items() if option != "name"}
    for option, value in options.items():
        kinds, rule = _FORM[option]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise _bad(path, where + option, rule, value)
    if not options:
        return None
    axes = options.get("axes", "")
    letters = axes.split()
    known = all(letter.isdigit() or set(letter) <= set(LETTERS) for letter in letters)
    if not letters or not known or sum(letter.isdigit() for letter in letters) > 1 or letters.count("L") > 1:
        raise _bad(path, where + "axes", _FORM["axes"][1], axes)
    part, n_parts = options.get("part", 0), next((int(each) for each in letters if each.isdigit()), 1)
    if not 0 <= part < n_parts:
        raise _bad(path, where + "part", f"a whole number below the {n_parts} parts of its axis", part)
    multiply = float(options.get("multiply", 1.0))
    if multiply == 0 or not math.isfinite(multiply):
        raise _bad(path, where + "multiply", "a number other than 0", multiply)
    return ArrayForm(
        axes=axes,
        part=part,
        interleaved=options.get("permute_rope", False),
        multiply=multiply,
        add=float(options.get("add", 0.0)),
    )
