"""Mistral (Jiang et al., 2023): Llama with a sliding window in all layers; and Mistral's later dense models.

Ministral 3 (Mistral AI, 2025) multiplies queries by a temperature that grows with their position. Models
with vision are in mixtures/mistral4.py.
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

_DEFAULT_WINDOW = 4096  # without the field; null means no window, as in Mistral 7B v0.2 and later
_HEAD_SIZE = 128  # transformers' default in Ministral 3
_BETA = "llama_4_scaling_beta"
ROPE_OTHERS = (_BETA, ORIGINAL, "max_position_embeddings")  # of rope_parameters, besides the rotation's


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
        others=ROPE_OTHERS,
    )
    scores = Scores(window=fields.whole_or_null("sliding_window", None), temperature=read_temperature(fields))
    return decoder(fields, sizes, read_layer(fields, sizes, eps=1e-5, rotary=rotary, scores=scores))


def read_temperature(fields: ConfigFields) -> Temperature | None:
    """Read the factor on queries by their position. Raises BadModelConfig without rope_parameters."""
    found = rope_section(fields)
    if found is None:
        raise BadModelConfig(f"{shown(fields.path)}: rope_parameters: expected an object, found none")
    beta = found.number(_BETA, 0.0)
    return Temperature(scale=beta, step=found.whole(ORIGINAL)) if beta else None


def _write_ministral3(model: ModelConfig) -> dict[str, Any] | None:
    written = with_temperature(model, common_fields(model))
    return written and written | {"sliding_window": model.attention.scores.window}


def with_temperature(model: ModelConfig, written: dict[str, Any]) -> dict[str, Any] | None:
    """The written fields with rotary positions as `read_temperature` reads them; None without rotation."""
    rotary, temperature = model.attention.rotary, model.attention.scores.temperature
    if rotary is None:
        return None
    own: dict[str, Any] = {}
    if temperature is not None:
        own = {_BETA: temperature.scale, ORIGINAL: temperature.step}
    return without_rope(written) | rope_parameters(rotary, **own)


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
