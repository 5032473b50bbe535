"""ERNIE 4.5 (Baidu, 2025), the dense models: Llama with interleaved rotary positions."""

from typing import Any

from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    Sizes,
    common_fields,
    decoder,
    read_layer,
    read_sizes,
    relative,
)
from orca_jax.families.decoders.rope_fields import read_rotary
from orca_jax.families.model_config import Layer, ModelConfig

_HEAD_SIZE, _BASE = 128, 500_000.0  # transformers' defaults of fields that a file may lack


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields, head_size=_HEAD_SIZE)
    return decoder(fields, sizes, read_ernie_layer(fields, sizes), tied=True)


def read_ernie_layer(fields: ConfigFields, sizes: Sizes) -> Layer:
    """Read a dense layer of any ERNIE 4.5."""
    bias = fields.flag("use_bias", False)
    rotary = read_rotary(
        fields,
        head_size=sizes.head_size,
        n_positions=sizes.n_positions,
        default_base=_BASE,
        interleaved=True,
    )
    return read_layer(fields, sizes, bias=bias, mlp_bias=bias, eps=1e-5, rotary=rotary)


def _write(model: ModelConfig) -> dict[str, Any] | None:
    return common_fields(model) | {"use_bias": model.attention.qkv_bias}


ERNIE4_5 = relative(
    model_type="ernie4_5",
    title="ERNIE 4.5",
    architectures=("Ernie4_5ForCausalLM", "Ernie4_5Model"),
    read=_read,
    write=_write,
)
