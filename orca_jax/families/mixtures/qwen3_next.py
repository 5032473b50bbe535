"""Qwen3-Next (Qwen, 2025): Gated DeltaNet in most layers, gated attention in every fourth, and experts."""

from dataclasses import replace
from typing import Any

from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import common_fields, decoder, read_layer, read_sizes, relative
from orca_jax.families.decoders.rope_fields import read_rotary, rotary_size_field
from orca_jax.families.further_layer import MTP
from orca_jax.families.hybrid_fields import (
    FULL,
    LINEAR,
    delta_net_fields,
    delta_net_weights,
    first_recurrence,
    kinds_of,
    read_delta_net,
    read_mixers,
    with_mixer,
)
from orca_jax.families.mixtures.experts_in_files import (
    EXPERT_NAMES,
    FUSED,
    WEIGHTS,
    first_sparse,
    read_experts,
    sparse_fields,
    sparse_layers,
)
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.recurrence_config import GatedDeltaNet
from orca_jax.families.stored_name import gated_heads, projections

_LAYER = "{prefix}layers.{i}."
NAMES = {
    **EXPERT_NAMES,
    "ffn_size": "intermediate_size or moe_intermediate_size",
    "linear_n_key_heads": "linear_num_key_heads",
    "linear_n_value_heads": "linear_num_value_heads",
    "linear_key_size": "linear_key_head_dim",
    "linear_value_size": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
GATED_QKV = projections("layers.{i}.qkv", f"{_LAYER}self_attn.", "qkv", gated_heads)


def read_hybrid_layers(
    fields: ConfigFields, *, by_key_head: bool, rope: tuple[str, ...] = ()
) -> tuple[list[Layer], ModelConfig]:
    """Read the layers with dense feed-forward parts, and the decoder of them.

    `rope` are fields of rotary positions that change nothing in a text.
    """
    sizes = read_sizes(fields, head_size=256)
    fields.must_be("attn_output_gate", True, "attention without an output gate")
    rotary = read_rotary(
        fields, head_size=sizes.head_size, n_positions=sizes.n_positions, partial=0.25, others=rope
    )
    layer = read_layer(
        fields,
        sizes,
        bias=fields.flag("attention_bias", False),
        unit_offset=True,
        qk_norm="head",
        rotary=rotary,
    ).with_attention(output_gate=True)
    gated_norm = Norm(kind="rms_norm", eps=layer.norm.eps)
    recurrent = with_mixer(layer, read_delta_net(fields, gated_norm, by_key_head=by_key_head))
    kinds = read_mixers(fields, "layer_types", sizes.n_layers)
    every = fields.whole("full_attention_interval", default=4)
    if kinds is None:
        kinds = [LINEAR if every < 1 or (i + 1) % every else FULL for i in range(sizes.n_layers)]
    layers = [layer if kind == FULL else recurrent for kind in kinds]
    return layers, decoder(fields, sizes, layers)


def hybrid_fields(model: ModelConfig) -> dict[str, Any] | None:
    """The fields of a model that `read_hybrid_layers` reads; None where they cannot say it."""
    mixer, rotary = first_recurrence(model), model.attention.rotary
    if not isinstance(mixer, GatedDeltaNet) or rotary is None:
        return None
    own = {
        "attention_bias": model.attention.qkv_bias,
        "layer_types": kinds_of(model),
        "partial_rotary_factor": rotary_size_field(rotary, model.head_size),
    }
    return common_fields(model) | delta_net_fields(mixer) | own


def _read(fields: ConfigFields) -> ModelConfig:
    layers, model = read_hybrid_layers(fields, by_key_head=True)
    experts = read_experts(
        fields,
        "num_experts",
        renormalised=fields.flag("norm_topk_prob", True),
        shared_size=fields.whole("shared_expert_intermediate_size", default=512),
        shared_gate=True,
    )
    size = fields.whole("moe_intermediate_size", default=512)
    mixed = [
        layer.with_feed_forward(size=size, experts=experts) if sparse else layer
        for layer, sparse in zip(layers, sparse_layers(fields, len(layers)), strict=True)
    ]
    return replace(model, layers=tuple(mixed))


def _write(model: ModelConfig) -> dict[str, Any] | None:
    written, sparse, own = sparse_fields(model), first_sparse(model), hybrid_fields(model)
    if written is None or own is None or sparse is None or sparse.experts is None:
        return None
    return own | written | {"shared_expert_intermediate_size": sparse.experts.shared_size}


QWEN3_NEXT = relative(
    model_type="qwen3_next",
    title="Qwen3-Next",
    architectures=("Qwen3NextForCausalLM", "Qwen3NextModel"),
    config_names=NAMES,
    read=_read,
    write=_write,
    weights={
        **WEIGHTS,
        **GATED_QKV,
        **delta_net_weights(
            f"{_LAYER}linear_attn.", {"delta_in": "in_proj_qkvz", "delta_gates": "in_proj_ba"}
        ),
    },
    alternatives=FUSED,
    parts=r"mtp\..*",
    further=MTP,
)
