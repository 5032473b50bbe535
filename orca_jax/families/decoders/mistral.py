"""Mistral (Jiang et al., 2023): Llama with a sliding window in all layers; and Mistral's later dense models.

Ministral 3 (Mistral AI, 2025) multiplies queries by a temperature that grows with their position. Of the
models with vision, Mistral Small 3.1 and Ministral 3, the text part is served.
"""

from typing import Any

from orca_jax.errors import BadModelConfig
from orca_jax.families.attention_config import Scores, Temperature
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import common_fields, decoder, read_layer, read_sizes, relative
from orca_jax.families.decoders.rope_fields import (
    ORIGINAL,
    read_rotary,
    rope_parameters,
    rope_section,
    without_rope,
)
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.strict_json import shown
from orca_jax.families.text_part import text_part

_DEFAULT_WINDOW = 4096  # without the field; null means no window, as in Mistral 7B v0.2 and later
_HEAD_SIZE = 128  # transformers' default in Ministral 3
_BETA = "llama_4_scaling_beta"


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    scores = Scores(window=fields.whole_or_null("sliding_window", _DEFAULT_WINDOW))
    return decoder(fields, sizes, read_layer(fields, sizes, scores=scores))


def _write(model: ModelConfig) -> dict[str, Any] | None:
    return common_fields(model) | {"sliding_window": model.attention.scores.window}


def _read_ministral3(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields, head_size=_HEAD_SIZE)
    rotary = read_rotary(
        fields,
        head_size=sizes.head_size,
        n_positions=sizes.n_positions,
        others=(_BETA, ORIGINAL, "max_position_embeddings"),
    )
    scores = Scores(window=fields.whole_or_null("sliding_window", None), temperature=_temperature(fields))
    return decoder(fields, sizes, read_layer(fields, sizes, eps=1e-5, rotary=rotary, scores=scores))


def _temperature(fields: ConfigFields) -> Temperature | None:
    found = rope_section(fields)
    if found is None:
        raise BadModelConfig(f"{shown(fields.path)}: rope_parameters: expected an object, found none")
    beta = found.number(_BETA, 0.0)
    return Temperature(scale=beta, step=found.whole(ORIGINAL)) if beta else None


def _write_ministral3(model: ModelConfig) -> dict[str, Any] | None:
    written, rotary, scores = common_fields(model), model.attention.rotary, model.attention.scores
    if rotary is None:
        return None
    own: dict[str, Any] = {}
    if scores.temperature is not None:
        own = {_BETA: scores.temperature.scale, ORIGINAL: scores.temperature.step}
    return without_rope(written) | rope_parameters(rotary, **own) | {"sliding_window": scores.window}


MISTRAL = relative(
    model_type="mistral",
    title="Mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    read=_read,
    write=_write,
)
MINISTRAL3 = relative(
    model_type="ministral3",
    title="Ministral 3",
    architectures=("Ministral3ForCausalLM", "Ministral3Model"),
    read=_read_ministral3,
    write=_write_ministral3,
)
MISTRAL3 = text_part(
    MISTRAL,
    or_texts=(MINISTRAL3,),
    model_type="mistral3",
    title="Mistral Small 3.1 and Ministral 3 with vision",
    architectures=("Mistral3ForConditionalGeneration", "Mistral3Model"),
    prefixes=("model.language_model.", "language_model.model.", "language_model.", "model."),
    head="language_model.lm_head.weight",
    parts=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
    defaults={"bos_token_id": 1, "eos_token_id": 2},
    inner=("tie_word_embeddings",),  # outside transformers writes its class's default, true
    unread={"projector_hidden_act": "of the projector", "vision_feature_layer": "of the vision tower"},
)
