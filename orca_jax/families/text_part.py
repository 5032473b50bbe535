"""The text part of a model that also takes pictures or sound, as a family derived from the text's family.

Such a config.json has the text's fields in `text_config`, where older files omit the defaults of
transformers' class. The text's tensors have other prefixes, and the remaining tensors are not read.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orca_jax.errors import BadModelConfig
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.family import Family
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.strict_json import shown

SECTION = "text_config"
# Fields that may be outside of `text_config`, where they override its own.
_OUTER = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


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
    or_texts: tuple[Family, ...] = (),
    unread: Mapping[str, str] | None = None,
    inner: tuple[str, ...] = (),
    aliases: Mapping[str, str] | None = None,
) -> Family:
    """Make the family of a whole model, of which the text part, a model of the family `text`, is served.

    The text part may also be of the families `or_texts`, whose tensors have the same names. `prefixes` are
    those of the text's tensors, `head` is another name of its head, `aliases` are parts of names that some
    files have otherwise, and `parts` is a pattern of all other tensors. `defaults` has the fields that
    `text_config` may omit, `unread` those outside of it that are of other parts although their names suggest
    a computation. Fields that may be in both override those of `text_config`, except `inner`.
    """

    texts = (text, *or_texts)

    def read(fields: ConfigFields) -> ModelConfig:
        section = fields.section(SECTION)
        if section is None:
            raise BadModelConfig(f"{shown(fields.path)}: {SECTION}: expected an object, found none")
        own = section.choice("model_type", {each.model_type: each for each in texts}, text.model_type)
        whole = {name: fields.raw(name) for name in _OUTER if fields.raw(name) is not None}
        whole = {
            name: value for name, value in whole.items() if name not in inner or section.raw(name) is None
        }
        section = section.with_values(defaults, default=True).with_values(whole, default=False)
        model = own.read(section)
        section.raw("quantization_config")  # hf_config.py reads it
        section.leave_others(own.unread)
        return model

    return replace(
        text,
        model_type=model_type,
        title=title,
        architectures=architectures,
        read=read,
        write=lambda _: None,  # converted models are written as the text's family
        prefixes=prefixes,
        aliases={**text.aliases, text.weights["head.weight"].names[0]: head, **(aliases or {})},
        unread=unread or {},
        parts=parts,
        serves="only its text part is served",
    )
