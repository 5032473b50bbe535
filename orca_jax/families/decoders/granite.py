"""Granite 3 (Granite Team, 2024): Llama with multipliers of embeddings, scores, residuals and logits."""

from dataclasses import replace
from typing import Any

from orca_jax.errors import BadModelConfig
from orca_jax.families.attention_config import Scores
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    bias_fields,
    common_fields,
    decoder,
    read_layer,
    read_sizes,
    relative,
)
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.strict_json import shown


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    layer = read_layer(
        fields,
        sizes,
        bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        scores=Scores(scale=fields.number("attention_multiplier", 1.0)),
    )
    divisor = fields.number("logits_scaling", 1.0)
    if divisor <= 0:
        raise BadModelConfig(
            f"{shown(fields.path)}: logits_scaling: expected a number above 0, found {shown(divisor)}"
        )
    return decoder(
        fields,
        sizes,
        replace(layer, residual_multiplier=fields.number("residual_multiplier", 1.0)),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logit_multiplier=1.0 / divisor,
    )


def _write(model: ModelConfig) -> dict[str, Any] | None:
    return common_fields(model) | {
        **bias_fields(model),
        "attention_multiplier": model.attention.scale,
        "residual_multiplier": model.layers[0].residual_multiplier,
        "embedding_multiplier": model.embedding.multiplier,
        "logits_scaling": 1.0 / model.logit_multiplier,
    }


GRANITE = relative(
    model_type="granite",
    title="Granite",
    architectures=("GraniteForCausalLM", "GraniteModel"),
    config_names={"attention_scale": "attention_multiplier"},
    read=_read,
    write=_write,
)
