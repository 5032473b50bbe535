"""FlexOlmo (Shi et al., 2025): OLMo 2 with experts in all layers."""

from dataclasses import replace

from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import decoder, read_layer, read_sizes, relative
from orca_jax.families.decoders.olmo2 import NORMS
from orca_jax.families.decoders.rope_fields import read_rotary
from orca_jax.families.mixtures.experts_in_files import EXPERT_NAMES, FUSED, WEIGHTS, read_experts
from orca_jax.families.mixtures.olmoe import write_olmoe
from orca_jax.families.model_config import ModelConfig

_BASE = 500_000.0  # transformers' default of a field that a file may lack


def _read(fields: ConfigFields) -> ModelConfig:
    sizes, bias = read_sizes(fields), fields.flag("attention_bias", False)
    rotary = read_rotary(fields, head_size=sizes.head_size, n_positions=sizes.n_positions, default_base=_BASE)
    layer = read_layer(fields, sizes, bias=bias, qk_norm="width", rotary=rotary)
    experts = read_experts(fields, "num_experts", alias="num_local_experts")
    return decoder(fields, sizes, replace(layer.with_feed_forward(experts=experts), residual="after"))


FLEX_OLMO = relative(
    model_type="flex_olmo",
    title="FlexOlmo",
    architectures=("FlexOlmoForCausalLM", "FlexOlmoModel"),
    config_names=EXPERT_NAMES,
    read=_read,
    write=write_olmoe,
    weights={**WEIGHTS, **NORMS},
    alternatives=FUSED,
)
