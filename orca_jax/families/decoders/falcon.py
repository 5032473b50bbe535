"""Falcon (Almazrouei et al., 2023): 7B, the new decoder of 40B and later, and RW with ALiBi.

ALiBi's slopes are float32 here; transformers rounds them, and their products with positions, to bfloat16.
"""

from collections.abc import Mapping
from typing import Any

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.attention_config import Scores
from orca_jax.families.config_fields import HF_ACTIVATIONS, ConfigFields
from orca_jax.families.decoders.bloom import WEIGHTS
from orca_jax.families.decoders.llama_like import CONFIG_NAMES, Sizes, decoder, read_older_sizes, size_fields
from orca_jax.families.decoders.rope_fields import read_rotary, rotary_fields
from orca_jax.families.family import Family
from orca_jax.families.model_config import FeedForward, Layer, ModelConfig, Residual
from orca_jax.families.norm_config import Norm
from orca_jax.families.rotary import Rotary
from orca_jax.families.stored_name import StoredName, layer_norm
from orca_jax.families.strict_json import shown

_N_POSITIONS = 2048  # the length in training, which most files do not state
_NAMES = {
    **{name: CONFIG_NAMES[name] for name in ("n_positions", "n_layers", "n_heads")},
    "n_kv_heads": "num_kv_heads",
    "ffn_size": "ffn_hidden_size",
    "norm_eps": "layer_norm_epsilon",
}


def _read_residual(fields: ConfigFields, *, new_decoder: bool) -> Residual:
    parallel = fields.flag("parallel_attn", True)
    n_norms = fields.whole("num_ln_in_parallel_attn", default=2 if new_decoder else 1)
    if n_norms not in ((1, 2) if new_decoder else (1,)) or (new_decoder and not parallel):
        raise UnsupportedModel(
            f"{shown(fields.path)}: new_decoder_architecture {new_decoder}, parallel_attn {parallel} and "
            f"num_ln_in_parallel_attn {shown(n_norms)} do not go together"
        )
    if not parallel:
        return "pre"
    return "parallel_two_norms" if n_norms == 2 else "parallel"


def _read_kv_heads(fields: ConfigFields, n_heads: int, *, new_decoder: bool) -> int:
    n_kv_heads = fields.whole("num_kv_heads", default=n_heads)
    multi_query = fields.flag("multi_query", True)
    if new_decoder:
        return n_kv_heads
    expected = 1 if multi_query else n_heads
    if n_kv_heads not in (expected, n_heads):  # transformers writes n_heads for multi-query too
        raise BadModelConfig(
            f"{shown(fields.path)}: num_kv_heads is {shown(n_kv_heads)}; without new_decoder_architecture "
            f"and with multi_query {str(multi_query).lower()} it must be {expected}"
        )
    return expected


def _read_positions(fields: ConfigFields, sizes: Sizes) -> tuple[Rotary | None, Scores]:
    if not fields.flag("alibi", False):
        rotary = read_rotary(fields, head_size=sizes.head_size, n_positions=sizes.n_positions)
        return rotary, Scores()
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        fields.raw(name)  # transformers writes them with ALiBi too, and does not use them
    return None, Scores(alibi=sizes.head_size**-0.5)  # the scale of the scores is also ALiBi's


def _read(fields: ConfigFields) -> ModelConfig:
    fields.must_be("apply_residual_connection_post_layernorm", False, "a residual taken after the norm")
    new_decoder, bias = fields.flag("new_decoder_architecture", False), fields.flag("bias", False)
    sizes = read_older_sizes(
        fields,
        _NAMES,
        hidden_size=fields.whole("hidden_size", "n_embed"),
        n_positions=fields.whole("max_position_embeddings", default=_N_POSITIONS),
    )
    sizes = sizes._replace(n_kv_heads=_read_kv_heads(fields, sizes.n_heads, new_decoder=new_decoder))
    rotary, scores = _read_positions(fields, sizes)
    layer = Layer(
        attention=sizes.attention(qkv_bias=bias, out_bias=bias, rotary=rotary, scores=scores),
        feed_forward=FeedForward(
            size=fields.whole("ffn_hidden_size", default=4 * sizes.hidden_size),
            activation=fields.activation("activation", "gelu"),
            bias=bias,
        ),
        norm=Norm(eps=fields.number("layer_norm_epsilon", 1e-5)),
        residual=_read_residual(fields, new_decoder=new_decoder),
    )
    return decoder(fields, sizes, layer, tied=True)


def _write(model: ModelConfig) -> dict[str, Any]:
    layer = model.layers[0]
    attention = model.attention
    n_kv_heads = model.n_kv_heads // attention.kv_repeats
    two_norms = layer.residual == "parallel_two_norms"
    new_decoder = two_norms or n_kv_heads not in (1, model.n_heads)
    written = size_fields(model, _NAMES) | {
        "activation": HF_ACTIVATIONS[model.feed_forward.activation],
        "alibi": attention.rotary is None,
        "bias": model.feed_forward.bias,
        "new_decoder_architecture": new_decoder,
        "multi_query": n_kv_heads == 1,
        "parallel_attn": layer.residual != "pre",
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
    }
    return written if attention.rotary is None else written | rotary_fields(attention.rotary)


_TWO_NORMS = layer_norm("layers.{i}.attn_norm", "{prefix}h.{i}.ln_attn") | layer_norm(
    "layers.{i}.mlp_norm", "{prefix}h.{i}.ln_mlp"
)


def _renamed(model: ModelConfig) -> Mapping[str, StoredName]:
    return _TWO_NORMS if model.layers[0].residual == "parallel_two_norms" else {}


FALCON = Family(
    model_type="falcon",
    title="Falcon",
    architectures=("FalconForCausalLM", "FalconModel"),
    config_names=_NAMES,
    read=_read,
    write=_write,
    prefixes=("transformer.", ""),
    weights=WEIGHTS,
    renamed=_renamed,
    buffers=r"h\.\d+\.self_attention\.(maybe_rotary|rotary_emb)\.inv_freq|rotary_emb\.inv_freq",
)
