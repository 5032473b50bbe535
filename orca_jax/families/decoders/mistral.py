"""Mistral (Jiang et al., 2023): Llama with a sliding window in all layers."""

from typing import Any

from orca_jax.families.attention_config import Scores
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import common_fields, decoder, read_layer, read_sizes, relative
from orca_jax.families.model_config import ModelConfig

_DEFAULT_WINDOW = 4096  # without the field; null means no window, as in Mistral 7B v0.2 and later


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    scores = Scores(window=fields.whole_or_null("sliding_window", _DEFAULT_WINDOW))
    return decoder(fields, sizes, read_layer(fields, sizes, scores=scores))


def _write(model: ModelConfig) -> dict[str, Any] | None:
    return common_fields(model) | {"sliding_window": model.attention.scores.window}


MISTRAL = relative(
    model_type="mistral",
    title="Mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    read=_read,
    write=_write,
)
