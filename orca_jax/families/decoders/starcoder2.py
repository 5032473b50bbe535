"""StarCoder 2 (Lozhkov et al., 2024): LayerNorm, an ungated feed-forward layer, grouped heads, a window."""

from dataclasses import replace
from typing import Any

from orca_jax.families.attention_config import Scores
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import common_fields, decoder, read_layer, read_sizes, relative
from orca_jax.families.model_config import FeedForward, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.stored_name import layer_norm, linear

_LAYER = "{prefix}layers.{i}."


def _read(fields: ConfigFields) -> ModelConfig:
    fields.must_be("scale_attn_weights", True, "attention without the scale of 1 / sqrt(head size)")
    fields.choice("mlp_type", {"default": True}, "default")
    fields.choice("norm_type", {"layer_norm": True}, "layer_norm")
    sizes, bias = read_sizes(fields), fields.flag("use_bias", True)
    scores = Scores(window=fields.whole_or_null("sliding_window", None))
    layer = replace(
        read_layer(fields, sizes, bias=bias, scores=scores),
        feed_forward=FeedForward(
            size=fields.whole("intermediate_size"),
            activation=fields.activation("hidden_act", "gelu_pytorch_tanh"),
            bias=bias,
        ),
        norm=Norm(eps=fields.number("norm_epsilon", 1e-5)),
    )
    return decoder(fields, sizes, layer, tied=True)


def _write(model: ModelConfig) -> dict[str, Any] | None:
    layer = model.layers[0]
    written = common_fields(model) | {
        "norm_epsilon": layer.norm.eps,
        "use_bias": model.feed_forward.bias,
        "sliding_window": model.attention.scores.window,
    }
    del written["rms_norm_eps"]
    return written


STARCODER2 = relative(
    model_type="starcoder2",
    title="StarCoder 2",
    architectures=("Starcoder2ForCausalLM", "Starcoder2Model"),
    config_names={"norm_eps": "norm_epsilon"},
    read=_read,
    write=_write,
    weights={
        **linear("layers.{i}.up", f"{_LAYER}mlp.c_fc"),
        **linear("layers.{i}.down", f"{_LAYER}mlp.c_proj"),
        **layer_norm("layers.{i}.attn_norm", f"{_LAYER}input_layernorm"),
        **layer_norm("layers.{i}.mlp_norm", f"{_LAYER}post_attention_layernorm"),
        **layer_norm("final_norm", "{prefix}norm"),
    },
    unread={"layer_norm_epsilon": "repeats norm_epsilon"},
)
