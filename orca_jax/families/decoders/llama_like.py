"""What Llama and its relatives share: fields of config.json, and the names of their weights.

A relative's file reads the fields that it has besides, composes its layers, and changes the table of weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orca_jax.errors import BadModelConfig
from orca_jax.families.attention_config import Attention
from orca_jax.families.config_fields import HF_ACTIVATIONS, ConfigFields, general_fields
from orca_jax.families.decoders.rope_fields import read_rotary, rotary_fields
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.rotary import Rotary
from orca_jax.families.stored_name import StoredName, as_it_is, query_heads, separate_heads, stacked
from orca_jax.families.strict_json import shown

# Our words in an error, and config.json's.
CONFIG_NAMES: Mapping[str, str] = {
    "n_positions": "max_position_embeddings",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "ffn_size": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "window": "sliding_window",
}

_LAYER = "{prefix}layers.{i}."
_QKV = tuple(f"{_LAYER}self_attn.{part}_proj" for part in "qkv")
_GATE_UP = tuple(f"{_LAYER}mlp.{part}_proj" for part in ("gate", "up"))

# Those of a model of the bare names are without the first prefix.
PREFIXES = ("model.", "")
WEIGHTS: Mapping[str, StoredName] = {
    "token_embedding": as_it_is("{prefix}embed_tokens.weight"),
    "layers.{i}.qkv.weight": separate_heads(*(f"{name}.weight" for name in _QKV)),
    "layers.{i}.qkv.bias": separate_heads(*(f"{name}.bias" for name in _QKV)),
    "layers.{i}.q_norm.scale": as_it_is(f"{_LAYER}self_attn.q_norm.weight"),
    "layers.{i}.k_norm.scale": as_it_is(f"{_LAYER}self_attn.k_norm.weight"),
    "layers.{i}.out.weight": query_heads(f"{_LAYER}self_attn.o_proj.weight"),
    "layers.{i}.out.bias": as_it_is(f"{_LAYER}self_attn.o_proj.bias"),
    "layers.{i}.up.weight": stacked(*(f"{name}.weight" for name in _GATE_UP)),
    "layers.{i}.up.bias": stacked(*(f"{name}.bias" for name in _GATE_UP)),
    "layers.{i}.down.weight": as_it_is(f"{_LAYER}mlp.down_proj.weight"),
    "layers.{i}.down.bias": as_it_is(f"{_LAYER}mlp.down_proj.bias"),
    "layers.{i}.attn_norm.scale": as_it_is(f"{_LAYER}input_layernorm.weight"),
    "layers.{i}.mlp_norm.scale": as_it_is(f"{_LAYER}post_attention_layernorm.weight"),
    "final_norm.scale": as_it_is("{prefix}norm.weight"),
    "head.weight": as_it_is("lm_head.weight"),
}
# The rotary frequencies, which old versions saved.
BUFFERS = r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"


class Sizes(NamedTuple):
    """The sizes that most relatives name alike."""

    vocab_size: int
    n_positions: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_size: int


def read_sizes(fields: ConfigFields, *, head_size: int | None = None) -> Sizes:
    """The sizes in config.json; `head_size` is the family's default, None the hidden size over the heads."""
    hidden_size, n_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if head_size is None and fields.raw("head_dim") is None:
        if n_heads < 1 or hidden_size % n_heads:
            raise BadModelConfig(
                f"{shown(fields.path)}: hidden_size {shown(hidden_size)} is not a multiple of "
                f"num_attention_heads {shown(n_heads)}, and head_dim is not given"
            )
        head_size = hidden_size // n_heads
    return Sizes(
        vocab_size=fields.whole("vocab_size"),
        n_positions=fields.whole("max_position_embeddings"),
        hidden_size=hidden_size,
        n_layers=fields.whole("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=fields.whole("num_key_value_heads", default=n_heads),
        head_size=fields.whole("head_dim", default=head_size),
    )


def read_gated(
    fields: ConfigFields, *, bias: bool = False, activation: str = "silu", name: str = "hidden_act"
) -> FeedForward:
    """The gated feed-forward layer, by default SwiGLU."""
    size = fields.whole("intermediate_size")
    return FeedForward(size=size, activation=fields.activation(name, activation), gated=True, bias=bias)


def read_layer(
    fields: ConfigFields,
    sizes: Sizes,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    eps: float = 1e-6,
    rotary: Rotary | None = None,
) -> Layer:
    """A layer of Llama's kind; `eps` is the family's default of `rms_norm_eps`.

    Without `rotary` whole heads are rotated as config.json says.
    """
    if rotary is None:
        rotary = read_rotary(fields, head_size=sizes.head_size, n_positions=sizes.n_positions)
    return Layer(
        attention=Attention(
            n_heads=sizes.n_heads,
            n_kv_heads=sizes.n_kv_heads,
            head_size=sizes.head_size,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            rotary=rotary,
        ),
        feed_forward=read_gated(fields, bias=mlp_bias),
        norm=Norm(kind="rms_norm", eps=fields.number("rms_norm_eps", eps)),
    )


def read_layer_kinds(fields: ConfigFields, n_layers: int, kinds: Sequence[str]) -> tuple[str, ...] | None:
    """`layer_types`: for each layer one of `kinds`; None where the file has none. Raises BadModelConfig."""
    found = fields.texts("layer_types")
    if found is not None and (len(found) != n_layers or not set(found) <= set(kinds)):
        raise BadModelConfig(
            f"{shown(fields.path)}: layer_types: expected {n_layers} of {', '.join(kinds)}, "
            f"found {shown(list(found))}"
        )
    return found


def decoder(
    fields: ConfigFields,
    sizes: Sizes,
    layers: Sequence[Layer],
    *,
    final_norm: Norm,
    tied: bool = False,
    embedding_multiplier: float = 1.0,
    **other: Any,
) -> ModelConfig:
    """The model without learned positions; `tied` is the family's default, `other` goes to ModelConfig."""
    return ModelConfig(
        vocab_size=sizes.vocab_size,
        n_positions=sizes.n_positions,
        hidden_size=sizes.hidden_size,
        layers=tuple(layers),
        embedding=Embedding(
            size=sizes.hidden_size,
            tied=fields.flag("tie_word_embeddings", tied),
            multiplier=embedding_multiplier,
        ),
        positions=None,
        final_norm=final_norm,
        **fields.special_ids(),
        **other,
    )


def common_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields that most relatives write alike. The caller of `Family.write` reads them again to check."""
    layer = model.layers[0]
    attention: Attention = layer.attention
    written = general_fields(model) | {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads // attention.kv_repeats,
        "head_dim": model.head_size,
        "max_position_embeddings": model.n_positions,
        "intermediate_size": layer.feed_forward.size,
        "hidden_act": HF_ACTIVATIONS[layer.feed_forward.activation],
        "rms_norm_eps": layer.norm.eps,
    }
    return written if attention.rotary is None else written | rotary_fields(attention.rotary)
