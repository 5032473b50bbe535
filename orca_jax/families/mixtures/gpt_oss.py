"""gpt-oss (OpenAI, 2025): experts in every layer, every other layer with a window, and attention sinks."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orca_jax.errors import UnsupportedModel
from orca_jax.families.attention_config import Scores
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    FULL,
    SLIDING,
    common_fields,
    decoder,
    read_layer,
    read_layer_kinds,
    read_sizes,
    relative,
    window_fields,
)
from orca_jax.families.decoders.rope_fields import read_rotary
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.mixtures.experts_in_files import EXPERT_NAMES
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.rotary import Scaling
from orca_jax.families.stored_name import StoredName, all_experts, linear, mxfp4_experts, query_heads
from orca_jax.families.strict_json import shown

# transformers' defaults of fields that a file may lack.
YARN = Scaling(kind="yarn", factor=32.0, original_positions=4096, truncate=False)
_BASE, _WINDOW, _HEAD_SIZE, _ALPHA, _LIMIT = 150_000.0, 128, 64, 1.702, 7.0

_LAYER = "{prefix}layers.{i}."
_EXPERTS = f"{_LAYER}mlp.experts."
_WEIGHTS: Mapping[str, StoredName] = {
    "layers.{i}.sinks": query_heads(f"{_LAYER}self_attn.sinks"),
    **linear("layers.{i}.router", f"{_LAYER}mlp.router"),
    "layers.{i}.experts.up.weight": all_experts(f"{_EXPERTS}gate_up_proj", transpose=True, alternating=True),
    "layers.{i}.experts.up.bias": all_experts(f"{_EXPERTS}gate_up_proj_bias", alternating=True),
    "layers.{i}.experts.down.weight": all_experts(f"{_EXPERTS}down_proj", transpose=True),
    "layers.{i}.experts.down.bias": all_experts(f"{_EXPERTS}down_proj_bias"),
}
_PACKED: Mapping[str, StoredName] = {  # as published
    "layers.{i}.experts.up.weight": mxfp4_experts(f"{_EXPERTS}gate_up_proj", alternating=True),
    "layers.{i}.experts.down.weight": mxfp4_experts(f"{_EXPERTS}down_proj"),
}


def _read(fields: ConfigFields) -> ModelConfig:
    fields.whole("num_key_value_heads")
    sizes = read_sizes(fields, head_size=fields.whole_or_null("head_dim", _HEAD_SIZE))
    if fields.number("swiglu_alpha", _ALPHA) != _ALPHA:
        where = f"{shown(fields.path)}: swiglu_alpha is {shown(fields.raw('swiglu_alpha'))}"
        raise UnsupportedModel(f"{where}; only {_ALPHA} is supported")
    rotary = read_rotary(fields, head_size=sizes.head_size, n_positions=sizes.n_positions, default_base=_BASE)
    if fields.raw("rope_parameters") is None and fields.raw("rope_scaling") is None:
        rotary = replace(rotary, scaling=YARN)
    experts = Experts(
        number=fields.whole("num_local_experts", "num_experts"),
        top_k=fields.whole("num_experts_per_tok", "experts_per_token"),
        scores="softmax_of_chosen",
        router_bias=True,
    )
    layer = read_layer(
        fields,
        sizes,
        bias=fields.flag("attention_bias", True),
        mlp_bias=True,
        eps=1e-5,
        rotary=rotary,
        scores=Scores(sinks=True),
    )
    limit = fields.number("swiglu_limit", _LIMIT)
    layer = layer.with_feed_forward(gate_limit=limit, experts=experts)
    local = layer.with_window(fields.whole_or_null("sliding_window", _WINDOW))
    kinds = read_layer_kinds(fields, sizes.n_layers) or [
        FULL if i % 2 else SLIDING for i in range(sizes.n_layers)
    ]
    return decoder(fields, sizes, [local if kind == SLIDING else layer for kind in kinds])


def _write(model: ModelConfig) -> dict[str, Any] | None:
    feed_forward = model.feed_forward
    experts = feed_forward.experts
    if experts is None or feed_forward.gate_limit is None:
        return None
    return (
        {"rope_scaling": {"rope_type": "default"}}
        | common_fields(model)
        | window_fields(model)
        | {
            "attention_bias": model.attention.qkv_bias,
            "num_local_experts": experts.number,
            "num_experts_per_tok": experts.top_k,
            "swiglu_limit": feed_forward.gate_limit,
        }
    )


GPT_OSS = relative(
    model_type="gpt_oss",
    title="gpt-oss",
    architectures=("GptOssForCausalLM", "GptOssModel"),
    config_names={**EXPERT_NAMES, "n_experts": "num_local_experts", "gate_limit": "swiglu_limit"},
    read=_read,
    write=_write,
    weights=_WEIGHTS,
    alternatives=_PACKED,
    quantized=("mxfp4",),
)
