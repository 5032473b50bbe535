"""Mixtral (Jiang et al., 2024): Mistral with eight experts in each layer."""

from typing import Any

from orca_jax.families.attention_config import Scores
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import common_fields, decoder, read_layer, read_sizes, relative
from orca_jax.families.mixtures.experts_in_files import EXPERT_NAMES, FUSED, read_experts, separate_experts
from orca_jax.families.model_config import ModelConfig

_SPARSE = "{prefix}layers.{i}.block_sparse_moe."


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    experts = read_experts(fields, "num_local_experts", alias="num_experts", renormalised=True)
    scores = Scores(window=fields.whole_or_null("sliding_window", None))
    layer = read_layer(fields, sizes, eps=1e-5, scores=scores)
    return decoder(fields, sizes, layer.with_feed_forward(experts=experts))


def _write(model: ModelConfig) -> dict[str, Any] | None:
    experts = model.layers[0].experts
    if experts is None:
        return None
    return common_fields(model) | {
        "sliding_window": model.attention.scores.window,
        "num_local_experts": experts.number,
        "num_experts_per_tok": experts.top_k,
    }


MIXTRAL = relative(
    model_type="mixtral",
    title="Mixtral",
    architectures=("MixtralForCausalLM", "MixtralModel"),
    config_names={**EXPERT_NAMES, "n_experts": "num_local_experts"},
    read=_read,
    write=_write,
    weights=separate_experts(
        f"{_SPARSE}gate.weight", *(f"{_SPARSE}experts.{{x}}.{part}.weight" for part in ("w1", "w3", "w2"))
    ),
    alternatives=FUSED,
)
