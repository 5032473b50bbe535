"""LFM2 (Liquid AI, 2025): most layers are gated short convolutions, whose state is two tokens' inputs."""

from collections.abc import Sequence
from typing import Any

from orca_jax.errors import BadModelConfig
from orca_jax.families.attention_config import QKNorm
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    CONFIG_NAMES,
    FULL,
    decoder,
    read_sizes,
    relative,
    size_fields,
)
from orca_jax.families.decoders.rope_fields import read_rotary, rotary_fields
from orca_jax.families.model_config import FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.recurrence_config import ShortConvolution
from orca_jax.families.stored_name import as_it_is, depthwise, linear, query_heads, stacked
from orca_jax.families.strict_json import shown

CONVOLUTION = "conv"  # a layer's kind in `layer_types`; the other is FULL
_BASE = 1_000_000.0
LFM2_LAYER = "{prefix}layers.{i}."
# In Liquid AI's own files; sizes follow from hidden_size, and the code in transformers reads none of them.
_UNREAD = {
    **dict.fromkeys(
        ("block_dim", "conv_dim", "conv_dim_out", "num_heads"), "repeats a size that another field has"
    ),
    **dict.fromkeys(("block_norm_eps", "block_use_swiglu", "use_pos_enc"), "transformers does not read it"),
    **dict.fromkeys(
        ("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"),
        "initial values for training",
    ),
}
_SIZE_NAMES = {**CONFIG_NAMES, "norm_eps": "norm_eps", "conv_width": "conv_L_cache"}


def read_mixers(fields: ConfigFields, sizes: Any, kinds: Sequence[str]) -> list[Layer]:
    """Layers of these kinds, whose gated feed-forward part has size 1 until the caller replaces it."""
    norm = Norm(kind="rms_norm", eps=fields.number("norm_eps", 1e-5))
    rotary = read_rotary(fields, head_size=sizes.head_size, n_positions=sizes.n_positions, default_base=_BASE)
    attention = sizes.attention(qkv_bias=False, out_bias=False, qk_norm=QKNorm(norm=norm), rotary=rotary)
    convolution = ShortConvolution(
        channels=sizes.hidden_size,
        width=fields.whole("conv_L_cache", default=3),
        bias=fields.flag("conv_bias", False),
    )
    rest: dict[str, Any] = {
        "feed_forward": FeedForward(size=1, activation="silu", gated=True, bias=False),
        "norm": norm,
    }
    attending = Layer(attention=attention, **rest)
    convolving = Layer(attention=None, recurrence=convolution, **rest)
    return [attending if kind == FULL else convolving for kind in kinds]


def read_kinds(fields: ConfigFields, n_layers: int) -> Sequence[str]:
    """Read `layer_types`, or `full_attn_idxs`, which older files have. Raises BadModelConfig."""
    attending = fields.raw("full_attn_idxs")
    kinds = fields.texts("layer_types")
    if kinds is None:
        numbers = range(n_layers) if attending is None else fields.numbers("full_attn_idxs")
        return [FULL if i in numbers else CONVOLUTION for i in range(n_layers)]
    if len(kinds) != n_layers or not set(kinds) <= {FULL, CONVOLUTION}:
        raise BadModelConfig(
            f"{shown(fields.path)}: layer_types: expected {n_layers} of {FULL}, {CONVOLUTION}, "
            f"found {shown(list(kinds))}"
        )
    return kinds


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    size = fields.whole("intermediate_size", "block_ff_dim")
    # As in transformers, which rounds down first.
    multiple = fields.whole("block_multiple_of", default=256)
    factor = fields.number("block_ffn_dim_multiplier", 1.0)
    if fields.flag("block_auto_adjust_ff_dim", True):
        size = int(factor * int(2 * size / 3))
        size = -(-size // max(1, multiple)) * multiple
    layers = [
        layer.with_feed_forward(size=size)
        for layer in read_mixers(fields, sizes, read_kinds(fields, sizes.n_layers))
    ]
    return decoder(fields, sizes, layers, tied=fields.flag("tie_embedding", True))


def hybrid_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields of sizes and of kinds of layers, without those of the feed-forward parts."""
    mixers = (layer.recurrence for layer in model.layers)
    convolution = next((each for each in mixers if isinstance(each, ShortConvolution)), None)
    own: dict[str, Any] = {}
    if convolution is not None:
        own = {"conv_L_cache": convolution.width, "conv_bias": convolution.bias}
    return (
        size_fields(model, _SIZE_NAMES)
        | ({} if model.attention.rotary is None else rotary_fields(model.attention.rotary))
        | own
        | {"layer_types": [FULL if layer.attention is not None else CONVOLUTION for layer in model.layers]}
    )


def _write(model: ModelConfig) -> dict[str, Any] | None:
    return hybrid_fields(model) | {"block_auto_adjust_ff_dim": False}


LFM2 = relative(
    model_type="lfm2",
    title="LFM2",
    architectures=("Lfm2ForCausalLM", "Lfm2Model"),
    config_names=_SIZE_NAMES,
    read=_read,
    write=_write,
    unread=_UNREAD,
    weights={
        "layers.{i}.q_norm.scale": as_it_is(f"{LFM2_LAYER}self_attn.q_layernorm.weight"),
        "layers.{i}.k_norm.scale": as_it_is(f"{LFM2_LAYER}self_attn.k_layernorm.weight"),
        **linear("layers.{i}.out", f"{LFM2_LAYER}self_attn.out_proj", query_heads),
        **linear("layers.{i}.conv_in", f"{LFM2_LAYER}conv.in_proj"),
        "layers.{i}.conv.weight": depthwise(f"{LFM2_LAYER}conv.conv.weight"),
        "layers.{i}.conv.bias": as_it_is(f"{LFM2_LAYER}conv.conv.bias"),
        **linear("layers.{i}.conv_out", f"{LFM2_LAYER}conv.out_proj"),
        "layers.{i}.up.weight": stacked(
            *(f"{LFM2_LAYER}feed_forward.{part}.weight" for part in ("w1", "w3"))
        ),
        "layers.{i}.down.weight": as_it_is(f"{LFM2_LAYER}feed_forward.w2.weight"),
        "layers.{i}.attn_norm.scale": as_it_is(f"{LFM2_LAYER}operator_norm.weight"),
        "layers.{i}.mlp_norm.scale": as_it_is(f"{LFM2_LAYER}ffn_norm.weight"),
        "final_norm.scale": as_it_is("{prefix}embedding_norm.weight"),
    },
)
