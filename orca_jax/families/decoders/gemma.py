"""Gemma 1 to 3 (Gemma Team, 2024, 2024 and 2025); of Gemma 3 with vision the text part.

All multiply embeddings by the root of the hidden size, and their norms scale by 1 + w. Gemma 2 and 3 have
norms before and after each part, and layers with a window among those without; Gemma 2 has soft caps, Gemma 3
a qk-norm, and another rotary base in the layers with a window.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.attention_config import Scores
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    SLIDING,
    Sizes,
    common_fields,
    decoder,
    read_alternating_kinds,
    read_layer,
    read_rotaries,
    read_sizes,
    relative,
    window_fields,
    with_windows,
)
from orca_jax.families.decoders.rope_fields import rotary_fields, without_rope
from orca_jax.families.model_config import Activation, Layer, ModelConfig
from orca_jax.families.stored_name import StoredName, as_it_is
from orca_jax.families.strict_json import shown
from orca_jax.families.text_part import text_part

# transformers' defaults of fields that a file may lack.
_HEAD_SIZE, _QUERY_SCALAR, _WINDOW, _SCORE_CAP, _LOGIT_CAP = 256, 256, 4096, 50.0, 30.0
_GLOBAL_BASE, _LOCAL_BASE, _PERIOD = 1e6, 1e4, 6

_NAMES: Mapping[str, str] = {
    "attention_scale": "query_pre_attn_scalar",
    "attention_soft_cap": "attn_logit_softcapping",
    "logit_soft_cap": "final_logit_softcapping",
}
GEMMA_NORMS: Mapping[str, StoredName] = {
    f"layers.{{i}}.{name}.scale": as_it_is(f"{{prefix}}layers.{{i}}.{stored}.weight")
    for name, stored in (
        ("attn_norm", "input_layernorm"),
        ("attn_out_norm", "post_attention_layernorm"),
        ("mlp_norm", "pre_feedforward_layernorm"),
        ("mlp_out_norm", "post_feedforward_layernorm"),
    )
}


def _read_gemma(fields: ConfigFields) -> ModelConfig:
    sizes = _read_sizes(fields)
    # The first files say gelu, but the model was trained with the approximation, which transformers computes.
    activation = _activation(fields, "hidden_act", {"gelu": "gelu_tanh"})
    return _model(fields, sizes, _read_layer(fields, sizes, activation))


def _read_gemma2(fields: ConfigFields) -> ModelConfig:
    sizes = _read_sizes(fields)
    cap = fields.number_or_null("attn_logit_softcapping", _SCORE_CAP)
    scores = Scores(scale=_scale(fields), soft_cap=cap)
    full = _read_layer(fields, sizes, _activation(fields, "hidden_activation", {}), scores=scores)
    layers = _alternating(fields, sizes.n_layers, 2, full, full)
    cap = fields.number_or_null("final_logit_softcapping", _LOGIT_CAP)
    return _model(fields, sizes, layers, logit_soft_cap=cap)


def _read_gemma3(fields: ConfigFields) -> ModelConfig:
    sizes = _read_sizes(fields)
    cap = fields.number_or_null("attn_logit_softcapping", None)
    if cap is not None:
        raise UnsupportedModel(
            f"{shown(fields.path)}: attn_logit_softcapping: expected null, found {cap}; "
            "transformers does not compute it in Gemma 3"
        )
    rotary, local_rotary = read_rotaries(
        fields, sizes, base=_GLOBAL_BASE, local_base=_LOCAL_BASE, local_name="rope_local_base_freq"
    )
    full = _read_layer(
        fields,
        sizes,
        _activation(fields, "hidden_activation", {}),
        scores=Scores(scale=_scale(fields)),
        rotary=rotary,
        qk_norm="head",
    )
    period = fields.whole("sliding_window_pattern", "_sliding_window_pattern", _PERIOD)
    layers = _alternating(fields, sizes.n_layers, period, full, full.with_attention(rotary=local_rotary))
    cap = fields.number_or_null("final_logit_softcapping", None)
    return _model(fields, sizes, layers, logit_soft_cap=cap)


def _read_sizes(fields: ConfigFields) -> Sizes:
    fields.whole("num_key_value_heads")  # transformers' default is not the number of query heads
    fields.must_be("use_bidirectional_attention", False, "attention to later tokens")
    return read_sizes(fields, head_size=_HEAD_SIZE)


def _activation(fields: ConfigFields, name: str, corrected: Mapping[str, Activation]) -> Activation:
    """Read the activation function in the field `name`. A file with both names must agree."""
    found: list[Activation] = [
        fields.activation(field, "gelu_pytorch_tanh")
        for field in ("hidden_act", "hidden_activation")
        if field == name or fields.raw(field) is not None
    ]
    found = [corrected.get(activation, activation) for activation in found]
    if len(set(found)) > 1:
        raise BadModelConfig(
            f"{shown(fields.path)} disagrees with itself: hidden_act is {shown(fields.raw('hidden_act'))}, "
            f"hidden_activation is {shown(fields.raw('hidden_activation'))}"
        )
    return found[0]


def _read_layer(
    fields: ConfigFields, sizes: Sizes, activation: Activation, *, scores: Scores | None = None, **other: Any
) -> Layer:
    """Read a layer; with `scores`, in Gemma 2 and 3, norms are before and after each part."""
    layer = read_layer(
        fields,
        sizes,
        bias=fields.flag("attention_bias", False),
        activation=activation,
        unit_offset=True,
        scores=scores,
        **other,
    )
    return layer if scores is None else replace(layer, residual="both")


def _scale(fields: ConfigFields) -> float:
    scalar = fields.number("query_pre_attn_scalar", _QUERY_SCALAR)
    if scalar <= 0:
        raise BadModelConfig(
            f"{shown(fields.path)}: query_pre_attn_scalar: expected a number above 0, found {shown(scalar)}"
        )
    return scalar**-0.5


def _alternating(
    fields: ConfigFields, n_layers: int, period: int, full: Layer, local: Layer
) -> Sequence[Layer]:
    """Arrange layers by `layer_types`, or each `period`-th one `full`; `local` ones get the window."""
    kinds = read_alternating_kinds(fields, n_layers, period)
    window = fields.whole_or_null("sliding_window", _WINDOW)
    if fields.raw("sliding_window_size") not in (None, window):  # Gemma 2's first files have both
        window = fields.whole("sliding_window", "sliding_window_size")
    return with_windows(fields, [local if kind == SLIDING else full for kind in kinds], kinds, window)


def _model(fields: ConfigFields, sizes: Sizes, layers: Layer | Sequence[Layer], **other: Any) -> ModelConfig:
    return decoder(fields, sizes, layers, tied=True, embedding_multiplier=sizes.hidden_size**0.5, **other)


def _write_gemma(model: ModelConfig) -> dict[str, Any]:
    return common_fields(model) | {"attention_bias": model.attention.qkv_bias}


def _write_gemma2(model: ModelConfig) -> dict[str, Any]:
    written = _write_gemma(model)
    scalar = model.attention.scale**-2
    return (
        written
        | window_fields(model)
        | {
            "hidden_activation": written["hidden_act"],
            "query_pre_attn_scalar": round(scalar)
            if round(scalar) ** -0.5 == model.attention.scale
            else scalar,
            "attn_logit_softcapping": model.attention.scores.soft_cap,
            "final_logit_softcapping": model.logit_soft_cap,
        }
    )


def _write_gemma3(model: ModelConfig) -> dict[str, Any] | None:
    """Write the older spelling, in which layers with a window have no scaling."""
    written = without_rope(_write_gemma2(model))
    for layer in model.layers:
        attention = layer.attention or model.attention
        rotary = attention.rotary
        if rotary is None:
            return None
        local = attention.scores.window is not None
        written |= {"rope_local_base_freq": rotary.base} if local else rotary_fields(rotary)
    return written


GEMMA = relative(
    model_type="gemma",
    title="Gemma",
    architectures=("GemmaForCausalLM", "GemmaModel"),
    read=_read_gemma,
    write=_write_gemma,
)
GEMMA2 = relative(
    model_type="gemma2",
    title="Gemma 2",
    architectures=("Gemma2ForCausalLM", "Gemma2Model"),
    config_names=_NAMES,
    read=_read_gemma2,
    write=_write_gemma2,
    weights=GEMMA_NORMS,
)
GEMMA3_TEXT = relative(
    model_type="gemma3_text",
    title="Gemma 3",
    architectures=("Gemma3ForCausalLM", "Gemma3TextModel"),
    config_names=_NAMES,
    read=_read_gemma3,
    write=_write_gemma3,
    weights=GEMMA_NORMS,
)
GEMMA3 = text_part(
    GEMMA3_TEXT,
    model_type="gemma3",
    title="Gemma 3 with vision",
    architectures=("Gemma3ForConditionalGeneration", "Gemma3Model"),
    prefixes=("model.language_model.", "language_model.model.", "language_model.", "model."),
    head="language_model.lm_head.weight",
    parts=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
)
