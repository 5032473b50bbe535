"""BLOOM (BigScience Workshop, 2022): ALiBi, and a norm after the embedding."""

from typing import Any

from orca_jax.families.attention_config import Attention, Scores
from orca_jax.families.config_fields import ConfigFields, general_fields
from orca_jax.families.family import Family
from orca_jax.families.limits import even_head_size
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig, alike
from orca_jax.families.norm_config import Norm
from orca_jax.families.stored_name import as_it_is, fused_heads, query_heads

# ALiBi has no last position, and most files state none: this is the length that BLOOM was trained with.
_N_POSITIONS = 2048
# Megatron's ways of computing the same; transformers reads none of them.
_MEGATRON = ("offset_alibi", "skip_bias_add", "skip_bias_add_qkv")


def _read(fields: ConfigFields) -> ModelConfig:
    fields.must_be("apply_residual_connection_post_layernorm", False, "a residual taken after the norm")
    fields.must_be("slow_but_exact", False, "a sum over the parts of tensor-parallel training")
    hidden_size = fields.whole("hidden_size", "n_embed")
    n_heads = fields.whole("n_head", "num_attention_heads")
    head_size = even_head_size(hidden_size, n_heads)
    norm = Norm(eps=fields.number("layer_norm_epsilon", 1e-5))
    layer = Layer(
        attention=Attention(
            n_heads=n_heads, n_kv_heads=n_heads, head_size=head_size, scores=Scores(alibi=1.0)
        ),
        feed_forward=FeedForward(size=4 * hidden_size, activation="gelu_tanh"),
        norm=norm,
    )
    return ModelConfig(
        vocab_size=fields.whole("vocab_size"),
        n_positions=fields.whole("seq_length", "max_position_embeddings", default=_N_POSITIONS),
        hidden_size=hidden_size,
        layers=alike(layer, fields.whole("n_layer", "num_hidden_layers")),
        embedding=Embedding(size=hidden_size, tied=fields.flag("tie_word_embeddings", True), norm=norm),
        positions=None,
        final_norm=norm,
        **fields.special_ids(),
    )


def _write(model: ModelConfig) -> dict[str, Any] | None:
    return general_fields(model) | {
        "seq_length": model.n_positions,
        "hidden_size": model.hidden_size,
        "n_layer": model.n_layers,
        "n_head": model.n_heads,
        "layer_norm_epsilon": model.layers[0].norm.eps,
    }


_LAYER = "{prefix}h.{i}."

BLOOM = Family(
    model_type="bloom",
    title="BLOOM",
    architectures=("BloomForCausalLM", "BloomModel"),
    config_names={
        "n_positions": "seq_length",
        "n_layers": "n_layer",
        "n_heads": "n_head",
        "norm_eps": "layer_norm_epsilon",
    },
    read=_read,
    write=_write,
    prefixes=("transformer.", ""),
    weights={
        "token_embedding": as_it_is("{prefix}word_embeddings.weight"),
        "embedding_norm.scale": as_it_is("{prefix}word_embeddings_layernorm.weight"),
        "embedding_norm.bias": as_it_is("{prefix}word_embeddings_layernorm.bias"),
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
    },
    unread=dict.fromkeys(_MEGATRON, "Megatron's way of computing the same"),
)
