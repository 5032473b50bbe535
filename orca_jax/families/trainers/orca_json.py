"""Reads orca.json, which describes the model of a directory with a trainer's arrays (array_trees.py).

    {"model": {"vocab_size": 256, ...},             GPTOptions, or a whole ModelConfig (config_json.py)
     "checkpoint": "40/default",                    the arrays' directory below this one; default "."
     "names": {"layers.{i}.up.weight": {"name": "blocks.{i}.up.kernel", "transpose": true}, ...},
     "ignore": ["opt_state.*"],                     arrays that are not weights
     "rotary": "interleaved",                       which of MaxText's two orders its checkpoint has
     "unsure": {}}                                  what a user has to decide (checkpoint/suggested_names.py)

`model` may be a preset's name, or missing where there is a config.json. `names` may be missing where the
arrays have our names or those of a known trainer. docs/checkpoints.md is the user documentation.
"""

import fnmatch
import math
import os.path
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, get_args

from orca_jax.errors import BadModelConfig, ConfigError, NotACheckpoint
from orca_jax.families.attention_config import Attention
from orca_jax.families.config_json import config_from_json, part_from_json
from orca_jax.families.hf_config import check_tokenizer, read_hf_config
from orca_jax.families.limits import even_head_size
from orca_jax.families.model_config import (
    Activation,
    Embedding,
    FeedForward,
    Layer,
    LearnedPositions,
    ModelConfig,
    Residual,
    alike,
)
from orca_jax.families.norm_config import Norm
from orca_jax.families.parameters import attention_of, in_layers, layers_with, parameter_table
from orca_jax.families.presets import PRESETS
from orca_jax.families.stored_name import HeadOrder, StoredName, engine_order
from orca_jax.families.strict_json import read_object, shown
from orca_jax.families.trainers.array_form import EXPERTS, LETTERS, ArrayForm
from orca_jax.families.trainers.array_trees import (
    has_array_tree,
    is_step,
    is_zarr_tree,
    latest_step,
    weights_in,
)

