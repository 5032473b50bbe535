"""Falcon (Almazrouei et al., 2023): 7B, the new decoder of 40B and later, and RW with ALiBi.

ALiBi's slopes are float32 here; transformers rounds them, and their products with positions, to bfloat16.
"""

from collections.abc import Mapping
from typing import Any

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.attention_config import Attention, Scores
from orca_jax.families.config_fields import HF_ACTIVATIONS, ConfigFields, general_fields
from orca_jax.families.decoders.llama_like import Sizes, decoder
from orca_jax.families.decoders.rope_fields import read_rotary, rotary_fields
from orca_jax.families.family import Family
from orca_jax.families.limits import even_head_size
from orca_jax.families.model_config import FeedForward, Layer, ModelConfig, Residual, alike
from orca_jax.families.norm_config import Norm
from orca_jax.families.rotary import Rotary
from orca_jax.families.stored_name import StoredName, as_it_is, fused_heads, query_heads
from orca_jax.families.strict_json import shown

_N_POSITIONS = 2048  # what all were trained with; most files do not say it


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
    hidden_size, n_heads = fields.whole("hidden_size", "n_embed"), fields.whole("num_attention_heads")
    head_size = even_head_size(hidden_size, n_heads)
    sizes = Sizes(
        vocab_size=fields.whole("vocab_size"),
        n_positions=fields.whole("max_position_embeddings", default=_N_POSITIONS),
        hidden_size=hidden_size,
        n_layers=fields.whole("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=_read_kv_heads(fields, n_heads, new_decoder=new_decoder),
        head_size=head_size,
    )
    rotary, scores = _read_positions(fields, sizes)
    norm = Norm(eps=fields.number("layer_norm_epsilon", 1e-5))
    layer = Layer(
        attention=Attention(
            n_heads=n_heads,
            n_kv_heads=sizes.n_kv_heads,
            head_size=sizes.head_size,
            qkv_bias=bias,
            out_bias=bias,
            rotary=rotary,
            scores=scores,
        ),
        feed_forward=FeedForward(
            size=fields.whole("ffn_hidden_size", default=4 * hidden_size),
            activation=fields.activation("activation", "gelu"),
            bias=bias,
        ),
        norm=norm,
        residual=_read_residual(fields, new_decoder=new_decoder),
    )
    return decoder(fields, sizes, alike(layer, sizes.n_layers), final_norm=norm, tied=True)


def _write(model: ModelConfig) -> dict[str, Any] | None:
    layer = model.layers[0]
    attention = layer.attention
    n_kv_heads = model.n_kv_heads // attention.kv_repeats
    two_norms = layer.residual == "parallel_two_norms"
    new_decoder = two_norms or n_kv_heads not in (1, model.n_heads)
    written = general_fields(model) | {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_kv_heads": n_kv_heads,
        "max_position_embeddings": model.n_positions,
        "ffn_hidden_size": layer.feed_forward.size,
        "activation": HF_ACTIVATIONS[layer.feed_forward.activation],
        "layer_norm_epsilon": layer.norm.eps,
        "alibi": attention.rotary is None,
        "bias": layer.feed_forward.bias,
        "new_decoder_architecture": new_decoder,
        "multi_query": n_kv_heads == 1,
        "parallel_attn": layer.residual != "pre",
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
    }
    return written if attention.rotary is None else written | rotary_fields(attention.rotary)


_LAYER = "{prefix}h.{i}."
_WEIGHTS = {
    "token_embedding": as_it_is("{prefix}word_embeddings.weight"),
    "layers.{i}.qkv.weight": fused_heads(f"{_LAYER}self_attention.query_key_value.weight", "by_group"),
    "layers.{i}.qkv.bias": fused_heads(f"{_LAYER}self_attention.query_key_value.bias", "by_group"),
    "layers.{i}.out.weight": query_heads(f"{_LAYER}self_attention.dense.weight"),
    "layers.{i}.out.bias": as_it_is(f"{_LAYER}self_attention.dense.bias"),
    "layers.{i}.up.weight": as_it_is(f"{_LAYER}mlp.dense_h_to_4h.weight"),
    "layers.{i}.up.bias": as_it_is(f"{_LAYER}mlp.dense_h_to_4h.bias"),
    "layers.{i}.down.weight": as_it_is(f"{_LAYER}mlp.dense_4h_to_h.weight"),
    "layers.{i}.down.bias": as_it_is(f"{_LAYER}mlp.dense_4h_to_h.bias"),
    "layers.{i}.attn_norm.scale": as_it_is(f"{_LAYER}input_layernorm.weight"),
    "layers.{i}.attn_norm.bias": as_it_is(f"{_LAYER}input_layernorm.bias"),
    "layers.{i}.mlp_norm.scale": as_it_is(f"{_LAYER}post_attention_layernorm.weight"),
    "layers.{i}.mlp_norm.bias": as_it_is(f"{_LAYER}post_attention_layernorm.bias"),
    "final_norm.scale": as_it_is("{prefix}ln_f.weight"),
    "final_norm.bias": as_it_is("{prefix}ln_f.bias"),
    "head.weight": as_it_is("lm_head.weight"),
}
_TWO_NORMS = {
    f"layers.{{i}}.{name}_norm.{ours}": as_it_is(f"{_LAYER}ln_{name}.{theirs}")
    for name in ("attn", "mlp")
    for ours, theirs in (("scale", "weight"), ("bias", "bias"))
}


def _renamed(model: ModelConfig) -> Mapping[str, StoredName]:
    return _TWO_NORMS if model.layers[0].residual == "parallel_two_norms" else {}


FALCON = Family(
    model_type="falcon",
    title="Falcon",
    architectures=("FalconForCausalLM", "FalconModel"),
    config_names={
        "n_positions": "max_position_embeddings",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_kv_heads",
        "ffn_size": "ffn_hidden_size",
        "norm_eps": "layer_norm_epsilon",
    },
    read=_read,
    write=_write,
    prefixes=("transformer.", ""),
    weights=_WEIGHTS,
    renamed=_renamed,
    buffers=r"h\.\d+\.self_attention\.(maybe_rotary|rotary_emb)\.inv_freq|rotary_emb\.inv_freq",
)
