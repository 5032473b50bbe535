"""Llama 1 to 3 (Touvron et al., 2023; Grattafiori et al., 2024)."""

from typing import Any

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


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    bias = fields.flag("attention_bias", False)
    layer = read_layer(fields, sizes, qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias", False))
    return decoder(fields, sizes, [layer] * sizes.n_layers, final_norm=layer.norm)


def _write(model: ModelConfig) -> dict[str, Any] | None:
    layer = model.layers[0]
    return common_fields(model) | {
        "attention_bias": layer.attention.qkv_bias,
        "mlp_bias": layer.feed_forward.bias,
    }


LLAMA = Family(
    model_type="llama",
    title="Llama",
    architectures=("LlamaForCausalLM", "LlamaModel"),
    config_names=CONFIG_NAMES,
    read=_read,
    write=_write,
    prefixes=PREFIXES,
    weights=WEIGHTS,
    buffers=BUFFERS,
)
