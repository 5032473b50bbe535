"""ERNIE 4.5 (Baidu, 2025), the mixtures: experts chosen by softmax and a correction, and shared ones."""

from typing import Any

from orca_jax.errors import BadModelConfig
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.ernie4_5 import read_ernie_layer
from orca_jax.families.decoders.llama_like import common_fields, decoder, read_sizes, relative
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.mixtures.experts_in_files import (
    FUSED,
    SHARED_EXPERTS,
    WEIGHTS,
    feed_forwards_of,
    first_sparse,
)
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import one_row
from orca_jax.families.strict_json import shown

_MLP = "{prefix}layers.{i}.mlp."
# transformers' defaults of fields that a file may lack.
_LEAST_SUM, _N_SHARED = 1e-12, 2
_FIRST, _LAST = 1, -1
_TRAINING = "of training"


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    fields.must_be("use_bias", False, "a bias of layers with experts")
    dense, size = read_ernie_layer(fields, sizes), fields.whole("moe_intermediate_size")
    fields.choice("moe_gate", {"topk": None}, "topk")
    experts = Experts(
        number=fields.whole("moe_num_experts", "num_experts"),
        top_k=fields.whole("moe_k", "num_experts_per_tok"),
        renormalised=True,
        least_sum=fields.number("moe_norm_min", _LEAST_SUM),
        correction_bias=True,
        shared_size=fields.whole("moe_num_shared_experts", default=_N_SHARED) * size or None,
    )
    mixed = dense.with_feed_forward(size=size, experts=experts)
    first = fields.whole("moe_layer_start_index", default=_FIRST)
    last = fields.whole("moe_layer_end_index", default=_LAST)
    every = fields.whole("moe_layer_interval", default=1)
    if every < 1:
        raise BadModelConfig(f"{shown(fields.path)}: moe_layer_interval: expected at least 1, found {every}")
    sparse = range(first, (sizes.n_layers - 1 if last == -1 else last) + 1)
    layers = [mixed if i in sparse and (i + 1) % every == 0 else dense for i in range(sizes.n_layers)]
    return decoder(fields, sizes, layers, tied=True)


def _write(model: ModelConfig) -> dict[str, Any] | None:
    sparse = first_sparse(model)
    if sparse is None or sparse.experts is None:
        return None
    kinds, experts = feed_forwards_of(model), sparse.experts
    mixed = [i for i, kind in enumerate(kinds) if kind.experts is not None]
    dense = next((kind for kind in kinds if kind.experts is None), sparse)
    return common_fields(model) | {
        "intermediate_size": dense.size,
        "moe_intermediate_size": sparse.size,
        "moe_num_experts": experts.number,
        "moe_k": experts.top_k,
        "moe_num_shared_experts": (experts.shared_size or 0) // sparse.size,
        "moe_norm_min": experts.least_sum,
        "moe_layer_start_index": mixed[0],
        "moe_layer_end_index": mixed[-1],
        "moe_layer_interval": mixed[1] - mixed[0] if len(mixed) > 1 else 1,
    }


ERNIE4_5_MOE = relative(
    model_type="ernie4_5_moe",
    title="ERNIE 4.5 MoE",
    architectures=("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeModel"),
    config_names={
        "n_experts": "moe_num_experts",
        "top_k": "moe_k",
        "shared_size": "moe_num_shared_experts * moe_intermediate_size",
        "least_sum": "moe_norm_min",
        "ffn_size": "intermediate_size or moe_intermediate_size",
    },
    read=_read,
    write=_write,
    weights={
        **WEIGHTS,
        **SHARED_EXPERTS,
        "layers.{i}.router.correction": one_row(f"{_MLP}moe_statics.e_score_correction_bias"),
    },
    alternatives={
        **FUSED,
        "layers.{i}.router.correction": one_row(f"{_MLP}gate.moe_statics.e_score_correction_bias"),
    },
    unread={
        **dict.fromkeys(("moe_capacity", "moe_use_aux_free", "moe_multimodal_paired_experts"), _TRAINING),
        "num_nextn_predict_layers": "the layers that predict further tokens",
    },
    parts=r"(model\.)?mtp_.*",
)
