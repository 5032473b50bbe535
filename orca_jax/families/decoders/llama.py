"""Llama 1 to 3 (Touvron et al., 2023; Grattafiori et al., 2024)."""

from typing import Any

from orca_jax.families.attention_config import Attention
from orca_jax.families.config_fields import HARMLESS, ConfigFields
from orca_jax.families.decoders.llama_like import (
    BUFFERS,
    CONFIG_NAMES,
    PREFIXES,
    WEIGHTS,
    common_fields,
    decoder,
    read_gated,
    read_sizes,
)
from orca_jax.families.decoders.rope_fields import read_rotary
from orca_jax.families.family import Family
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.families.norm_config import Norm


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    bias = fields.flag("attention_bias", False)
    norm = Norm(kind="rms_norm", eps=fields.number("rms_norm_eps", 1e-6))
    layer = Layer(
        attention=Attention(
            n_heads=sizes.n_heads,
            n_kv_heads=sizes.n_kv_heads,
            head_size=sizes.head_size,
            qkv_bias=bias,
            out_bias=bias,
            rotary=read_rotary(fields, head_size=sizes.head_size, n_positions=sizes.n_positions),
        ),
        feed_forward=read_gated(fields, bias=fields.flag("mlp_bias", False)),
        norm=norm,
    )
    return decoder(fields, sizes, [layer] * sizes.n_layers, final_norm=norm)


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
    harmless=HARMLESS,
)
