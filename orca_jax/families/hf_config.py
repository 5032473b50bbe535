"""Reads a Hugging Face config.json as a ModelConfig, and checks the JSON files next to it.

The model's family (registry.py) reads the fields and refuses options that it does not compute. A field that
the family does not read is named at load, or refused where its name stands for a computation
(unread_fields.py). A missing size is an error, not the architecture's default.
"""

import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orca_jax.errors import BadModelConfig, ConfigError, NotACheckpoint, UnsupportedModel
from orca_jax.families.config_fields import DECODER_IDS, ConfigFields
from orca_jax.families.family import Family
from orca_jax.families.gguf_models import (
    check_tokens,
    config_names,
    read_architecture,
    weight_forms,
)
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.quantization_config import Quantization, quantized_forms, read_quantization
from orca_jax.families.registry import FAMILIES
from orca_jax.families.strict_json import read_object, shown
from orca_jax.families.text_part import SECTION
from orca_jax.families.trainers.easydel_config import without_easydel_fields
from orca_jax.families.unsupported import about_model_type, about_quantisation
from orca_jax.gguf_file import is_gguf, open_gguf

POOLING_FILE = "1_Pooling/config.json"  # Sentence Transformers', of a model for embeddings
_MAX_CONFIG_BYTES = 1_000_000
_MAX_TOKENIZER_BYTES = 100_000_000
_AUTO_MODELS = ("AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText")


@dataclass(frozen=True, slots=True)
class HFConfig:
    """The contents of a config.json: the model's shape, and the family whose names its tensors have.

    The model's weights have the forms that `quantization` gives them.
    """

    path: Path
    family: Family
    model: ModelConfig
    unread: tuple[str, ...] = ()
    quantization: Quantization | None = None

    @property
    def note(self) -> str:
        """A line to show at load: the part that is served, and fields that are not used."""
        parts = [self.family.serves, f"not used: {', '.join(self.unread)}" if self.unread else ""]
        text = "; ".join(part for part in parts if part)
        return f"{shown(self.path)}: {text}" if text else ""


def read_config(directory: str | Path) -> ModelConfig:
    """Read the ModelConfig of a Hugging Face directory. Raises as `read_hf_config`."""
    return read_hf_config(Path(directory)).model


def read_hf_config(directory: Path) -> HFConfig:
    """Read config.json, and check it against the tokenizer.json next to it, if there is one.

    For a GGUF file, read the config.json that its metadata stands for.

    Raises NotACheckpoint (no config.json), CorruptFile (not JSON), BadModelConfig (a value that is missing,
    out of range or of the wrong type, or two files that disagree) or UnsupportedModel; each names the file.
    """
    if is_gguf(directory):
        return _read_gguf(directory)
    path = directory / "config.json"
    if not os.path.exists(path):
        raise NotACheckpoint(f"{shown(directory)} has no config.json, so it is not a checkpoint's directory")
    values = without_easydel_fields(read_object(path, _MAX_CONFIG_BYTES, infinity=True))
    fields = ConfigFields(path, values)
    model_type = fields.text("model_type", "")
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"{shown(path)}: model_type: expected one of {', '.join(FAMILIES)}, found '{shown(model_type)}'"
            f"{about_model_type(model_type, values, FAMILIES)}"
        )
    family = FAMILIES[model_type]
    quantized = _with_quantization(fields, family)
    quantization = read_quantization(quantized)
    _refuse_other_models(fields, family, quantized, quantization)
    if family.has_encoder:
        fields = ConfigFields(path, values | _decoder_ids(directory / "generation_config.json"))
    model = _read_model(family, fields, family.config_names)
    if os.path.exists(directory / POOLING_FILE) and model.encoder is None and not model.only_pools:
        # Sentence Transformers saves such a decoder without its head.
        model = replace(model, embeds=True, embedding=replace(model.embedding, tied=True))
    check_tokenizer(model, path, directory / "tokenizer.json")
    if quantization is not None:
        model = model.with_forms(quantized_forms(model, family, quantization))
    return HFConfig(path, family, model, fields.unread, quantization)


def _with_quantization(fields: ConfigFields, family: Family) -> ConfigFields:
    """The fields that have `quantization_config`: of the file, or of its text part as in Kimi K2.5."""
    section = fields.section(SECTION) if family.serves and not fields.raw("quantization_config") else None
    return section if section is not None and section.raw("quantization_config") else fields


def read_shape(family: Family, fields: ConfigFields, names: Mapping[str, str]) -> ModelConfig:
    """Read a model; in errors our names of fields become those of the file, which its reader looks for.

    Other fields may still be read, so none is refused. Raises BadModelConfig or UnsupportedModel.
    """
    try:
        return family.read(fields)
    except ConfigError as error:
        message = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
        raise BadModelConfig(f"{shown(fields.path)}: {shown(message)}") from error


def _read_model(family: Family, fields: ConfigFields, names: Mapping[str, str]) -> ModelConfig:
    model = read_shape(family, fields, names)
    fields.leave_others(family.unread)
    return model


def _read_gguf(path: Path) -> HFConfig:
    file = open_gguf(path)
    architecture, values = read_architecture(file)
    family, fields = FAMILIES[architecture.model_type], ConfigFields(path, values)
    model = _read_model(family, fields, config_names(file))
    check_tokens(file, model.vocab_size)
    family = architecture.named(family)
    return HFConfig(path, family, model.with_forms(weight_forms(file, family, model)))


