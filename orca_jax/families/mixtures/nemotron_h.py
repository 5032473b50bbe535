"""Nemotron-H (NVIDIA, 2025), Nemotron Nano 2 and Nemotron 3: each layer is Mamba-2, attention without
positions, a feed-forward or a mixture of experts, and nothing else.
"""

from collections.abc import Mapping
from typing import Any

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.config_fields import HF_ACTIVATIONS, ConfigFields
from orca_jax.families.decoders.llama_like import (
    CONFIG_NAMES,
    Sizes,
    common_fields,
    decoder,
    read_sizes,
)
from orca_jax.families.family import Family
from orca_jax.families.further_layer import FurtherLayer
from orca_jax.families.hybrid_fields import first_recurrence, mamba2_weights, must_be_silu
from orca_jax.families.mixtures.experts_in_files import (
    feed_forwards_of,
    first_sparse,
    read_corrected_experts,
)
from orca_jax.families.model_config import FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.recurrence_config import Mamba2
from orca_jax.families.stored_name import (
    all_experts,
    as_it_is,
    linear,
    projections,
    query_heads,
    separate_heads,
    stacked,
)
from orca_jax.families.strict_json import shown

MAMBA, ATTENTION, DENSE, SPARSE = "M", "*", "-", "E"  # a layer in `hybrid_override_pattern`
# The names of kinds in `layers_block_type`, in older files and newer ones.
_KINDS: Mapping[str, str] = {
    "linear_attention": MAMBA,
    "full_attention": ATTENTION,
    "mlp": DENSE,
    "moe": SPARSE,
    "mamba": MAMBA,
    "attention": ATTENTION,
}
_EXPERT_FIELDS = (
    *("n_routed_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size", "n_shared_experts", "n_group", "topk_group"),
    *("norm_topk_prob", "routed_scaling_factor"),
)
_LAYER = "{prefix}layers.{i}."
_MIXER = f"{_LAYER}mixer."
_POSITIONS = "its attention has no positions"
_INITIAL = "initial values for training"
_FURTHER = "the layers that predict further tokens"
_SAME = "another way to compute the same"


def _read(fields: ConfigFields) -> ModelConfig:
    kinds = _read_kinds(fields)
    sizes = read_sizes(fields.with_values({"num_hidden_layers": len(kinds)}, default=True), head_size=128)
    if sizes.n_layers != len(kinds):
        raise BadModelConfig(
            f"{shown(fields.path)} disagrees with itself: num_hidden_layers is {sizes.n_layers}, but "
            f"{len(kinds)} kinds of layers are listed"
        )
    norm = Norm(kind="rms_norm", eps=fields.number("layer_norm_epsilon", 1e-5))
    every = {
        kind: _read_layer(fields, sizes, norm, kind)
        for kind in dict.fromkeys((MAMBA, ATTENTION, DENSE, *kinds))
    }
    for name in _EXPERT_FIELDS if SPARSE not in kinds else ():
        fields.raw(name)
    return decoder(fields, sizes, [every[kind] for kind in kinds])


def _read_kinds(fields: ConfigFields) -> str:
    """Read each layer's kind as `hybrid_override_pattern` has it. Raises BadModelConfig."""
    listed = fields.texts("layers_block_type") or fields.texts("layer_types")
    found = fields.text("hybrid_override_pattern", "")
    name, wrong = "hybrid_override_pattern", set(found) - set(_KINDS.values())
    if listed is not None:
        name, wrong = "layers_block_type", set(listed) - set(_KINDS)
    if wrong or not (listed or found):
        allowed = ", ".join(_KINDS) if listed else "M, *, - and E"
        raise BadModelConfig(
            f"{shown(fields.path)}: {name}: expected a kind for each layer, of {allowed}, "
            f"found {shown(list(listed) if listed else found)}"
        )
    kinds = found if listed is None else "".join(_KINDS[kind] for kind in listed)
    if found and found != kinds:
        raise BadModelConfig(
            f"{shown(fields.path)} disagrees with itself: hybrid_override_pattern is {shown(found)}, but by "
            f"layers_block_type it is {shown(kinds)}"
        )
    return kinds


