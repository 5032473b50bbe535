"""Command R7B and Command A (Cohere, 2024 and 2025): parallel layers with one LayerNorm without bias.

Three of four layers have a sliding window and interleaved rotary positions, the others neither.
"""

from typing import Any

from orca_jax.families.attention_config import Scores
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    SLIDING,
    common_fields,
    decoder,
    read_alternating_kinds,
    read_gated,
    read_sizes,
    relative,
    window_fields,
    with_windows,
)
from orca_jax.families.decoders.rope_fields import read_rotary
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.families.norm_config import Norm

# transformers' defaults of fields that a file may lack.
_WINDOW, _PERIOD, _LOGIT_SCALE = 4096, 4, 0.0625


def _read(fields: ConfigFields) -> ModelConfig:
    sizes, bias = read_sizes(fields), fields.flag("attention_bias", False)
    fields.must_be("use_parallel_block", True, "attention before the feed-forward layer")
    fields.must_be("use_gated_activation", True, "a feed-forward layer without a gate")
    fields.choice("position_embedding_type", {"rope_gptj": None}, "rope_gptj")
    kinds = read_alternating_kinds(
        fields, sizes.n_layers, fields.whole("sliding_window_pattern", default=_PERIOD)
    )
    rotary = read_rotary(fields, head_size=sizes.head_size, n_positions=sizes.n_positions, interleaved=True)
    local = Layer(
        attention=sizes.attention(qkv_bias=bias, out_bias=bias, rotary=rotary, scores=Scores()),
        feed_forward=read_gated(fields),
        norm=Norm(eps=fields.number("layer_norm_eps", 1e-5), bias=False),
        residual="parallel",
    )
    full, window = local.with_attention(rotary=None), fields.whole_or_null("sliding_window", _WINDOW)
    layers = [local if kind == SLIDING else full for kind in kinds]
    return decoder(
        fields,
        sizes,
        with_windows(fields, layers, kinds, window),
        tied=True,
        logit_multiplier=fields.number("logit_scale", _LOGIT_SCALE),
    )


def _write(model: ModelConfig) -> dict[str, Any] | None:
    written = common_fields(model) | window_fields(model)
    del written["rms_norm_eps"]
    return written | {
        "layer_norm_eps": model.layers[0].norm.eps,
        "attention_bias": model.attention.qkv_bias,
        "logit_scale": model.logit_multiplier,
    }


COHERE2 = relative(
    model_type="cohere2",
    title="Command R7B, Command A",
    architectures=("Cohere2ForCausalLM", "Cohere2Model"),
    config_names={"norm_eps": "layer_norm_eps", "logit_multiplier": "logit_scale"},
    read=_read,
    write=_write,
    unread={
        "rotary_pct": "1 in every file",
        "layer_switch": "sliding_window_pattern in older files",
        "order_of_interleaved_layers": "layers with a window come first in every file",
        "use_parallel_embedding": "another way to compute the same",
        "use_embedding_sharing": "tie_word_embeddings, in older files",
    },
)
