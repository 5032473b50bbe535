"""Mistral (Jiang et al., 2023): Llama with a sliding window over all layers."""

from dataclasses import replace
from typing import Any

from orca_jax.families.attention_config import Scores
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    BUFFERS,
    CONFIG_NAMES,
    PREFIXES,
    WEIGHTS,
    common_fields,
    decoder,
    read_layer,
    read_sizes,
)
from orca_jax.families.family import Family
from orca_jax.families.model_config import ModelConfig

_DEFAULT_WINDOW = 4096  # of a file without the field; null means no window, as in Mistral 7B v0.2 and later


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    layer = read_layer(fields, sizes)
    scores = Scores(window=fields.whole_or_null("sliding_window", _DEFAULT_WINDOW))
    layer = replace(layer, attention=replace(layer.attention, scores=scores))
    return decoder(fields, sizes, [layer] * sizes.n_layers, final_norm=layer.norm)


def _write(model: ModelConfig) -> dict[str, Any] | None:
    return common_fields(model) | {"sliding_window": model.attention.scores.window}


MISTRAL = Family(
    model_type="mistral",
    title="Mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    config_names=CONFIG_NAMES,
    read=_read,
    write=_write,
    prefixes=PREFIXES,
    weights=WEIGHTS,
    buffers=BUFFERS,
)
