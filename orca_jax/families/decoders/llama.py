"""Llama 1 to 3 (Touvron et al., 2023; Grattafiori et al., 2024), and what a family is by its example.

A family is a table with two functions. `read` makes a ModelConfig, the shape that all else follows from, of a
config.json; `write` does the reverse for `orca convert`. The rest says what checkpoints call our weights; for
Llama and its relatives that is the table WEIGHTS in llama_like.py. Nothing here computes: model/ does, from
the ModelConfig alone, so a relative such as Mistral or Granite is this file with the fields that it adds.
"""

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


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    return decoder(fields, sizes, read_layer(fields, sizes, bias=bias, mlp_bias=mlp_bias))


def _write(model: ModelConfig) -> dict[str, Any] | None:
    return common_fields(model) | bias_fields(model)


LLAMA = relative(
    model_type="llama",
    title="Llama",
    architectures=("LlamaForCausalLM", "LlamaModel"),
    read=_read,
    write=_write,
)
