"""Granite 4 (IBM, 2025): Mamba-2 in most layers, attention without positions in the others, and experts."""

from dataclasses import replace
from typing import Any

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.attention_config import Scores
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import common_fields, decoder, read_layer, read_sizes, relative
from orca_jax.families.hybrid_fields import (
    LINEAR,
    first_recurrence,
    kinds_of,
    mamba2_fields,
    mamba2_weights,
    read_mamba2,
    read_mixers,
    with_mixer,
)
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.mixtures.experts_in_files import EXPERT_NAMES
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.families.recurrence_config import Mamba2
from orca_jax.families.stored_name import StoredName, all_experts, as_it_is
from orca_jax.families.strict_json import shown

_LAYER = "{prefix}layers.{i}."
_SHARED = {
    name: as_it_is(f"{_LAYER}shared_mlp.{stored}_linear.weight")
    for name, stored in (("up", "input"), ("down", "output"))
}


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    layer = read_layer(
        fields,
        sizes,
        bias=fields.flag("attention_bias", False),
        scores=Scores(scale=fields.number("attention_multiplier", 1.0)),
    )
    positions = fields.text("position_embedding_type", "") or "nope"
    if positions not in ("nope", "rope"):
        raise UnsupportedModel(
            f"{shown(fields.path)}: position_embedding_type: expected rope or null, found {shown(positions)}"
        )
    if positions == "nope":
        layer = layer.with_attention(rotary=None)
    divisor = fields.number("logits_scaling", 1.0)
    if divisor <= 0:
        raise BadModelConfig(
            f"{shown(fields.path)}: logits_scaling: expected a number above 0, found {shown(divisor)}"
        )
    layer = replace(
        _with_experts(fields, layer), residual_multiplier=fields.number("residual_multiplier", 1.0)
    )
    recurrent = with_mixer(layer, read_mamba2(fields, sizes.hidden_size, layer.norm))
    kinds = read_mixers(fields, "layer_types", sizes.n_layers)
    if kinds is None:
        kinds = read_mixers(fields, "layers_block_type", sizes.n_layers)
    return decoder(
        fields,
        sizes,
        [recurrent if kind == LINEAR else layer for kind in kinds or [LINEAR] * sizes.n_layers],
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logit_multiplier=1.0 / divisor,
    )


def _with_experts(fields: ConfigFields, dense: Layer) -> Layer:
    """Read the experts with a shared one, or where there are none the shared one alone."""
    shared = fields.whole("shared_intermediate_size", default=1024)
    number, top_k = (
        fields.whole("num_local_experts", default=8),
        fields.whole("num_experts_per_tok", default=2),
    )
    if number == 0:
        return dense.with_feed_forward(size=shared)
    experts = Experts(number=number, top_k=top_k, scores="softmax_of_chosen", shared_size=shared)
    return dense.with_feed_forward(experts=experts)


def _write(model: ModelConfig) -> dict[str, Any] | None:
    layer, mixer = model.layers[0], first_recurrence(model)
    if not isinstance(mixer, Mamba2) or (own := mamba2_fields(mixer, model.hidden_size)) is None:
        return None
    dense, experts = model.feed_forward, layer.experts
    return (
        common_fields(model)
        | own
        | {
            "attention_bias": model.attention.qkv_bias,
            "attention_multiplier": model.attention.scale,
            "position_embedding_type": None if model.attention.rotary is None else "rope",
            "residual_multiplier": layer.residual_multiplier,
            "embedding_multiplier": model.embedding.multiplier,
            "logits_scaling": 1.0 / model.logit_multiplier,
            "layer_types": kinds_of(model),
            "shared_intermediate_size": dense.size if experts is None else experts.shared_size,
            "num_local_experts": 0 if experts is None else experts.number,
            "num_experts_per_tok": 0 if experts is None else experts.top_k,
        }
    )


def _renamed(model: ModelConfig) -> dict[str, StoredName]:
    dense = model.layers[0].experts is None
    return {f"layers.{{i}}.{name}.weight": stored for name, stored in _SHARED.items()} if dense else {}


GRANITE_HYBRID = relative(
    model_type="granitemoehybrid",
    title="Granite 4",
    architectures=("GraniteMoeHybridForCausalLM", "GraniteMoeHybridModel"),
    config_names={
        **EXPERT_NAMES,
        "n_experts": "num_local_experts",
        "shared_size": "shared_intermediate_size",
        "attention_scale": "attention_multiplier",
        "conv_width": "mamba_d_conv",
        "mamba_state_size": "mamba_d_state",
    },
    read=_read,
    write=_write,
    weights={
        **mamba2_weights(f"{_LAYER}mamba."),
        "layers.{i}.router.weight": as_it_is(f"{_LAYER}block_sparse_moe.router.layer.weight"),
        "layers.{i}.experts.up.weight": all_experts(f"{_LAYER}block_sparse_moe.input_linear.weight"),
        "layers.{i}.experts.down.weight": all_experts(f"{_LAYER}block_sparse_moe.output_linear.weight"),
        **{f"layers.{{i}}.shared.{name}.weight": stored for name, stored in _SHARED.items()},
    },
    renamed=_renamed,
    unread={"normalization_function": "its norms are RMSNorm"},
)
