"""Falcon-H1 (TII, 2025): attention and Mamba-2 side by side in each layer, with multipliers throughout."""

from dataclasses import replace
from typing import Any

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.attention_config import Scores
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    bias_fields,
    common_fields,
    decoder,
    read_layer,
    read_sizes,
    relative,
)
from orca_jax.families.hybrid_fields import first_recurrence, mamba2_weights, read_mamba2, written_limits
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.recurrence_config import Mamba2
from orca_jax.families.stored_name import as_it_is, linear, projections
from orca_jax.families.strict_json import shown

_LAYER = "{prefix}layers.{i}."


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    bias = fields.flag("attention_bias", False)
    layer = read_layer(fields, sizes, bias=bias, mlp_bias=fields.flag("mlp_bias", False), eps=1e-5)
    # Without biases a factor on attention's input is one on its scores, squared, and one on its result.
    into = fields.number("attention_in_multiplier", 1.0)
    if bias and into != 1.0:
        raise UnsupportedModel(
            f"{shown(fields.path)}: attention_in_multiplier: expected 1 with attention_bias, found {into}; a "
            "factor on the input of layers with biases is not supported"
        )
    factor = _short(fields.number("key_multiplier", 1.0) * into**2)
    gate, out = _multipliers(fields, "mlp_multipliers", 2) or (1.0, 1.0)
    layer = replace(
        layer.with_feed_forward(gate_multiplier=gate, multiplier=out).with_attention(
            scores=Scores(scale=None if factor == 1.0 else sizes.head_size**-0.5 * factor)
        ),
        recurrence=_read_mixer(fields, layer.norm, sizes.hidden_size),
        attention_multiplier=fields.number("attention_out_multiplier", 1.0) * into,
        recurrence_multiplier=fields.number("ssm_out_multiplier", 1.0),
    )
    return decoder(
        fields,
        sizes,
        layer,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logit_multiplier=fields.number("lm_head_multiplier", 1.0),
    )


def _short(value: float) -> float:
    """Round to 12 digits, so that a scale that is written as a factor is read as the same scale."""
    return float(f"{value:.12g}")


def _multipliers(fields: ConfigFields, name: str, number: int) -> tuple[float, ...] | None:
    """Read a list of so many multipliers; None without it. Raises BadModelConfig."""
    if fields.raw(name) is None:
        return None
    found = fields.numbers(name)
    if len(found) != number:
        raise BadModelConfig(f"{shown(fields.path)}: {name}: expected {number} numbers, found {shown(found)}")
    return found


def _read_mixer(fields: ConfigFields, norm: Any, hidden_size: int) -> Mamba2:
    """Read Mamba-2, whose inner size may be `mamba_d_ssm`."""
    inner = fields.whole_or_null("mamba_d_ssm", 1024)
    mixer = read_mamba2(fields, hidden_size, norm, inner=inner)
    multipliers = _multipliers(fields, "ssm_multipliers", 5) or (1.0,) * 5
    into = fields.number("ssm_in_multiplier", 1.0)
    if mixer.bias and into != 1.0:
        raise UnsupportedModel(
            f"{shown(fields.path)}: ssm_in_multiplier: expected 1 with mamba_proj_bias, found {into}; a "
            "factor on the input of layers with biases is not supported"
        )
    multipliers = tuple(into * each for each in multipliers)
    return replace(
        mixer,
        norm=norm if fields.flag("mamba_rms_norm", False) else None,
        norm_first=fields.flag("mamba_norm_before_gate", True),
        out_bias=fields.flag("projectors_bias", False),
        multipliers=() if multipliers == (1.0,) * 5 else multipliers,
    )


def _write(model: ModelConfig) -> dict[str, Any] | None:
    mixer, layer, own = first_recurrence(model), model.layers[0], model.attention
    if not isinstance(mixer, Mamba2) or not all(each.has_both for each in model.layers):
        return None
    dense = model.feed_forward
    return (
        common_fields(model)
        | bias_fields(model)
        | {
            "mamba_n_heads": mixer.n_heads,
            "mamba_d_head": mixer.head_size,
            "mamba_d_ssm": mixer.inner,
            "mamba_n_groups": mixer.n_groups,
            "mamba_d_state": mixer.state_size,
            "mamba_d_conv": mixer.width,
            "mamba_conv_bias": mixer.conv_bias,
            "mamba_proj_bias": mixer.bias,
            "projectors_bias": mixer.out_bias,
            "mamba_rms_norm": mixer.norm is not None,
            "mamba_norm_before_gate": mixer.norm_first,
            "ssm_multipliers": list(mixer.multipliers or (1.0,) * 5),
            "mlp_multipliers": [dense.gate_multiplier, dense.multiplier],
            "key_multiplier": _short(own.scale * own.head_size**0.5),
            "attention_out_multiplier": layer.attention_multiplier,
            "ssm_out_multiplier": layer.recurrence_multiplier,
            "embedding_multiplier": model.embedding.multiplier,
            "lm_head_multiplier": model.logit_multiplier,
            **written_limits(mixer),
        }
    )


FALCON_H1 = relative(
    model_type="falcon_h1",
    title="Falcon-H1",
    architectures=("FalconH1ForCausalLM", "FalconH1Model"),
    config_names={
        "conv_width": "mamba_d_conv",
        "mamba_state_size": "mamba_d_state",
        "attention_scale": "key_multiplier",
        "logit_multiplier": "lm_head_multiplier",
    },
    read=_read,
    write=_write,
    weights={
        **mamba2_weights(f"{_LAYER}mamba."),
        **projections("layers.{i}.up", f"{_LAYER}feed_forward.", ("gate", "up")),
        **linear("layers.{i}.down", f"{_LAYER}feed_forward.down_proj"),
        "layers.{i}.mlp_norm.scale": as_it_is(f"{_LAYER}pre_ff_layernorm.weight"),
        "final_norm.scale": as_it_is("{prefix}final_layernorm.weight"),
    },
    unread={
        **dict.fromkeys(
            ("time_step_min", "time_step_max", "time_step_floor", "time_step_rank"),
            "initial values for training",
        ),
        "mlp_expansion_factor": "intermediate_size is the width",
        "layers_block_type": "every layer has both kinds",
        "layer_types": "every layer has both kinds",
        "mamba_use_mlp": "every layer has a feed-forward, as in transformers",
        "attn_layer_indices": "every layer has attention, as in transformers",
        "use_mamba_kernels": "another way to compute the same",
    },
)
