"""DeepSeek-V2 and -V3 (2024): latent attention, experts in groups, and a shared expert.

A checkpoint of V3 has layers after the last one that predict further tokens (next_token.py). Of Kimi K2.5
(Moonshot AI, 2026), which has V3's form and vision, the text part is served.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from orca_jax.errors import BadModelConfig
from orca_jax.families.attention_config import Indexer, Latent, Scores, Temperature, latent_attention
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    Sizes,
    common_fields,
    decoder,
    read_gated,
    read_n_layers,
    relative,
)
from orca_jax.families.decoders.rope_fields import read_rotary
from orca_jax.families.family import Family
from orca_jax.families.further_layer import AFTER_LAST
from orca_jax.families.mixtures import experts_in_files
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.mixtures.experts_in_files import (
    mixed_fields,
    read_corrected_experts,
    read_mixed,
)
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.stored_name import StoredName, as_it_is, linear
from orca_jax.families.strict_json import shown
from orca_jax.families.text_part import text_part

UNREAD: Mapping[str, str] = dict.fromkeys(
    ("num_nextn_predict_layers", "num_mtp_layers"), "the layers that predict further tokens"
)
CONFIG_NAMES: Mapping[str, str] = {
    "n_experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "n_groups": "n_group",
    "top_groups": "topk_group",
    "shared_size": "n_shared_experts * moe_intermediate_size",
    "experts_multiplier": "routed_scaling_factor",
    "latent_rank": "kv_lora_rank",
    "latent_query_rank": "q_lora_rank",
    "latent_rotary_size": "qk_rope_head_dim",
    "latent_plain_size": "qk_nope_head_dim",
    "latent_value_size": "v_head_dim",
    "ffn_size": "intermediate_size or moe_intermediate_size",
}
_ATTENTION = "{prefix}layers.{i}.self_attn."
WEIGHTS: Mapping[str, StoredName] = {
    **experts_in_files.WEIGHTS,
    **experts_in_files.SHARED_EXPERTS,
    "layers.{i}.q.weight": as_it_is(f"{_ATTENTION}q_proj.weight"),
    **linear("layers.{i}.q_a", f"{_ATTENTION}q_a_proj"),
    "layers.{i}.q_a_norm.scale": as_it_is(f"{_ATTENTION}q_a_layernorm.weight"),
    "layers.{i}.q_b.weight": as_it_is(f"{_ATTENTION}q_b_proj.weight"),
    **linear("layers.{i}.kv_a", f"{_ATTENTION}kv_a_proj_with_mqa"),
    "layers.{i}.kv_a_norm.scale": as_it_is(f"{_ATTENTION}kv_a_layernorm.weight"),
    "layers.{i}.kv_b.weight": as_it_is(f"{_ATTENTION}kv_b_proj.weight"),
    "layers.{i}.out.weight": as_it_is(f"{_ATTENTION}o_proj.weight"),
}


def _read_v3(fields: ConfigFields) -> ModelConfig:
    experts = read_corrected_experts(fields, multiplier=2.5, n_groups=8, top_groups=4)
    sparse = _sparse_layers(fields, n_dense=3)
    return read_latent_decoder(fields, experts, sparse, interleaved=fields.flag("rope_interleave", True))


def _read_v2(fields: ConfigFields) -> ModelConfig:
    fields.choice("scoring_func", {"softmax": None}, "softmax")
    # transformers ignores norm_topk_prob, the authors' code does not.
    fields.must_be("norm_topk_prob", False, "a sum of 1 of the chosen experts' weights in this family")
    fields.must_be("mlp_bias", False, "a bias in feed-forward layers")
    n_groups, top_groups = fields.whole("n_group", default=1), fields.whole("topk_group", default=1)
    grouped = fields.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    experts = Experts(
        number=fields.whole("n_routed_experts", "num_experts"),
        top_k=fields.whole("num_experts_per_tok"),
        multiplier=fields.number("routed_scaling_factor", 1.0),
        n_groups=n_groups if grouped else 1,
        top_groups=top_groups if grouped else 1,
    )
    return read_latent_decoder(fields, experts, _sparse_layers(fields, n_dense=0), interleaved=True)


def _sparse_layers(fields: ConfigFields, *, n_dense: int) -> list[bool]:
    """Read which layers have experts; `n_dense` is the default of first_k_dense_replace."""
    first = fields.whole("first_k_dense_replace", default=n_dense)
    every = fields.whole("moe_layer_freq", default=1)
    if every < 1:
        raise BadModelConfig(f"{shown(fields.path)}: moe_layer_freq: expected at least 1, found {every}")
    return [i >= first and i % every == 0 for i in range(read_n_layers(fields))]


def read_latent_decoder(
    fields: ConfigFields,
    experts: Experts,
    sparse: Sequence[bool],
    *,
    interleaved: bool,
    eps: float = 1e-6,
    query_rank: int = 1536,
    n_shared: int = 0,
    temperature: Temperature | None = None,
    rope_others: tuple[str, ...] = (),
    whole_heads: bool = False,
    indexer: Indexer | None = None,
    shares: Sequence[bool] = (),
) -> ModelConfig:
    """Read a decoder with latent attention, and `experts` in the layers that are `sparse`.

    `eps`, `query_rank` and `n_shared` are the family's defaults of rms_norm_eps, q_lora_rank and
    n_shared_experts. `rope_others` are fields of rope_parameters that the family reads itself. With
    `whole_heads` the file's head_dim counts the unrotated part of a key too. `shares` says which layers share
    the `indexer` of an earlier one; empty for none.
    """
    n_heads = fields.whole("num_attention_heads")
    latent = Latent(
        rank=fields.whole("kv_lora_rank"),
        rotary_size=fields.whole("qk_rope_head_dim"),
        plain_size=fields.whole("qk_nope_head_dim"),
        value_size=fields.whole("v_head_dim"),
        query_rank=fields.whole_or_null("q_lora_rank", query_rank),
    )
    rotary = read_rotary(
        fields,
        head_size=latent.rotary_size,
        n_positions=fields.whole("max_position_embeddings"),
        interleaved=interleaved,
        others=rope_others,
    )
    bias, factor = fields.flag("attention_bias", False), rotary.score_factor
    scale = None if factor == 1.0 else latent.query_size**-0.5 * factor
    attention = latent_attention(
        latent,
        n_heads=n_heads,
        rotary=rotary,
        scores=Scores(scale=scale, temperature=temperature),
        qkv_bias=bias,
        out_bias=bias,
        indexer=indexer,
    )
    for name, expected in (
        ("num_key_value_heads", n_heads),
        ("head_dim", latent.query_size if whole_heads else latent.rotary_size),
        ("qk_head_dim", latent.query_size),
    ):
        if (found := fields.whole(name, default=expected)) != expected:
            raise BadModelConfig(
                f"{shown(fields.path)} disagrees with itself: {name} is {found}, and by the other sizes it "
                f"must be {expected}"
            )
    sizes = Sizes(
        vocab_size=fields.whole("vocab_size"),
        n_positions=fields.whole("max_position_embeddings"),
        hidden_size=fields.whole("hidden_size"),
        n_layers=len(sparse),
        n_heads=n_heads,
        n_kv_heads=1,
        head_size=attention.head_size,
    )
    norm = Norm(kind="rms_norm", eps=fields.number("rms_norm_eps", eps))
    dense = Layer(attention=attention, feed_forward=read_gated(fields), norm=norm)
    mixed = read_mixed(fields, dense, experts, n_shared=n_shared)
    layers = [mixed if has_experts else dense for has_experts in sparse]
    if indexer is not None and any(shares):
        taking = replace(indexer, shared=True)
        layers = [
            layer.with_attention(indexer=taking) if shared else layer
            for layer, shared in zip(layers, shares, strict=True)
        ]
    return decoder(fields, sizes, layers)


def _write_v3(model: ModelConfig) -> dict[str, Any] | None:
    written, rotary = _written(model), model.attention.rotary
    return None if written is None or rotary is None else written | {"rope_interleave": rotary.interleaved}


def _write_v2(model: ModelConfig) -> dict[str, Any] | None:
    written = _written(model)
    if written is None:
        return None
    grouped = written["n_group"] > 1
    return written | {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def _written(model: ModelConfig) -> dict[str, Any] | None:
    """The fields that both versions write; None without latent attention or experts."""
    written = latent_fields(model)
    mixed = [i for i, layer in enumerate(model.layers) if layer.experts is not None]
    return written and written | {
        "first_k_dense_replace": mixed[0],
        "moe_layer_freq": mixed[1] - mixed[0] if len(mixed) > 1 else 1,
    }


def latent_fields(
    model: ModelConfig, *, without_experts: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """The fields that `read_latent_decoder` reads; None without latent attention or experts.

    If no layer has experts, `without_experts` are their fields.
    """
    attention, mixed = model.attention, mixed_fields(model) or without_experts
    latent = attention.latent
    if latent is None or mixed is None:
        return None
    fields = common_fields(model) | {**mixed}
    fields |= {
        "num_key_value_heads": attention.n_heads,
        "attention_bias": attention.qkv_bias,
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank,
        "qk_rope_head_dim": latent.rotary_size,
        "qk_nope_head_dim": latent.plain_size,
        "v_head_dim": latent.value_size,
    }
    del fields["head_dim"]
    return fields


def _family(version: int, read: Callable[[ConfigFields], ModelConfig], **other: Any) -> Family:
    classes = f"DeepseekV{version}"
    return relative(
        model_type=f"deepseek_v{version}",
        title=f"DeepSeek-V{version}",
        architectures=(f"{classes}ForCausalLM", f"{classes}Model"),
        config_names=CONFIG_NAMES,
        read=read,
        weights=WEIGHTS,
        alternatives=experts_in_files.FUSED,
        unread=UNREAD,
        **other,
    )


DEEPSEEK_V2 = _family(2, _read_v2, write=_write_v2)
DEEPSEEK_V3 = _family(3, _read_v3, write=_write_v3, further=AFTER_LAST)
KIMI_K25 = text_part(
    DEEPSEEK_V3,
    or_texts=(replace(DEEPSEEK_V3, model_type="kimi_k2"),),  # as published
    model_type="kimi_k25",
    title="Kimi K2.5 with vision",
    architectures=("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration", "Kimi_K25Model"),
    prefixes=("model.language_model.", "language_model.model.", "language_model.", "model."),
    head="language_model.lm_head.weight",
    parts=r"(model\.)?(vision_tower|mm_projector)\..*",
    defaults={},
    inner=("tie_word_embeddings",),
    aliases={".layers.": ".blocks."},  # transformers 5 saves the text with the vision tower's word
    unread={
        "ignore_index": "of training",
        "use_unified_vision_chunk": "of the vision tower",
        "projection_layer_norm_eps": "of the projector",
    },
)
