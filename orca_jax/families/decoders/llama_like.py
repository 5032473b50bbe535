"""Shared parts of decoders, above all of Llama's relatives: sizes, a layer and the weights' names.

A family's file reads the fields that are its own, composes its layers of these parts, and changes the table
of weights where its checkpoints differ.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from orca_jax.errors import BadModelConfig
from orca_jax.families.attention_config import Attention, QKNorm, QKNormOver, Scores
from orca_jax.families.config_fields import HF_ACTIVATIONS, ConfigFields, general_fields
from orca_jax.families.decoders.rope_fields import read_rotary, rotary_fields
from orca_jax.families.family import Family
from orca_jax.families.limits import check_size, even_head_size
from orca_jax.families.model_config import (
    LAYER_NORM,
    Activation,
    Embedding,
    FeedForward,
    Layer,
    ModelConfig,
    alike,
)
from orca_jax.families.norm_config import Norm
from orca_jax.families.rotary import Rotary
from orca_jax.families.stored_name import (
    StoredName,
    as_it_is,
    linear,
    projections,
    query_heads,
    separate_heads,
)
from orca_jax.families.strict_json import shown

# Our names of sizes, which errors use, and config.json's.
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
FULL, SLIDING = "full_attention", "sliding_attention"  # a layer's kind in `layer_types`

_LAYER = "{prefix}layers.{i}."

PREFIXES = ("model.", "")  # bare models (LlamaModel) omit the `model.` prefix
WEIGHTS: Mapping[str, StoredName] = {
    "token_embedding": as_it_is("{prefix}embed_tokens.weight"),
    **projections("layers.{i}.qkv", f"{_LAYER}self_attn.", "qkv", separate_heads),
    "layers.{i}.q_norm.scale": as_it_is(f"{_LAYER}self_attn.q_norm.weight"),
    "layers.{i}.k_norm.scale": as_it_is(f"{_LAYER}self_attn.k_norm.weight"),
    **linear("layers.{i}.out", f"{_LAYER}self_attn.o_proj", query_heads),
    **projections("layers.{i}.up", f"{_LAYER}mlp.", ("gate", "up")),
    **linear("layers.{i}.down", f"{_LAYER}mlp.down_proj"),
    "layers.{i}.attn_norm.scale": as_it_is(f"{_LAYER}input_layernorm.weight"),
    "layers.{i}.mlp_norm.scale": as_it_is(f"{_LAYER}post_attention_layernorm.weight"),
    "final_norm.scale": as_it_is("{prefix}norm.weight"),
    "head.weight": as_it_is("lm_head.weight"),
}


def relative(
    *,
    model_type: str,
    title: str,
    architectures: tuple[str, ...],
    read: Callable[[ConfigFields], ModelConfig],
    write: Callable[[ModelConfig], dict[str, Any] | None],
    config_names: Mapping[str, str] | None = None,
    weights: Mapping[str, StoredName] | None = None,
    **other: Any,
) -> Family:
    """Make a family with Llama's names of sizes and weights, and those of `config_names` and `weights`."""
    return Family(
        model_type=model_type,
        title=title,
        architectures=architectures,
        config_names={**CONFIG_NAMES, **(config_names or {})},
        read=read,
        write=write,
        prefixes=PREFIXES,
        weights={**WEIGHTS, **(weights or {})},
        # Which old versions saved.
        **{"buffers": r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", **other},
    )


class Sizes(NamedTuple):
    """The sizes of a decoder."""

    vocab_size: int
    n_positions: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_size: int

    def attention(self, **other: Any) -> Attention:
        """Attention with these heads; `other` goes to Attention."""
        return Attention(n_heads=self.n_heads, n_kv_heads=self.n_kv_heads, head_size=self.head_size, **other)


def read_sizes(fields: ConfigFields, *, head_size: int | None = None) -> Sizes:
    """Read the sizes under Llama's names; `head_size` is the family's default.

    Without one the default is the hidden size divided by the number of heads.
    """
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
        n_layers=read_n_layers(fields),
        n_heads=n_heads,
        n_kv_heads=fields.whole("num_key_value_heads", default=n_heads),
        head_size=fields.whole("head_dim", default=head_size),
    )


