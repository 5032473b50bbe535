"""The text part of a model that also takes pictures or sound, as a family made of the text's family.

The config.json of the whole has the text's fields in `text_config`, where older files leave out what is the
default of transformers' class. The text's tensors have prefixes of their own; the other tensors are not read.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.family import Family
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.strict_json import shown

_SECTION = "text_config"
# Fields that the whole model's file may have instead of its text's section; the whole model's come first.
_OF_THE_WHOLE = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def text_part(
    text: Family,
    *,
    model_type: str,
    title: str,
    architectures: tuple[str, ...],
    prefixes: tuple[str, ...],
    head: str,
    parts: str,
    defaults: Mapping[str, Any],
) -> Family:
    """The family of the whole model's `model_type`, of which the part that `text` describes is served.

    `prefixes` are the prefixes of the text's tensors, `head` another name of its head, `parts` a pattern of
    the tensors of all other parts. `defaults` has the fields that `text_config` may leave out.
    """

    def read(fields: ConfigFields) -> ModelConfig:
        section = fields.section(_SECTION)
        if section is None:
            raise BadModelConfig(f"{shown(fields.path)}: {_SECTION}: expected an object, found none")
        found = section.text("model_type", text.model_type)
        if found != text.model_type:
            raise UnsupportedModel(
                f"{shown(fields.path)}: {_SECTION}.model_type: expected {text.model_type}, "
                f"found '{shown(found)}'"
            )
        whole = {name: fields.raw(name) for name in _OF_THE_WHOLE if fields.raw(name) is not None}
        section = section.with_values(defaults, default=True).with_values(whole, default=False)
        model = text.read(section)
        section.leave_others(text.unread)
        return model

    return replace(
        text,
        model_type=model_type,
        title=title,
        architectures=architectures,
        read=read,
        write=lambda _: None,  # a model that is written is the text's
        prefixes=prefixes,
        aliases={**text.aliases, text.weights["head.weight"].names[0]: head},
        unread={},
        parts=parts,
        serves="its text part is served, without the others",
    )
