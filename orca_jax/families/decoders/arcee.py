"""AFM (Arcee, 2025): Llama whose feed-forward layers have no gate, and square what relu lets through."""

from typing import Any

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
from orca_jax.families.stored_name import linear


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    layer = read_layer(
        fields,
        sizes,
        bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        activation=fields.activation("hidden_act", "relu2"),
        gated=False,
        eps=1e-5,
    )
    return decoder(fields, sizes, layer)


def _write(model: ModelConfig) -> dict[str, Any] | None:
    return common_fields(model) | bias_fields(model)


ARCEE = relative(
    model_type="arcee",
    title="Arcee AFM",
    architectures=("ArceeForCausalLM", "ArceeModel"),
    read=_read,
    write=_write,
    weights=linear("layers.{i}.up", "{prefix}layers.{i}.mlp.up_proj"),
)
