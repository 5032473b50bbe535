"""LFM2 MoE (Liquid AI, 2025): LFM2's layers, of which all but the first have experts."""

from dataclasses import replace
from typing import Any

from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.lfm2 import LFM2, LFM2_LAYER, hybrid_fields, read_kinds, read_mixers
from orca_jax.families.decoders.llama_like import decoder, read_sizes
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.mixtures.experts_in_files import (
    EXPERT_NAMES,
    feed_forwards_of,
    first_sparse,
    separate_experts,
)
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import all_experts, as_it_is

_MLP = f"{LFM2_LAYER}feed_forward."
_LEAST_SUM = 1e-6


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    experts = Experts(
        number=fields.whole("num_experts"),
        top_k=fields.whole("num_experts_per_tok"),
        scores="sigmoid",
        renormalised=fields.flag("norm_topk_prob", True),
        least_sum=_LEAST_SUM,
        multiplier=fields.number("routed_scaling_factor", 1.0),
        correction_bias=fields.flag("use_expert_bias", True),
    )
    inner, size = fields.whole("moe_intermediate_size"), fields.whole("intermediate_size")
    n_dense = fields.whole("num_dense_layers", default=2)
    layers = [
        layer.with_feed_forward(size=size)
        if i < n_dense
        else layer.with_feed_forward(size=inner, experts=experts)
        for i, layer in enumerate(read_mixers(fields, sizes, read_kinds(fields, sizes.n_layers)))
    ]
    return decoder(fields, sizes, layers, tied=fields.flag("tie_embedding", True))


def _write(model: ModelConfig) -> dict[str, Any] | None:
    sparse = first_sparse(model)
    if sparse is None or sparse.experts is None:
        return None
    kinds = feed_forwards_of(model)
    dense = [kind for kind in kinds if kind.experts is None]
    return hybrid_fields(model) | {
        "intermediate_size": (dense[0] if dense else sparse).size,
        "moe_intermediate_size": sparse.size,
        "num_dense_layers": len(dense),
        "num_experts": sparse.experts.number,
        "num_experts_per_tok": sparse.experts.top_k,
        "norm_topk_prob": sparse.experts.renormalised,
        "routed_scaling_factor": sparse.experts.multiplier,
        "use_expert_bias": sparse.experts.correction_bias,
    }


LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    title="LFM2 MoE",
    architectures=("Lfm2MoeForCausalLM", "Lfm2MoeModel"),
    config_names={
        **LFM2.config_names,
        **EXPERT_NAMES,
        "ffn_size": "intermediate_size or moe_intermediate_size",
    },
    read=_read,
    write=_write,
    unread={},
    weights={
        **LFM2.weights,
        **separate_experts(
            f"{_MLP}gate.weight", *(f"{_MLP}experts.{{x}}.{part}.weight" for part in ("w1", "w3", "w2"))
        ),
        "layers.{i}.router.correction": as_it_is(f"{_MLP}expert_bias"),
    },
    alternatives={
        "layers.{i}.router.weight": as_it_is(f"{_MLP}gate.weight"),
        "layers.{i}.experts.up.weight": all_experts(f"{_MLP}experts.gate_up_proj"),
        "layers.{i}.experts.down.weight": all_experts(f"{_MLP}experts.down_proj"),
    },
)
