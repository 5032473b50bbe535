"""BLOOM (BigScience Workshop, 2022): ALiBi, and a norm after the embedding."""

from collections.abc import Mapping
from typing import Any

from orca_jax.families.attention_config import Scores
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import decoder, read_older_sizes, size_fields
from orca_jax.families.family import Family
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.stored_name import StoredName, as_it_is, by_group, layer_norm, linear, query_heads

# ALiBi has no last position, and most files state none: BLOOM was trained with this length.
_N_POSITIONS = 2048
# Megatron's choices between equal computations; transformers reads none of them.
_MEGATRON = ("offset_alibi", "skip_bias_add", "skip_bias_add_qkv")
_NAMES = {
    "n_positions": "seq_length",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "norm_eps": "layer_norm_epsilon",
}


def megatron_layer(layer: str, attention: str) -> dict[str, StoredName]:
    """The weights of a layer as Megatron names them, which EleutherAI's and BigScience's code began with."""
    return {
        **linear("layers.{i}.qkv", f"{layer}{attention}.query_key_value", by_group, by_group),
        **linear("layers.{i}.out", f"{layer}{attention}.dense", query_heads),
        **linear("layers.{i}.up", f"{layer}mlp.dense_h_to_4h"),
        **linear("layers.{i}.down", f"{layer}mlp.dense_4h_to_h"),
        **layer_norm("layers.{i}.attn_norm", f"{layer}input_layernorm"),
        **layer_norm("layers.{i}.mlp_norm", f"{layer}post_attention_layernorm"),
    }


WEIGHTS: Mapping[str, StoredName] = {
    "token_embedding": as_it_is("{prefix}word_embeddings.weight"),
    **megatron_layer("{prefix}h.{i}.", "self_attention"),
    **layer_norm("final_norm", "{prefix}ln_f"),
    "head.weight": as_it_is("lm_head.weight"),
}


def _read(fields: ConfigFields) -> ModelConfig:
    fields.must_be("apply_residual_connection_post_layernorm", False, "a residual taken after the norm")
    fields.must_be("slow_but_exact", False, "a sum over the parts of tensor-parallel training")
    sizes = read_older_sizes(
        fields,
        _NAMES,
        hidden_size=fields.whole("hidden_size", "n_embed"),
        n_positions=fields.whole("seq_length", "max_position_embeddings", default=_N_POSITIONS),
    )
    layer = Layer(
        attention=sizes.attention(scores=Scores(alibi=1.0)),
        feed_forward=FeedForward(size=4 * sizes.hidden_size),
        norm=Norm(eps=fields.number("layer_norm_epsilon", 1e-5)),
    )
    tied = fields.flag("tie_word_embeddings", True)
    embedding = Embedding(size=sizes.hidden_size, tied=tied, norm=layer.norm)
    return decoder(fields, sizes, layer, embedding=embedding)


def _write(model: ModelConfig) -> dict[str, Any]:
    return size_fields(model, _NAMES)


BLOOM = Family(
    model_type="bloom",
    title="BLOOM",
    architectures=("BloomForCausalLM", "BloomModel"),
    config_names=_NAMES,
    read=_read,
    write=_write,
    prefixes=("transformer.", ""),
    weights={**WEIGHTS, **layer_norm("embedding_norm", "{prefix}word_embeddings_layernorm")},
    unread=dict.fromkeys(_MEGATRON, "Megatron's way of computing the same"),
)
