"""DeepSeek-V2 and -V3 (2024): latent attention, experts in groups, and a shared expert.

A checkpoint of V3 has layers after the last one that predict further tokens; they are not read.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orca_jax.errors import BadModelConfig
from orca_jax.families.attention_config import Attention, Latent, Scores, latent_attention
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import Sizes, common_fields, decoder, read_gated, relative
from orca_jax.families.decoders.rope_fields import read_rotary
from orca_jax.families.family import Family
from orca_jax.families.mixtures import experts_in_files
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.mixtures.experts_in_files import first_sparse
from orca_jax.families.model_config import FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.stored_name import StoredName, as_it_is, linear, stacked
from orca_jax.families.strict_json import shown

_UNREAD: Mapping[str, str] = dict.fromkeys(
    ("num_nextn_predict_layers", "num_mtp_layers"), "the layers that predict further tokens"
)
_CONFIG_NAMES: Mapping[str, str] = {
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
_MLP = "{prefix}layers.{i}.mlp."
_SHARED = tuple(f"{_MLP}shared_experts.{part}_proj.weight" for part in ("gate", "up"))
_WEIGHTS: Mapping[str, StoredName] = {
    **experts_in_files.WEIGHTS,
    "layers.{i}.q.weight": as_it_is(f"{_ATTENTION}q_proj.weight"),
    **linear("layers.{i}.q_a", f"{_ATTENTION}q_a_proj"),
    "layers.{i}.q_a_norm.scale": as_it_is(f"{_ATTENTION}q_a_layernorm.weight"),
    "layers.{i}.q_b.weight": as_it_is(f"{_ATTENTION}q_b_proj.weight"),
    **linear("layers.{i}.kv_a", f"{_ATTENTION}kv_a_proj_with_mqa"),
    "layers.{i}.kv_a_norm.scale": as_it_is(f"{_ATTENTION}kv_a_layernorm.weight"),
    "layers.{i}.kv_b.weight": as_it_is(f"{_ATTENTION}kv_b_proj.weight"),
    "layers.{i}.out.weight": as_it_is(f"{_ATTENTION}o_proj.weight"),
    "layers.{i}.router.correction": as_it_is(f"{_MLP}gate.e_score_correction_bias"),
    "layers.{i}.shared.up.weight": stacked(*_SHARED),
    "layers.{i}.shared.down.weight": as_it_is(f"{_MLP}shared_experts.down_proj.weight"),
}


def _read_v3(fields: ConfigFields) -> ModelConfig:
    _only(fields, "scoring_func", "sigmoid")
    _only(fields, "topk_method", "noaux_tc")
    experts = Experts(
        number=fields.whole("n_routed_experts", "num_local_experts"),
        top_k=fields.whole("num_experts_per_tok"),
        scores="sigmoid",
        renormalised=fields.flag("norm_topk_prob", True),
        multiplier=fields.number("routed_scaling_factor", 2.5),
        correction_bias=True,
        n_groups=fields.whole("n_group", default=8),
        top_groups=fields.whole("topk_group", default=4),
    )
    return _read(fields, experts, interleaved=fields.flag("rope_interleave", True), n_dense=3)


def _read_v2(fields: ConfigFields) -> ModelConfig:
    _only(fields, "scoring_func", "softmax")
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
    return _read(fields, experts, interleaved=True, n_dense=0)


def _only(fields: ConfigFields, name: str, value: str) -> None:
    """Refuse any other text than `value`; a file may lack the field."""
    fields.choice(name, {value: value}, value)


def _read(fields: ConfigFields, experts: Experts, *, interleaved: bool, n_dense: int) -> ModelConfig:
    """Read what both versions have; `n_dense` is the default of first_k_dense_replace."""
    n_heads = fields.whole("num_attention_heads")
    attention = _read_attention(fields, n_heads, interleaved=interleaved)
    sizes = Sizes(
        vocab_size=fields.whole("vocab_size"),
        n_positions=fields.whole("max_position_embeddings"),
        hidden_size=fields.whole("hidden_size"),
        n_layers=fields.whole("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=1,
        head_size=attention.head_size,
    )
    size = fields.whole("moe_intermediate_size")
    shared = fields.whole("n_shared_experts", default=0) * size
    dense = read_gated(fields)
    mixed = replace(dense, size=size, experts=replace(experts, shared_size=shared or None))
    norm = Norm(kind="rms_norm", eps=fields.number("rms_norm_eps", 1e-6))
    first = fields.whole("first_k_dense_replace", default=n_dense)
    every = fields.whole("moe_layer_freq", default=1)
    if every < 1:
        raise BadModelConfig(f"{shown(fields.path)}: moe_layer_freq: expected at least 1, found {every}")
    layers = [
        Layer(
            attention=attention,
            feed_forward=mixed if i >= first and i % every == 0 else dense,
            norm=norm,
        )
        for i in range(sizes.n_layers)
    ]
    return decoder(fields, sizes, layers)


def _read_attention(fields: ConfigFields, n_heads: int, *, interleaved: bool) -> Attention:
    latent = Latent(
        rank=fields.whole("kv_lora_rank"),
        rotary_size=fields.whole("qk_rope_head_dim"),
        plain_size=fields.whole("qk_nope_head_dim"),
        value_size=fields.whole("v_head_dim"),
        query_rank=fields.whole_or_null("q_lora_rank", 1536),
    )
    rotary = read_rotary(
        fields,
        head_size=latent.rotary_size,
        n_positions=fields.whole("max_position_embeddings"),
        interleaved=interleaved,
    )
    bias = fields.flag("attention_bias", False)
    factor = rotary.score_factor
    scores = Scores() if factor == 1.0 else Scores(scale=latent.query_size**-0.5 * factor)
    attention = latent_attention(
        latent, n_heads=n_heads, rotary=rotary, scores=scores, qkv_bias=bias, out_bias=bias
    )
    for name, expected in (
        ("num_key_value_heads", n_heads),
        ("head_dim", latent.rotary_size),
        ("qk_head_dim", latent.query_size),
    ):
        if (found := fields.whole(name, default=expected)) != expected:
            raise BadModelConfig(
                f"{shown(fields.path)} disagrees with itself: {name} is {found}, and by the other sizes it "
                f"must be {expected}"
            )
    return attention


def _write_v3(model: ModelConfig) -> dict[str, Any] | None:
    written, attention = _written(model), model.attention
    if written is None or attention.rotary is None:
        return None
    return written | {"rope_interleave": attention.rotary.interleaved}


def _write_v2(model: ModelConfig) -> dict[str, Any] | None:
    written = _written(model)
    if written is None:
        return None
    grouped = written["n_group"] > 1
    return written | {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def _written(model: ModelConfig) -> dict[str, Any] | None:
    """The fields that both versions write; None without latent attention or experts."""
    attention, sparse = model.attention, first_sparse(model)
    latent = attention.latent
    if latent is None or sparse is None or sparse.experts is None:
        return None
    kinds: list[FeedForward] = [layer.feed_forward for layer in model.layers]
    mixed = [i for i, kind in enumerate(kinds) if kind.experts is not None]
    dense = next((kind for kind in kinds if kind.experts is None), sparse)
    experts = sparse.experts
    fields = common_fields(model) | {
        "num_key_value_heads": attention.n_heads,
        "intermediate_size": dense.size,
        "moe_intermediate_size": sparse.size,
        "first_k_dense_replace": mixed[0],
        "moe_layer_freq": mixed[1] - mixed[0] if len(mixed) > 1 else 1,
        "n_routed_experts": experts.number,
        "num_experts_per_tok": experts.top_k,
        "n_shared_experts": (experts.shared_size or 0) // sparse.size,
        "norm_topk_prob": experts.renormalised,
        "routed_scaling_factor": experts.multiplier,
        "n_group": experts.n_groups,
        "topk_group": experts.top_groups,
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
        config_names=_CONFIG_NAMES,
        read=read,
        weights=_WEIGHTS,
        alternatives=experts_in_files.FUSED,
        unread=_UNREAD,
        **other,
    )


DEEPSEEK_V2 = _family(2, _read_v2, write=_write_v2)
DEEPSEEK_V3 = _family(3, _read_v3, write=_write_v3, further="eh_proj.weight")
