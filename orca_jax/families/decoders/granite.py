"""Granite 3 (Granite Team, 2024): Llama with multipliers of embeddings, scores, residuals and logits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orca_jax.errors import BadModelConfig
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
from orca_jax.families.strict_json import shown

_NAMES: Mapping[str, str] = {**CONFIG_NAMES, "attention_scale": "attention_multiplier"}


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    bias = fields.flag("attention_bias", False)
    layer = read_layer(fields, sizes, qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias", False))
    scores = Scores(scale=fields.number("attention_multiplier", 1.0))
    layer = replace(
        layer,
        attention=replace(layer.attention, scores=scores),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
    )
    divisor = fields.number("logits_scaling", 1.0)
    if divisor <= 0:
        raise BadModelConfig(
            f"{shown(fields.path)}: logits_scaling: expected a number above 0, found {shown(divisor)}"
        )
    return decoder(
        fields,
        sizes,
        [layer] * sizes.n_layers,
        final_norm=layer.norm,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logit_multiplier=1.0 / divisor,
    )


def _write(model: ModelConfig) -> dict[str, Any] | None:
    layer = model.layers[0]
    return common_fields(model) | {
        "attention_bias": layer.attention.qkv_bias,
        "mlp_bias": layer.feed_forward.bias,
        "attention_multiplier": layer.attention.scale,
        "residual_multiplier": layer.residual_multiplier,
        "embedding_multiplier": model.embedding.multiplier,
        "logits_scaling": 1.0 / model.logit_multiplier,
    }


GRANITE = Family(
    model_type="granite",
    title="Granite",
    architectures=("GraniteForCausalLM", "GraniteModel"),
    config_names=_NAMES,
    read=_read,
    write=_write,
    prefixes=PREFIXES,
    weights=WEIGHTS,
    buffers=BUFFERS,
)
