"""Bamba (IBM and others, 2024): Mamba-2 in most layers, and attention with half-rotated heads in a few."""

from typing import Any

from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import common_fields, decoder, read_layer, read_sizes, relative
from orca_jax.families.decoders.rope_fields import read_rotary
from orca_jax.families.hybrid_fields import (
    first_recurrence,
    mamba2_fields,
    mamba2_weights,
    read_mamba2,
    with_mixer,
)
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.recurrence_config import Mamba2
from orca_jax.families.stored_name import as_it_is, linear, projections

_LAYER = "{prefix}layers.{i}."


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    # transformers rotates half of each head, whatever the file says.
    fields = fields.with_values({"partial_rotary_factor": 0.5}, default=False)
    rotary = read_rotary(fields, head_size=sizes.head_size, n_positions=sizes.n_positions, partial=0.5)
    layer = read_layer(
        fields,
        sizes,
        bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        eps=1e-5,
        rotary=rotary,
    )
    attention = fields.numbers("attn_layer_indices")
    recurrent = with_mixer(layer, read_mamba2(fields, sizes.hidden_size, layer.norm))
    return decoder(fields, sizes, [layer if i in attention else recurrent for i in range(sizes.n_layers)])


def _write(model: ModelConfig) -> dict[str, Any] | None:
    mixer, rotary = first_recurrence(model), model.attention.rotary
    if not isinstance(mixer, Mamba2) or rotary is None or rotary.size != model.head_size // 2:
        return None
    own = mamba2_fields(mixer, model.hidden_size)
    if own is None:
        return None
    return (
        common_fields(model)
        | own
        | {
            "attention_bias": model.attention.qkv_bias,
            "mlp_bias": model.feed_forward.bias,
            "attn_layer_indices": [i for i, layer in enumerate(model.layers) if layer.attention is not None],
        }
    )


BAMBA = relative(
    model_type="bamba",
    title="Bamba",
    architectures=("BambaForCausalLM", "BambaModel"),
    config_names={"conv_width": "mamba_d_conv", "mamba_state_size": "mamba_d_state"},
    read=_read,
    write=_write,
    unread={
        "attn_rotary_emb": "transformers rotates half of each head, whatever the file says",
        "use_mamba_kernels": "another way to compute the same",
    },
    weights={
        **mamba2_weights(f"{_LAYER}mamba."),
        **projections("layers.{i}.up", f"{_LAYER}feed_forward.", ("gate", "up")),
        **linear("layers.{i}.down", f"{_LAYER}feed_forward.down_proj"),
        "layers.{i}.mlp_norm.scale": as_it_is(f"{_LAYER}pre_ff_layernorm.weight"),
        "final_norm.scale": as_it_is("{prefix}final_layernorm.weight"),
    },
)
