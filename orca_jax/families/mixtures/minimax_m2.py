"""MiniMax M2 (MiniMax, 2025): experts chosen by sigmoid, and norms over all queries and all keys."""

from typing import Any

from orca_jax.errors import UnsupportedModel
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import common_fields, decoder, read_layer, read_sizes, relative
from orca_jax.families.decoders.olmo2 import WIDE_NORMS
from orca_jax.families.decoders.rope_fields import read_rotary, rotary_size_field
from orca_jax.families.mixtures.experts_in_files import EXPERT_NAMES, FUSED, read_experts, separate_experts
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import as_it_is
from orca_jax.families.strict_json import shown

_HEAD_SIZE, _BASE = 128, 5_000_000.0  # transformers' defaults of fields that a file may lack
_LAYER = "{prefix}layers.{i}."
_SPARSE = f"{_LAYER}block_sparse_moe."
_FURTHER = "the layers that predict further tokens"
# Fields of options that the published code has and M2 does not use, and their only supported values.
_FIXED = {
    "layernorm_full_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "shared_intermediate_size": 0,
}


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields, head_size=_HEAD_SIZE)
    fields.choice("scoring_func", {"sigmoid": None}, "sigmoid")
    fields.choice("qk_norm_type", {"per_layer": None}, "per_layer")
    fields.must_be("use_qk_norm", True, "attention without norms in this family")
    fields.must_be("use_routing_bias", True, "a choice of experts without a correction in this family")
    for name, value in _FIXED.items():
        if fields.number(name, value) != value:
            raise UnsupportedModel(
                f"{shown(fields.path)}: {name} is {shown(fields.raw(name))}; only {value} is supported"
            )
    if any(kind != 1 for kind in fields.numbers("attn_type_list")):
        raise UnsupportedModel(
            f"{shown(fields.path)}: attn_type_list: layers with linear attention (0) are not supported"
        )
    rotated = fields.whole("rotary_dim", default=sizes.head_size)
    rotary = read_rotary(
        fields,
        head_size=sizes.head_size,
        n_positions=sizes.n_positions,
        default_base=_BASE,
        partial=rotated / max(1, sizes.head_size),
    )
    layer = read_layer(fields, sizes, qk_norm="width", rotary=rotary)
    experts = read_experts(
        fields,
        "num_local_experts",
        alias="num_experts",
        renormalised=True,
        scores="sigmoid",
        correction_bias=True,
    )
    return decoder(fields, sizes, layer.with_feed_forward(experts=experts))


def _write(model: ModelConfig) -> dict[str, Any] | None:
    experts, rotary = model.layers[0].experts, model.attention.rotary
    if experts is None or rotary is None:
        return None
    return common_fields(model) | {
        "num_local_experts": experts.number,
        "num_experts_per_tok": experts.top_k,
        "partial_rotary_factor": rotary_size_field(rotary, model.head_size),
    }


MINIMAX_M2 = relative(
    model_type="minimax_m2",
    title="MiniMax M2",
    architectures=("MiniMaxM2ForCausalLM", "MiniMaxM2Model"),
    config_names={**EXPERT_NAMES, "n_experts": "num_local_experts"},
    read=_read,
    write=_write,
    weights={
        **separate_experts(
            f"{_SPARSE}gate.weight",
            *(f"{_SPARSE}experts.{{x}}.{part}.weight" for part in ("w1", "w3", "w2")),
        ),
        **WIDE_NORMS,
        "layers.{i}.router.correction": as_it_is(f"{_SPARSE}e_score_correction_bias"),
    },
    alternatives={
        **FUSED,
        "layers.{i}.router.correction": as_it_is(f"{_LAYER}mlp.e_score_correction_bias"),
    },
    unread={
        "mlp_intermediate_size": "of dense layers, of which there are none",
        "shared_moe_mode": "of a shared expert, of which there is none",
        "layernorm_linear_attention_beta": "of linear attention, of which there is none",
        "num_mtp_modules": _FURTHER,
        "mtp_transformer_layers": _FURTHER,
        "use_mtp": _FURTHER,
    },
)