def _read_layer(fields: ConfigFields, sizes: Sizes, norm: Norm, kind: str) -> Layer:
    """Read a layer of one kind."""
    if kind == ATTENTION:
        own = sizes.attention(qkv_bias=False, out_bias=False)
        return Layer(attention=own, feed_forward=None, norm=norm)
    if kind == MAMBA:
        return Layer(attention=None, recurrence=_read_mamba2(fields, norm), feed_forward=None, norm=norm)
    dense = FeedForward(
        size=fields.whole("intermediate_size", default=21504),
        activation=fields.activation("mlp_hidden_act", "relu2"),
        bias=fields.flag("mlp_bias", False),
    )
    layer = Layer(attention=None, feed_forward=dense, norm=norm)
    return layer if kind == DENSE else _with_experts(fields, layer)


def _with_experts(fields: ConfigFields, dense: Layer) -> Layer:
    fields.must_be("mlp_bias", False, "a bias in layers with experts")
    if fields.whole("n_shared_experts", default=1) != 1:
        raise UnsupportedModel(
            f"{shown(fields.path)}: n_shared_experts: expected 1, found {fields.whole('n_shared_experts')}; "
            "the size of the shared expert is moe_shared_expert_intermediate_size"
        )
    experts = read_corrected_experts(
        fields,
        multiplier=1.0,
        shared_size=fields.whole("moe_shared_expert_intermediate_size"),
        latent_size=fields.whole_or_null("moe_latent_size", None),
    )
    return dense.with_feed_forward(size=fields.whole("moe_intermediate_size"), experts=experts)


def _read_mamba2(fields: ConfigFields, norm: Norm) -> Mamba2:
    must_be_silu(fields, "mamba_hidden_act")
    return Mamba2(
        n_heads=fields.whole("mamba_num_heads", default=128),
        head_size=fields.whole("mamba_head_dim", default=64),
        n_groups=fields.whole("n_groups", "mamba_n_groups", default=8),
        state_size=fields.whole("ssm_state_size", default=128),
        width=fields.whole("conv_kernel", "mamba_d_conv", default=4),
        norm=norm,
        conv_bias=fields.flag("use_conv_bias", True),
        bias=fields.flag("use_bias", False),
        least_step=fields.number("time_step_min", 0.001),  # transformers clips steps to it alone
    )


def _kind_of(layer: Layer) -> str | None:
    """The kind of a layer of one part; None for others."""
    if layer.mixes and layer.feed_forward is not None:
        return None
    if layer.mixes:
        return MAMBA if layer.recurrence is not None else ATTENTION
    return DENSE if layer.experts is None else SPARSE


def _write(model: ModelConfig) -> dict[str, Any] | None:
    kinds, mixer = [_kind_of(layer) for layer in model.layers], first_recurrence(model)
    if None in kinds or (mixer is not None and not isinstance(mixer, Mamba2)):
        return None
    every = feed_forwards_of(model)
    dense = next((each for each in every if each.experts is None), None)
    written = common_fields(model) | {
        "hybrid_override_pattern": "".join(kind or "" for kind in kinds),
        "layer_norm_epsilon": model.layers[0].norm.eps,
        "mlp_hidden_act": HF_ACTIVATIONS[every[0].activation],
    }
    for name in ("hidden_act", "rms_norm_eps", "intermediate_size"):
        del written[name]
    if dense is not None:
        written |= {"intermediate_size": dense.size, "mlp_bias": dense.bias}
    if mixer is not None:
        written |= _mamba2_fields(mixer)
    return written | _expert_fields(model)


def _mamba2_fields(mixer: Mamba2) -> dict[str, Any]:
    return {
        "mamba_num_heads": mixer.n_heads,
        "mamba_head_dim": mixer.head_size,
        "n_groups": mixer.n_groups,
        "ssm_state_size": mixer.state_size,
        "conv_kernel": mixer.width,
        "use_conv_bias": mixer.conv_bias,
        "use_bias": mixer.bias,
        "time_step_min": mixer.least_step,
    }


def _expert_fields(model: ModelConfig) -> dict[str, Any]:
    sparse = first_sparse(model)
    if sparse is None or sparse.experts is None:
        return {}
    experts = sparse.experts
    return {
        "moe_intermediate_size": sparse.size,
        "moe_shared_expert_intermediate_size": experts.shared_size,
        "moe_latent_size": experts.latent_size,
        "n_routed_experts": experts.number,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.renormalised,
        "routed_scaling_factor": experts.multiplier,
        "n_group": experts.n_groups,
        "topk_group": experts.top_groups,
    }


NEMOTRON_H = Family(
    model_type="nemotron_h",
    title="Nemotron-H, Nemotron Nano 2, Nemotron 3",
    architectures=("NemotronHForCausalLM", "NemotronHModel"),
    config_names={
        **CONFIG_NAMES,
        "norm_eps": "layer_norm_epsilon",
        "ffn_size": "intermediate_size or moe_intermediate_size",
        "mamba_n_heads": "mamba_num_heads",
        "mamba_head_size": "mamba_head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_state_size": "ssm_state_size",
        "conv_width": "conv_kernel",
        "n_experts": "n_routed_experts",
        "top_k": "num_experts_per_tok",
        "top_groups": "topk_group",
        "shared_size": "moe_shared_expert_intermediate_size",
        "latent_size": "moe_latent_size",
        "experts_multiplier": "routed_scaling_factor",
    },
    read=_read,
    write=_write,
    prefixes=("backbone.", "model.", ""),
    weights={
        "token_embedding": as_it_is("{prefix}embeddings.weight"),
        "layers.{i}.attn_norm.scale": as_it_is(f"{_LAYER}norm.weight"),
        "layers.{i}.mlp_norm.scale": as_it_is(f"{_LAYER}norm.weight"),
        **projections("layers.{i}.qkv", _MIXER, "qkv", separate_heads),
        **linear("layers.{i}.out", f"{_MIXER}o_proj", query_heads),
        **mamba2_weights(_MIXER),
        **linear("layers.{i}.up", f"{_MIXER}up_proj"),
        **linear("layers.{i}.down", f"{_MIXER}down_proj"),
        "layers.{i}.router.weight": as_it_is(f"{_MIXER}gate.weight"),
        "layers.{i}.router.correction": as_it_is(f"{_MIXER}gate.e_score_correction_bias"),
        "layers.{i}.latent.down.weight": as_it_is(f"{_MIXER}fc1_latent_proj.weight"),
        "layers.{i}.latent.up.weight": as_it_is(f"{_MIXER}fc2_latent_proj.weight"),
        **{
            f"layers.{{i}}.experts.{name}.weight": stacked(f"{_MIXER}experts.{{x}}.{name}_proj.weight")
            for name in ("up", "down")
        },
        **{
            f"layers.{{i}}.shared.{name}.weight": as_it_is(f"{_MIXER}shared_experts.{name}_proj.weight")
            for name in ("up", "down")
        },
        "final_norm.scale": as_it_is("{prefix}norm_f.weight"),
        "head.weight": as_it_is("lm_head.weight"),
    },
    alternatives={
        f"layers.{{i}}.experts.{name}.weight": all_experts(f"{_MIXER}experts.{name}_proj")
        for name in ("up", "down")
    },
    unread={
        **dict.fromkeys(("rope_theta", "partial_rotary_factor", "rope_scaling"), _POSITIONS),
        **dict.fromkeys(("time_step_max", "time_step_floor", "rescale_prenorm_residual"), _INITIAL),
        **dict.fromkeys(
            ("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"), _FURTHER
        ),
        **dict.fromkeys(
            ("chunk_size", "use_mamba_kernels", "moe_shared_expert_overlap", "mamba_ssm_cache_dtype"), _SAME
        ),
        **dict.fromkeys(("norm_eps", "rms_norm_eps"), "layer_norm_epsilon is the norms' eps"),
        **dict.fromkeys(("expand", "mamba_proj_bias", "time_step_rank"), "transformers does not read it"),
        "time_step_limit": "transformers clips steps to time_step_min instead",
        "residual_in_fp32": "activations have the weights' dtype here",
    },
    parts=r"mtp\..*",
    further=FurtherLayer(
        layer="mtp.layers.{i}.",
        embedding_norm="mtp.layers.0.enorm.weight",
        state_norm="mtp.layers.0.hnorm.weight",
        project="mtp.layers.0.eh_proj.weight",
        final_norm="mtp.layers.1.final_layernorm.weight",  # of attention and experts
        goes_on_normed=True,
        tensors=r"mtp\.layers\.[01]\..*",
    ),
)
