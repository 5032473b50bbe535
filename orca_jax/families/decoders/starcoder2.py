"""StarCoder 2 (Lozhkov et al., 2024): LayerNorm, a plain feed-forward layer, grouped heads, a window."""

from dataclasses import replace
from typing import Any

from orca_jax.families.attention_config import Scores
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    BUFFERS,
    CONFIG_NAMES,
    PREFIXES,
    WEIGHTS,
    common_fields,
    decoder,
    read_layer,
    read_sizes,
)
from orca_jax.families.family import Family
from orca_jax.families.model_config import FeedForward, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.stored_name import as_it_is

_LAYER = "{prefix}layers.{i}."


def _read(fields: ConfigFields) -> ModelConfig:
    fields.must_be("scale_attn_weights", True, "attention without the scale of 1 / sqrt(head size)")
    fields.choice("mlp_type", {"default": True}, "default")
    fields.choice("norm_type", {"layer_norm": True}, "layer_norm")
    sizes = read_sizes(fields)
    bias = fields.flag("use_bias", True)
    layer = read_layer(fields, sizes, qkv_bias=bias, out_bias=bias)
    scores = Scores(window=fields.whole_or_null("sliding_window", None))
    layer = replace(
        layer,
        attention=replace(layer.attention, scores=scores),
        feed_forward=FeedForward(
            size=fields.whole("intermediate_size"),
            activation=fields.activation("hidden_act", "gelu_pytorch_tanh"),
            bias=bias,
        ),
        norm=Norm(eps=fields.number("norm_epsilon", 1e-5)),
    )
    return decoder(fields, sizes, [layer] * sizes.n_layers, final_norm=layer.norm, tied=True)


def _write(model: ModelConfig) -> dict[str, Any] | None:
    layer = model.layers[0]
    written = common_fields(model) | {
        "norm_epsilon": layer.norm.eps,
        "use_bias": layer.feed_forward.bias,
        "sliding_window": layer.attention.scores.window,
    }
    del written["rms_norm_eps"]
    return written


STARCODER2 = Family(
    model_type="starcoder2",
    title="StarCoder 2",
    architectures=("Starcoder2ForCausalLM", "Starcoder2Model"),
    config_names={**CONFIG_NAMES, "norm_eps": "norm_epsilon"},
    read=_read,
    write=_write,
    prefixes=PREFIXES,
    weights={
        **WEIGHTS,
        "layers.{i}.up.weight": as_it_is(f"{_LAYER}mlp.c_fc.weight"),
        "layers.{i}.up.bias": as_it_is(f"{_LAYER}mlp.c_fc.bias"),
        "layers.{i}.down.weight": as_it_is(f"{_LAYER}mlp.c_proj.weight"),
        "layers.{i}.down.bias": as_it_is(f"{_LAYER}mlp.c_proj.bias"),
        "layers.{i}.attn_norm.bias": as_it_is(f"{_LAYER}input_layernorm.bias"),
        "layers.{i}.mlp_norm.bias": as_it_is(f"{_LAYER}post_attention_layernorm.bias"),
        "final_norm.bias": as_it_is("{prefix}norm.bias"),
    },
    buffers=BUFFERS,
    unread={"layer_norm_epsilon": "repeats norm_epsilon"},
)