def read_n_layers(fields: ConfigFields) -> int:
    """Read the number of layers, checked before a family counts to it."""
    n_layers = fields.whole("num_hidden_layers")
    check_size("n_layers", n_layers)
    return n_layers


def read_older_sizes(fields: ConfigFields, names: Mapping[str, str], **known: int) -> Sizes:
    """Read the sizes of a decoder whose heads share the hidden size, under its own `names` or Llama's.

    `known` has sizes that the family has read already.
    """

    def size(name: str) -> int:
        general = CONFIG_NAMES.get(name, name)
        return known[name] if name in known else fields.whole(names.get(name, general), general)

    hidden_size, n_heads = size("hidden_size"), size("n_heads")
    return Sizes(
        vocab_size=size("vocab_size"),
        n_positions=size("n_positions"),
        hidden_size=hidden_size,
        n_layers=size("n_layers"),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_size=even_head_size(hidden_size, n_heads),
    )


def read_gated(
    fields: ConfigFields, *, bias: bool = False, activation: Activation | None = None, gated: bool = True
) -> FeedForward:
    """Read the feed-forward layer, SwiGLU unless `hidden_act`, `activation` or `gated` says otherwise."""
    return FeedForward(
        size=fields.whole("intermediate_size"),
        activation=activation or fields.activation("hidden_act", "silu"),
        gated=gated,
        bias=bias,
    )


def read_layer(
    fields: ConfigFields,
    sizes: Sizes,
    *,
    bias: bool = False,
    qkv_bias: bool | None = None,
    mlp_bias: bool = False,
    activation: Activation | None = None,
    gated: bool = True,
    eps: float = 1e-6,
    unit_offset: bool = False,
    qk_norm: QKNormOver | None = None,
    rotary: Rotary | None = None,
    scores: Scores | None = None,
) -> Layer:
    """Read a layer of Llama's kind.

    `bias` is attention's, `qkv_bias` that of queries, keys and values where it differs, and `eps` the
    family's default of `rms_norm_eps`. Without `rotary` whole heads are rotated as config.json says.
    """
    norm = Norm(kind="rms_norm", eps=fields.number("rms_norm_eps", eps), unit_offset=unit_offset)
    return Layer(
        attention=sizes.attention(
            qkv_bias=bias if qkv_bias is None else qkv_bias,
            out_bias=bias,
            qk_norm=None if qk_norm is None else QKNorm(norm=norm, over=qk_norm),
            rotary=rotary or read_rotary(fields, head_size=sizes.head_size, n_positions=sizes.n_positions),
            scores=scores or Scores(),
        ),
        feed_forward=read_gated(fields, bias=mlp_bias, activation=activation, gated=gated),
        norm=norm,
    )


def read_layer_kinds(fields: ConfigFields, n_layers: int) -> Sequence[str] | None:
    """Read `layer_types`, FULL or SLIDING for each layer; None without it. Raises BadModelConfig."""
    found = fields.texts("layer_types")
    if found is not None and (len(found) != n_layers or not set(found) <= {FULL, SLIDING}):
        raise BadModelConfig(
            f"{shown(fields.path)}: layer_types: expected {n_layers} of {FULL}, {SLIDING}, "
            f"found {shown(list(found))}"
        )
    return found


def read_alternating_kinds(fields: ConfigFields, n_layers: int, period: int) -> Sequence[str]:
    """Read `layer_types`, or make each `period`-th layer FULL and all others SLIDING.

    Raises BadModelConfig.
    """
    if period < 1:
        raise BadModelConfig(
            f"{shown(fields.path)}: sliding_window_pattern: expected at least 1, found {shown(period)}"
        )
    return read_layer_kinds(fields, n_layers) or [
        SLIDING if (i + 1) % period else FULL for i in range(n_layers)
    ]