def _decoder_ids(path: Path) -> dict[str, Any]:
    """The decoder ids in generation_config.json, which overrides config.json."""
    if not os.path.exists(path):
        return {}
    fields = ConfigFields(path, read_object(path, _MAX_CONFIG_BYTES))
    found = {name: fields.token_ids(name) for name in DECODER_IDS}
    return {name: list(ids) for name, ids in found.items() if ids is not None}


def _refuse_other_models(
    fields: ConfigFields, family: Family, quantized: ConfigFields, quantization: Quantization | None
) -> None:
    """Refuse a classifier, a quantised model or one with its own code that has the family's model_type."""
    architectures, found = family.architectures, fields.texts("architectures")
    known = {name.casefold() for name in architectures}  # the first Llama files have LLaMAForCausalLM
    if found and not any(name.casefold() in known for name in found):
        raise UnsupportedModel(
            f"{shown(fields.path)}: architectures: expected one of {', '.join(architectures)}, "
            f"found {shown(list(found))}"
        )
    why = ""
    section = quantized.raw("quantization_config")
    if section and quantization is None and not _is_family_quantization(quantized, family):
        why = about_quantisation(section if isinstance(section, dict) else {})
    elif fields.raw("auto_map") and not _names_known_code(fields, family):
        why = "auto_map is set: a model with code of its own is not supported"
    elif fields.raw("pruned_heads"):
        why = "pruned_heads is set: a model with heads cut out is not supported"
    if why:
        raise UnsupportedModel(f"{shown(fields.path)}: {why}")
    if fields.raw("auto_map"):
        fields.leave("auto_map")
    meaning = "a decoder alone" if family.has_encoder else "an encoder"
    fields.must_be("is_encoder_decoder", family.has_encoder, meaning)


def _names_known_code(fields: ConfigFields, family: Family) -> bool:
    """Whether the models in `auto_map`, "modeling_phi3.Phi3ForCausalLM", are classes that transformers has.

    transformers runs its own code for such a class unless the user trusts the checkpoint's.
    """
    auto_map = fields.section("auto_map")
    if auto_map is None:
        return False
    models = [auto_map.text(name, "") for name in auto_map.names() if name in _AUTO_MODELS]
    return all(name.rpartition(".")[2] in family.architectures for name in models if name)


def _is_family_quantization(fields: ConfigFields, family: Family) -> bool:
    """Whether the family itself reads weights that are quantized in this way. Raises UnsupportedModel."""
    section = fields.section("quantization_config") if family.quantized else None
    if section is None or section.text("quant_method", "") not in family.quantized:
        return False
    section.refuse_others(("modules_to_not_convert", "dequantize"))
    return True


def check_tokenizer(model: ModelConfig, path: Path, tokenizer: Path) -> None:
    """Check that every token of the tokenizer's vocabulary has a row in the embedding table.

    Rows without a token are common. An added token may lack a row, as Gemma 3's image placeholder does; a
    prompt with it is refused (scheduling/admission.py). `path` is the file that `model` was read from. Raises
    BadModelConfig or CorruptFile.
    """
    if not os.path.exists(tokenizer):
        return
    values = read_object(tokenizer, _MAX_TOKENIZER_BYTES)
    tokens = values.get("model")
    vocabulary = tokens.get("vocab") if isinstance(tokens, dict) else None
    added = values.get("added_tokens") or []
    if not isinstance(vocabulary, dict | list) or not isinstance(added, list):
        raise BadModelConfig(f"{shown(tokenizer)} has no model.vocab, so it is not a tokenizer's file")
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [*range(len(vocabulary))]
    added_ids = [token.get("id") if isinstance(token, dict) else None for token in added]
    for token_id in (*ids, *added_ids):
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise BadModelConfig(
                f"{shown(tokenizer)}: a token's id: expected a whole number, found {shown(token_id)}"
            )
    highest = max(set(ids) - set(added_ids), default=-1)
    if highest >= model.vocab_size:
        raise BadModelConfig(
            f"two files disagree on the vocabulary: {shown(path)} says vocab_size {model.vocab_size}, "
            f"{shown(tokenizer)} has the token id {shown(highest)}"
        )


def model_of(fields: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json of these fields describes. Raises as `Family.read`."""
    return FAMILIES[fields["model_type"]].read(ConfigFields(Path("config.json"), fields))


def hf_config_of(model: ModelConfig) -> dict[str, Any]:
    """Write `model` with dense weights as a config.json of the first family that reads it as the same model.

    Raises UnsupportedModel where no family can describe it.
    """
    model = replace(model.with_forms({}), embeds=False)
    for family in FAMILIES.values():
        written = family.write(model)
        if written is None:
            continue
        fields = {"model_type": family.model_type, "architectures": [family.architectures[0]], **written}
        try:
            read = model_of(fields)
        except (ConfigError, BadModelConfig, UnsupportedModel):
            continue
        if replace(read, vocab_multiple=model.vocab_multiple) == model:
            return fields
    raise UnsupportedModel(
        f"no config.json of {', '.join(family.title for family in FAMILIES.values())} can describe this "
        "model, so it has no Hugging Face layout"
    )
