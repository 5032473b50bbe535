"""Seed-OSS (ByteDance Seed, 2025): Llama with biases of queries, keys and values."""

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

_HEAD_SIZE = 128  # transformers' default


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields, head_size=_HEAD_SIZE)
    layer = read_layer(
        fields,
        sizes,
        bias=fields.flag("attention_out_bias", False),
        qkv_bias=fields.flag("attention_bias", True),
        mlp_bias=fields.flag("mlp_bias", False),
    )
    return decoder(fields, sizes, layer)


def _write(model: ModelConfig) -> dict[str, Any] | None:
    return common_fields(model) | bias_fields(model) | {"attention_out_bias": model.attention.out_bias}


SEED_OSS = relative(
    model_type="seed_oss",
    title="Seed-OSS",
    architectures=("SeedOssForCausalLM", "SeedOssModel"),
    read=_read,
    write=_write,
)