def read_rotaries(
    fields: ConfigFields, sizes: Sizes, *, base: float, local_base: float, local_name: str
) -> tuple[Rotary, Rotary]:
    """Read the rotary positions of layers without a window, and of layers with one.

    The bases are the family's defaults. In the older spelling `local_name` is the field with the base of
    layers with a window, and rope_scaling holds for the others alone.
    """

    def read(kind: str, base_name: str, default: float) -> Rotary:
        return read_rotary(
            fields,
            head_size=sizes.head_size,
            n_positions=sizes.n_positions,
            base_name=base_name,
            default_base=default,
            kind_of_layer=kind,
        )

    nested = fields.section("rope_parameters")
    if nested is not None:
        missing = [kind for kind in (FULL, SLIDING) if nested.section(kind) is None]
        nested.leave_others({})
        if missing:
            raise BadModelConfig(f"{shown(fields.path)}: rope_parameters.{missing[0]}: expected an object")
    full = read(FULL, "rope_theta", base)
    if nested is not None:
        return full, read(SLIDING, local_name, local_base)
    return full, Rotary(size=sizes.head_size, base=fields.number(local_name, local_base))


def with_windows(
    fields: ConfigFields, layers: Sequence[Layer], kinds: Sequence[str], window: int | None
) -> list[Layer]:
    """Give the layers of the kind SLIDING the window. Raises BadModelConfig where there is none."""
    if window is None and SLIDING in kinds:
        raise BadModelConfig(
            f"{shown(fields.path)} disagrees with itself: layers have {SLIDING}, but sliding_window is null "
            "or use_sliding_window is not true"
        )
    return [
        layer.with_window(window) if kind == SLIDING else layer
        for layer, kind in zip(layers, kinds, strict=True)
    ]


def decoder(
    fields: ConfigFields,
    sizes: Sizes,
    layers: Layer | Sequence[Layer],
    *,
    tied: bool = False,
    embedding_multiplier: float = 1.0,
    **other: Any,
) -> ModelConfig:
    """Compose a decoder of `layers`, one for all or each by itself, whose norm is also the final one.

    `tied` is the family's default of `tie_word_embeddings`; `other` goes to ModelConfig.
    """
    every = alike(layers, sizes.n_layers) if isinstance(layers, Layer) else tuple(layers)
    embedding = Embedding(
        size=sizes.hidden_size,
        tied=fields.flag("tie_word_embeddings", tied),
        multiplier=embedding_multiplier,
    )
    rest: dict[str, Any] = {
        "embedding": embedding,
        "positions": None,
        "final_norm": every[0].norm if every else LAYER_NORM,
        **fields.special_ids(),
        **other,
    }
    return ModelConfig(
        vocab_size=sizes.vocab_size,
        n_positions=sizes.n_positions,
        hidden_size=sizes.hidden_size,
        layers=every,
        **rest,
    )


def size_fields(model: ModelConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """The fields that every family writes, and the sizes in `names`, as `read_older_sizes` reads them."""
    layer, attention = model.layers[0], model.attention
    sizes = {
        "embedding_size": model.embedding.size,
        "hidden_size": model.hidden_size,
        "n_layers": model.n_layers,
        "n_heads": model.n_heads,
        "n_kv_heads": model.n_kv_heads // attention.kv_repeats,
        "head_size": model.head_size,
        "n_positions": model.n_positions,
        "ffn_size": model.feed_forward.size,
        "norm_eps": layer.norm.eps,
    }
    names = {"hidden_size": "hidden_size", **names}
    return general_fields(model) | {names[ours]: size for ours, size in sizes.items() if ours in names}


def common_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields that most relatives write in the same way; hf_config.py checks that they are read back."""
    written = size_fields(model, CONFIG_NAMES)
    written |= {"hidden_act": HF_ACTIVATIONS[model.feed_forward.activation]}
    rotary = any_rotary(model)
    return written if rotary is None else written | rotary_fields(rotary)


def bias_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields that say which linear layers have biases, where attention and feed-forward each have one."""
    return {
        "attention_bias": model.attention.qkv_bias,
        "mlp_bias": model.feed_forward.bias,
    }


def any_rotary(model: ModelConfig) -> Rotary | None:
    """The rotary positions of the first layer that has any."""
    every = (layer.rotary for layer in model.layers)
    return next((rotary for rotary in every if rotary is not None), None)


def window_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields that say which layers have a window."""
    windows = [layer.attention and layer.attention.scores.window for layer in model.layers]
    return {
        "sliding_window": next((window for window in windows if window is not None), None),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }
