"""Gemma 4 (Gemma Team, 2026), text alone.

Layers without a window have wider heads than those with one, and in the larger models fewer K/V heads,
whose values are their keys. In the smaller models the last layers attend to the keys and values of earlier
ones, and each layer has an embedding of its own for each token. One model has experts beside the dense
feed-forwards.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.attention_config import QKNorm, Scores
from orca_jax.families.config_fields import HF_ACTIVATIONS, ConfigFields
from orca_jax.families.decoders.gemma import GEMMA_NORMS
from orca_jax.families.decoders.llama_like import (
    FULL,
    SLIDING,
    Sizes,
    common_fields,
    decoder,
    read_alternating_kinds,
    read_sizes,
    relative,
    window_fields,
    with_windows,
)
from orca_jax.families.decoders.rope_fields import without_rope
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.mixtures.experts_in_files import first_sparse
from orca_jax.families.model_config import FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.rotary import Rotary
from orca_jax.families.stored_name import StoredName, all_experts, as_it_is
from orca_jax.families.strict_json import shown
from orca_jax.families.text_part import text_part

# transformers' defaults of fields that a file may lack.
_HEAD_SIZE, _GLOBAL_HEAD_SIZE, _WINDOW, _PERIOD, _INPUT = 256, 512, 512, 6, 256
_BASES = {FULL: 1e6, SLIDING: 1e4}
_LAYER = "{prefix}layers.{i}."
_WEIGHTS: Mapping[str, StoredName] = {
    **GEMMA_NORMS,
    **{
        f"layers.{{i}}.{name}": as_it_is(f"{_LAYER}{stored}")
        for name, stored in (
            ("input_gate.weight", "per_layer_input_gate.weight"),
            ("input_out.weight", "per_layer_projection.weight"),
            ("input_norm.scale", "post_per_layer_input_norm.weight"),
            ("scalar", "layer_scalar"),
            ("router.weight", "router.proj.weight"),
            ("router_norm.scale", "router.scale"),
            ("router.scales", "router.per_expert_scale"),
            ("mlp_mid_norm.scale", "post_feedforward_layernorm_1.weight"),
            ("experts_norm.scale", "pre_feedforward_layernorm_2.weight"),
            ("experts_out_norm.scale", "post_feedforward_layernorm_2.weight"),
        )
    },
    "layers.{i}.experts.up.weight": all_experts(f"{_LAYER}experts.gate_up_proj"),
    "layers.{i}.experts.down.weight": all_experts(f"{_LAYER}experts.down_proj"),
    "inputs.embedding": as_it_is("{prefix}embed_tokens_per_layer.weight"),
    "inputs.project": as_it_is("{prefix}per_layer_model_projection.weight"),
    "inputs.norm.scale": as_it_is("{prefix}per_layer_projection_norm.weight"),
}


def _read(fields: ConfigFields) -> ModelConfig:
    fields.whole("num_key_value_heads")  # transformers' default is not the number of query heads
    sizes = read_sizes(fields, head_size=_HEAD_SIZE)
    if fields.raw("use_bidirectional_attention") not in (None, "vision"):  # text is causal with vision too
        raise UnsupportedModel(
            f"{shown(fields.path)}: use_bidirectional_attention: expected vision or null, found "
            f"{shown(fields.raw('use_bidirectional_attention'))}; attention to later tokens is not supported"
        )
    kinds = [*read_alternating_kinds(fields, sizes.n_layers, _PERIOD)]
    kinds[-1] = FULL  # as transformers does, whatever the file says
    sources = _read_sources(fields, kinds)
    of_kind = {kind: _read_layer(fields, _read_heads(fields, sizes, kinds, kind), kind) for kind in _BASES}
    dense = of_kind[FULL].feed_forward
    assert dense is not None
    double = fields.flag("use_double_wide_mlp", False)
    layers: list[Layer] = []
    for kind, source in zip(kinds, sources, strict=True):
        layer = of_kind[kind]
        if source is not None:
            layer = layer.with_attention(kv_from=source, value_norm=None, values_are_keys=False)
            layer = layer.with_feed_forward(size=2 * dense.size) if double else layer
        layers.append(layer)
    return decoder(
        fields,
        sizes,
        with_windows(fields, layers, kinds, fields.whole_or_null("sliding_window", _WINDOW)),
        tied=True,
        embedding_multiplier=sizes.hidden_size**0.5,
        logit_soft_cap=fields.number_or_null("final_logit_softcapping", None),
    )


def _read_sources(fields: ConfigFields, kinds: Sequence[str]) -> list[int | None]:
    """Read whose keys and values each layer takes: those of the last layer of its kind that has its own."""
    n_shared = fields.whole("num_kv_shared_layers", default=0)
    first = len(kinds) - n_shared
    own = {kind: i for i, kind in enumerate(kinds[: max(0, first)])}
    if n_shared < 0 or any(kind not in own for kind in kinds[max(0, first) :]):
        raise BadModelConfig(
            f"{shown(fields.path)}: num_kv_shared_layers: expected a number of last layers before which "
            f"there is one of each of their kinds, found {n_shared}"
        )
    return [None if i < first else own[kind] for i, kind in enumerate(kinds)]


def _read_heads(fields: ConfigFields, sizes: Sizes, kinds: Sequence[str], kind: str) -> Sizes:
    """Read the sizes with the heads of the layers of this kind. Raises UnsupportedModel."""
    by_layer = fields.section("per_layer_config")
    wide, fewer = fields.whole("global_head_dim", default=_GLOBAL_HEAD_SIZE), None
    if fields.flag("attention_k_eq_v", False):
        fewer = fields.whole_or_null("num_global_key_value_heads", None)
    else:
        fields.raw("num_global_key_value_heads")
    if by_layer is None:
        if kind == SLIDING:
            return sizes
        return sizes._replace(head_size=wide, n_kv_heads=fewer or sizes.n_kv_heads)
    found: set[Sizes] = set()
    for i, own in enumerate(kinds):
        named = (by_layer.section(f"{i:0{width}}") for width in range(1, 5))  # transformers writes 05 of 30
        layer = next((one for one in named if one is not None), None)
        heads = sizes
        if layer is not None:
            heads = sizes._replace(
                head_size=layer.whole("head_dim", default=sizes.head_size),
                n_kv_heads=layer.whole("num_key_value_heads", default=sizes.n_kv_heads),
            )
            layer.leave_others({})
        found |= {heads} if own == kind else set()
    if len(found) > 1:
        raise UnsupportedModel(
            f"{shown(fields.path)}: per_layer_config: expected the same heads in all layers of {kind}; "
            "others are not supported"
        )
    return found.pop() if found else sizes


def _read_layer(fields: ConfigFields, sizes: Sizes, kind: str) -> Layer:
    """Read a layer of this kind, without its window, which has its own keys and values."""
    norm = Norm(kind="rms_norm", eps=fields.number("rms_norm_eps", 1e-6))
    bias = fields.flag("attention_bias", False)
    attention = sizes.attention(
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNorm(norm=norm),
        rotary=_read_rotary(fields, sizes, kind),
        scores=Scores(scale=1.0),
        value_norm=norm.eps,
        values_are_keys=kind == FULL and fields.flag("attention_k_eq_v", False),
    )
    dense = FeedForward(
        size=fields.whole("intermediate_size"),
        activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
        gated=True,
        bias=False,
    )
    input_size = fields.whole("hidden_size_per_layer_input", default=_INPUT) or None
    vocabulary = fields.whole("vocab_size_per_layer_input", default=sizes.vocab_size)
    if input_size is not None and vocabulary != sizes.vocab_size:
        raise UnsupportedModel(
            f"{shown(fields.path)}: vocab_size_per_layer_input: expected vocab_size, {sizes.vocab_size}, "
            f"found {vocabulary}; another vocabulary is not supported"
        )
    return Layer(
        attention=attention,
        feed_forward=dense,
        norm=norm,
        residual="both",
        beside=_read_experts(fields, dense, sizes.hidden_size, norm),
        input_size=input_size,
        scalar=True,
    )


def _read_experts(
    fields: ConfigFields, dense: FeedForward, hidden_size: int, norm: Norm
) -> FeedForward | None:
    """Read the experts beside the dense feed-forward; None where there are none."""
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not fields.flag("enable_moe_block", False):
        for name in names:
            fields.raw(name)
        return None
    number, top_k, size = (fields.whole(name) for name in names)
    experts = Experts(
        number=number,
        top_k=top_k,
        renormalised=True,
        router_norm=norm.eps,
        router_multiplier=hidden_size**-0.5,
        scaled=True,
    )
    return FeedForward(size=size, activation=dense.activation, gated=True, bias=False, experts=experts)


def _read_rotary(fields: ConfigFields, sizes: Sizes, kind: str) -> Rotary:
    """Read the rotary positions of a kind of layers: those without a window turn a quarter of the pairs.

    Raises UnsupportedModel for other types than default and proportional.
    """
    nested = fields.section("rope_parameters")
    found = None if nested is None else nested.section(kind)
    if nested is not None:
        nested.raw(SLIDING if kind == FULL else FULL)
        nested.leave_others({})
    proportional, factor, base = kind == FULL, 0.25, _BASES[kind]
    if found is not None:
        proportional = found.choice("rope_type", {"default": False, "proportional": True}, "default")
        factor = found.number("partial_rotary_factor", 1.0)
        base = found.number("rope_theta", base)
        if found.number("factor", 1.0) != 1.0 or (factor != 1.0 and not proportional):
            raise UnsupportedModel(
                f"{shown(fields.path)}: rope_parameters.{kind}: a factor, or a partial_rotary_factor of the "
                "default type, is not supported"
            )
        found.leave_others({})
    n_turned = int(factor * sizes.head_size // 2) if proportional else sizes.head_size // 2
    all_turn = n_turned == sizes.head_size // 2
    return Rotary(size=sizes.head_size, base=base, n_turned=None if all_turn else n_turned)


def _write(model: ModelConfig) -> dict[str, Any] | None:
    own = [layer for layer in model.layers if layer.attention is not None]
    local = next((one for one in own if one.attention and one.attention.scores.window is not None), None)
    full = next((one for one in own if one.attention and one.attention.scores.window is None), None)
    if full is None or full.attention is None or full.attention.rotary is None:
        return None
    narrow = (local or full).attention or model.attention
    wide, dense = full.attention, model.feed_forward
    shared = [layer for layer in own if layer.attention and layer.attention.kv_from is not None]
    parameters = {
        FULL: {
            "rope_type": "proportional",
            "rope_theta": full.attention.rotary.base,
            "partial_rotary_factor": 2
            * (full.attention.rotary.n_turned or wide.head_size // 2)
            / wide.head_size,
        },
    }
    if local is not None and narrow.rotary is not None:
        parameters[SLIDING] = {"rope_type": "default", "rope_theta": narrow.rotary.base}
    written = without_rope(common_fields(model)) | window_fields(model)
    del written["hidden_act"]
    written |= {
        "attention_bias": narrow.qkv_bias,
        "hidden_activation": HF_ACTIVATIONS[dense.activation],
        "num_key_value_heads": narrow.n_kv_heads // narrow.kv_repeats,
        "head_dim": narrow.head_size,
        "global_head_dim": wide.head_size,
        "num_global_key_value_heads": wide.n_kv_heads // wide.kv_repeats,
        "attention_k_eq_v": any(one.attention.values_are_keys for one in own if one.attention),
        "num_kv_shared_layers": len(shared),
        "use_double_wide_mlp": any(one.feed_forward not in (None, dense) for one in shared),
        "hidden_size_per_layer_input": model.input_size or 0,
        "vocab_size_per_layer_input": model.vocab_size,
        "final_logit_softcapping": model.logit_soft_cap,
        "rope_parameters": parameters,
    }
    sparse = first_sparse(model)
    if sparse is not None and sparse.experts is not None:
        written |= {
            "enable_moe_block": True,
            "num_experts": sparse.experts.number,
            "top_k_experts": sparse.experts.top_k,
            "moe_intermediate_size": sparse.size,
        }
    return written


GEMMA4_TEXT = relative(
    model_type="gemma4_text",
    title="Gemma 4",
    architectures=("Gemma4ForCausalLM", "Gemma4TextModel"),
    config_names={
        "head_size": "head_dim or global_head_dim",
        "n_kv_heads": "num_key_value_heads or num_global_key_value_heads",
        "logit_soft_cap": "final_logit_softcapping",
        "input_size": "hidden_size_per_layer_input",
        "n_experts": "num_experts",
        "top_k": "top_k_experts",
    },
    read=_read,
    write=_write,
    weights=_WEIGHTS,
    # Layers that take the keys and values of others have projections to their own, which nothing reads.
    buffers=r"layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight",
)
GEMMA4 = text_part(
    GEMMA4_TEXT,
    model_type="gemma4",
    title="Gemma 4 with vision and sound",
    architectures=("Gemma4ForConditionalGeneration", "Gemma4Model"),
    prefixes=("model.language_model.", "language_model.model.", "language_model.", "model."),
    head="language_model.lm_head.weight",
    parts=r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\..*",
    unread={"vision_soft_tokens_per_image": "of pictures"},
    defaults={
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
)