ORCA_JSON = "orca.json"
UNSURE = "unsure"
_MAX_BYTES = 1_000_000
_ROTARY = {"halves": False, "interleaved": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTOptions:
    """A decoder like GPT-2's and OPT's: equal layers with LayerNorm, and learned positions.

    `norm` is Layer.residual, `use_bias` holds for all linear layers, and the embedding has the hidden size
    unless `embedding_size` says otherwise.
    """

    vocab_size: int
    n_positions: int
    hidden_size: int
    n_layers: int
    n_heads: int
    ffn_size: int
    activation: Activation = "gelu_tanh"
    norm: Residual = "pre"
    final_norm: bool = True
    layer_norm_eps: float = 1e-5
    use_bias: bool = True
    tie_embeddings: bool = True
    position_offset: int = 0
    embedding_size: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def model(self) -> ModelConfig:
        """The model of these options. Raises ConfigError."""
        norm = Norm(eps=self.layer_norm_eps)
        layer = Layer(
            attention=Attention(
                n_heads=self.n_heads,
                n_kv_heads=self.n_heads,
                head_size=even_head_size(self.hidden_size, self.n_heads),
                qkv_bias=self.use_bias,
                out_bias=self.use_bias,
            ),
            feed_forward=FeedForward(size=self.ffn_size, activation=self.activation, bias=self.use_bias),
            norm=norm,
            residual=self.norm,
        )
        embedding_size = self.hidden_size if self.embedding_size is None else self.embedding_size
        return ModelConfig(
            vocab_size=self.vocab_size,
            n_positions=self.n_positions,
            hidden_size=self.hidden_size,
            layers=alike(layer, self.n_layers),
            embedding=Embedding(size=embedding_size, tied=self.tie_embeddings),
            positions=LearnedPositions(offset=self.position_offset),
            final_norm=norm if self.final_norm else None,
            bos_token_id=self.bos_token_id,
            eos_token_ids=self.eos_token_ids,
        )


@dataclass(frozen=True, slots=True)
class _FormOptions:
    """The fields of an entry in `names` that say how an array holds a weight."""

    axes: str = ""
    part: int = 0
    permute_rope: bool = False
    multiply: float = 1.0
    add: float = 0.0


_FORM = set(_FormOptions.__slots__)


@dataclass(frozen=True, slots=True)
class Description:
    """A model in a directory of arrays, and where its arrays are."""

    path: Path  # the file with the model
    model: ModelConfig
    checkpoint: Path
    names: dict[str, StoredName] | None  # None: our names, or a trainer's
    ignore: tuple[str, ...] = ()
    interleaved: bool | None = None  # a trainer's rotary order; None: its usual one
    note: str = ""  # HFConfig.note

    def ignores(self, name: str) -> bool:
        """Whether an array is declared not to be a weight."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignore)


def read_description(directory: Path, orca_json: Path | None = None) -> Description:
    """Read orca.json, or config.json if there is no orca.json.

    `directory` may also be a step, a directory with a number, in one that has such a file. `orca_json` is
    read in place of the directory's. Raises NotACheckpoint if neither exists, CorruptFile, BadModelConfig or
    UnsupportedModel.
    """
    if (
        orca_json is None
        and is_step(directory)
        and not _has_description(directory)
        and _has_description(directory.parent)
    ):
        description = read_description(directory.parent)
        return replace(description, checkpoint=weights_in(directory))
    path = orca_json or directory / ORCA_JSON
    if not os.path.exists(path):
        if not _has_description(directory):
            weights = weights_in(directory)
            places = (*directory.parents[:2], weights)
            described = next((each for each in places if _has_description(each)), None)
            kind = "a training checkpoint" if is_zarr_tree(weights) else "an Orbax checkpoint"
            what_to_do = "write one (docs/checkpoints.md), or copy the config.json of its model there"
            if described is not None:
                what_to_do = f"name {shown(described)}, which has one"
            raise NotACheckpoint(
                f"{shown(directory)} is {kind}, but has neither {ORCA_JSON} nor config.json to "
                f"describe its model; {what_to_do}"
            )
        hf = read_hf_config(directory)
        return Description(hf.path, hf.model, latest_step(directory) or directory, None, note=hf.note)
    values = read_object(path, _MAX_BYTES)
    _known(path, "", values, {"model", "checkpoint", "names", "ignore", "rotary", UNSURE})
    if values.get(UNSURE, {}) != {}:
        rule = "nothing: decide about each entry, correct it, and take it out of here"
        raise _bad(path, UNSURE, rule, values[UNSURE])
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


def described_model(directory: Path) -> tuple[ModelConfig, str]:
    """Read the model that a directory's JSON describes, and a line about unused fields, perhaps empty.

    The directory may lack weights. Raises a CheckpointError.
    """
    found = read_description(directory) if has_array_tree(directory) else read_hf_config(directory)
    return found.model, found.note


def _has_description(directory: Path) -> bool:
    return any(os.path.exists(directory / name) for name in (ORCA_JSON, "config.json"))


def same_names(model: ModelConfig) -> dict[str, StoredName]:
    """The arrays of a checkpoint that has our names."""
    return {
        name: StoredName((name,), heads=engine_order(parameter, attention_of(model, name)))
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
    try:
        if isinstance(values, dict) and "layers" in values:
            return config_from_json(values, partial(_bad, path))
        return part_from_json(GPTOptions, values, "model", partial(_bad, path)).model()
    except ConfigError as error:
        raise BadModelConfig(f"{shown(path)}: model: {shown(str(error))}") from error


def _names(path: Path, model: ModelConfig, values: object) -> dict[str, StoredName]:
    """Read the stored name of each parameter, from its entry or from its pattern's for all layers."""
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
        heads = stored.heads or engine_order(table[parameter], attention_of(model, parameter))
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
    forms = tuple(_form(path, f"names.{key}", general | part) for part in parts)
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
    """Read how an array holds a weight from its entry in `names`; None where the entry does not say."""
    given = {option: value for option, value in entry.items() if option != "name"}
    options = part_from_json(_FormOptions, given, where, partial(_bad, path))
    if not given:
        return None
    letters = options.axes.split()
    known = all(letter.isdigit() or set(letter) <= set(LETTERS) for letter in letters)
    if not letters or not known or sum(letter.isdigit() for letter in letters) > 1 or letters.count("L") > 1:
        rule = f"letters of {LETTERS} and at most one number, with spaces between"
        raise _bad(path, f"{where}.axes", rule, options.axes)
    n_parts = next((int(each) for each in letters if each.isdigit()), 1)
    if not 0 <= options.part < n_parts:
        rule = f"a whole number below the {n_parts} parts of its axis"
        raise _bad(path, f"{where}.part", rule, options.part)
    if options.multiply == 0 or not math.isfinite(options.multiply):
        raise _bad(path, f"{where}.multiply", "a number other than 0", options.multiply)
    return ArrayForm(
        axes=options.axes,
        part=options.part,
        interleaved=options.permute_rope,
        multiply=float(options.multiply),
        add=float(options.add),
    )
