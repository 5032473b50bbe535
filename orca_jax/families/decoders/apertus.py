"""Apertus (Swiss AI Initiative, 2025): feed-forward layers without a gate, whose activation is learned."""

from dataclasses import replace
from typing import Any

from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import common_fields, decoder, read_layer, read_sizes, relative
from orca_jax.families.decoders.rope_fields import read_rotary, rope_parameters, without_rope
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.rotary import Scaling
from orca_jax.families.stored_name import as_it_is, linear, numbers

_LAYER = "{prefix}layers.{i}."
# transformers' defaults of fields that a file may lack.
_BASE = 12_000_000.0
_SCALING = Scaling(kind="llama3", factor=8.0, original_positions=8192)


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    fields.must_be("qk_norm", True, "attention without norms of queries and keys")
    rotary = read_rotary(fields, head_size=sizes.head_size, n_positions=sizes.n_positions, default_base=_BASE)
    if fields.raw("rope_parameters") is None and fields.raw("rope_scaling") is None:
        rotary = replace(rotary, scaling=_SCALING)
    learned = fields.text("hidden_act", "xielu") == "xielu"
    layer = read_layer(
        fields,
        sizes,
        bias=fields.flag("attention_bias", False),
        activation="xielu" if learned else None,
        gated=False,
        eps=1e-5,
        qk_norm="head",
        rotary=rotary,
    )
    return decoder(fields, sizes, layer)


def _write(model: ModelConfig) -> dict[str, Any] | None:
    written, rotary = common_fields(model), model.attention.rotary
    if rotary is None:
        return None
    return without_rope(written) | rope_parameters(rotary) | {"attention_bias": model.attention.qkv_bias}


APERTUS = relative(
    model_type="apertus",
    title="Apertus",
    architectures=("ApertusForCausalLM", "ApertusModel"),
    read=_read,
    write=_write,
    weights={
        **linear("layers.{i}.up", f"{_LAYER}mlp.up_proj"),
        "layers.{i}.xielu": numbers(
            f"{_LAYER}mlp.act_fn.", vectors=("alpha_p", "alpha_n"), scalars=("beta", "eps")
        ),
        "layers.{i}.attn_norm.scale": as_it_is(f"{_LAYER}attention_layernorm.weight"),
        "layers.{i}.mlp_norm.scale": as_it_is(f"{_LAYER}feedforward_layernorm.weight"),
    },
)
