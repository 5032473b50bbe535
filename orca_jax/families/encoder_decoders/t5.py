"""T5 (Raffel et al., 2020) with its version 1.1 and FLAN, mT5, and umT5, whose layers have a bias table each.

Scores are not scaled. Positions enter by a relative bias alone, so the model sets no maximum length.
Where T5's head is its embedding, logits are multiplied by d_model ** -0.5. transformers 5 writes
`tie_word_embeddings` true for all of them, T5's scaling as `scale_decoder_outputs`, and a model has a
separate head if its file has one. It scales umT5's logits by that field, and mT5's never.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.attention_config import Attention, RelativeBias, Scores
from orca_jax.families.config_fields import (
    HF_ACTIVATIONS,
    ConfigFields,
    decoder_fields,
    general_fields,
)
from orca_jax.families.family import Family
from orca_jax.families.model_config import (
    Activation,
    Embedding,
    Encoder,
    FeedForward,
    Layer,
    ModelConfig,
    alike,
)
from orca_jax.families.norm_config import Norm
from orca_jax.families.stored_name import StoredName, as_it_is, stacked
from orca_jax.families.strict_json import shown

N_POSITIONS = 2048  # the encoder's and the decoder's: a bound that this engine sets
_BUCKETS, _DISTANCE, _EPS = 32, 128, 1e-6
_UNREAD: Mapping[str, str] = {
    "n_positions": "the length in training; a relative bias sets no maximum",
    "scalable_attention": "umT5's; transformers does not read it",
}
_PROJECTIONS: Mapping[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
}


def _read(
    fields: ConfigFields, *, tied: bool, scaled: bool, projection: str, shared: bool = True
) -> ModelConfig:
    """Read a model with a `tied` head, `scaled` logits, and this default of `feed_forward_proj`."""
    hidden_size = fields.whole("d_model", "hidden_size")
    n_layers = fields.whole("num_layers", "num_hidden_layers")
    n_heads = fields.whole("num_heads", "num_attention_heads")
    relative = RelativeBias(
        n_buckets=fields.whole("relative_attention_num_buckets", default=_BUCKETS),
        max_distance=fields.whole("relative_attention_max_distance", default=_DISTANCE),
        shared=shared,
    )
    norm = Norm(kind="rms_norm", eps=fields.number("layer_norm_epsilon", _EPS))
    causal = Attention(
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_size=fields.whole("d_kv", "head_dim"),
        qkv_bias=False,
        out_bias=False,
        scores=Scores(scale=1.0, relative=relative),
    )
    layer = Layer(attention=causal, feed_forward=_feed_forward(fields, projection), norm=norm)
    cross = replace(causal, causal=False, scores=Scores(scale=1.0))
    encoding = replace(layer, attention=replace(causal, causal=False))
    return ModelConfig(
        vocab_size=fields.whole("vocab_size"),
        n_positions=N_POSITIONS,
        hidden_size=hidden_size,
        layers=alike(replace(layer, cross=cross), fields.whole("num_decoder_layers", default=n_layers)),
        embedding=Embedding(size=hidden_size, tied=tied),
        positions=None,
        final_norm=norm,
        logit_multiplier=hidden_size**-0.5 if scaled else 1.0,
        encoder=Encoder(layers=alike(encoding, n_layers), n_positions=N_POSITIONS, final_norm=norm),
        **fields.special_ids(),
        **fields.decoder_ids(fields.whole("pad_token_id", default=0)),
    )


def _feed_forward(fields: ConfigFields, default: str) -> FeedForward:
    """Read `feed_forward_proj`: an activation, perhaps after "gated-"; newer files repeat it."""
    text = fields.text("feed_forward_proj", default)
    gated = text.startswith("gated-")
    name = "gelu_new" if text == "gated-gelu" else text.removeprefix("gated-")
    if name not in _PROJECTIONS:
        known = ", ".join([*_PROJECTIONS, *(f"gated-{each}" for each in _PROJECTIONS)])
        raise UnsupportedModel(
            f"{shown(fields.path)}: feed_forward_proj: expected one of {known}, found '{shown(text)}'"
        )
    for field, repeated in (("is_gated_act", gated), ("dense_act_fn", name)):
        if fields.raw(field) not in (None, repeated):
            raise BadModelConfig(
                f"{shown(fields.path)} disagrees with itself: feed_forward_proj is '{shown(text)}', "
                f"{field} is {shown(fields.raw(field))}"
            )
    return FeedForward(size=fields.whole("d_ff"), activation=_PROJECTIONS[name], gated=gated, bias=False)


def _ties(fields: ConfigFields) -> bool:
    """Read whether the head is the embedding. Raises UnsupportedModel for a model without a head."""
    tied = fields.flag("tie_word_embeddings", True)
    classes = fields.raw("architectures") or [""]
    if not tied and all(name.endswith("Model") for name in classes):
        where = f"{shown(fields.path)}: architectures: {shown(classes)}"
        raise UnsupportedModel(f"{where} with tie_word_embeddings false has no head")
    return tied


def _read_t5(fields: ConfigFields) -> ModelConfig:
    tied = _ties(fields)
    scaled = fields.flag("scale_decoder_outputs", tied)
    return _read(fields, tied=tied and scaled, scaled=scaled, projection="relu")


def _read_mt5(fields: ConfigFields) -> ModelConfig:
    _ties(fields)
    return _read(fields, tied=False, scaled=False, projection="gated-gelu")


def _read_umt5(fields: ConfigFields) -> ModelConfig:
    return _read(fields, tied=False, scaled=_ties(fields), projection="gated-gelu", shared=False)


def _write(model: ModelConfig) -> dict[str, Any] | None:
    layer = model.layers[0]
    relative = model.attention.scores.relative
    if model.encoder is None or relative is None:
        return None
    activation = HF_ACTIVATIONS[model.feed_forward.activation]
    gated = model.feed_forward.gated
    projection = f"gated-{activation}" if gated else activation
    return (
        general_fields(model)
        | decoder_fields(model)
        | {
            "pad_token_id": 0,
            "d_model": model.hidden_size,
            "d_kv": model.head_size,
            "d_ff": model.feed_forward.size,
            "num_heads": model.n_heads,
            "num_layers": len(model.encoder.layers),
            "num_decoder_layers": model.n_layers,
            "relative_attention_num_buckets": relative.n_buckets,
            "relative_attention_max_distance": relative.max_distance,
            "layer_norm_epsilon": layer.norm.eps,
            "feed_forward_proj": "gated-gelu" if projection == "gated-gelu_new" else projection,
        }
    )


def _write_t5(model: ModelConfig) -> dict[str, Any] | None:
    written = _write(model)
    scaled = model.logit_multiplier != 1.0
    return None if written is None else written | {"scale_decoder_outputs": scaled}


def _write_umt5(model: ModelConfig) -> dict[str, Any] | None:
    written = _write(model)
    scaled = model.logit_multiplier != 1.0
    return None if written is None else written | {"tie_word_embeddings": scaled}


def _side(side: str, ours: str, n_before: int, bias_layer: str) -> dict[str, StoredName]:
    """The weights of the encoder or the decoder, with `n_before` sublayers before the feed-forward part."""
    block = f"{side}.block.{{i}}.layer"
    first = f"{side}.block.{bias_layer}.layer.0.SelfAttention.relative_attention_bias.weight"
    attention = [f"{block}.0.SelfAttention.{part}.weight" for part in "qkvo"]
    return {
        f"{ours}layers.{{i}}.qkv.weight": stacked(*attention[:3]),
        f"{ours}layers.{{i}}.out.weight": as_it_is(attention[3]),
        f"{ours}layers.{{i}}.relative_bias": as_it_is(first),
        f"{ours}layers.{{i}}.attn_norm.scale": as_it_is(f"{block}.0.layer_norm.weight"),
        f"{ours}layers.{{i}}.up.weight": as_it_is(f"{block}.{n_before}.DenseReluDense.wi.weight"),
        f"{ours}layers.{{i}}.down.weight": as_it_is(f"{block}.{n_before}.DenseReluDense.wo.weight"),
        f"{ours}layers.{{i}}.mlp_norm.scale": as_it_is(f"{block}.{n_before}.layer_norm.weight"),
        f"{ours}final_norm.scale": as_it_is(f"{side}.final_layer_norm.weight"),
    }


def _weights(bias_layer: str) -> dict[str, StoredName]:
    """All weights; each layer's relative bias is the table of `bias_layer`."""
    cross = "decoder.block.{i}.layer.1"
    return {
        "token_embedding": as_it_is("shared.weight"),
        "head.weight": as_it_is("lm_head.weight"),
        **_side("encoder", "encoder.", 1, bias_layer),
        **_side("decoder", "", 2, bias_layer),
        "layers.{i}.cross_q.weight": as_it_is(f"{cross}.EncDecAttention.q.weight"),
        "layers.{i}.cross_kv.weight": stacked(*(f"{cross}.EncDecAttention.{part}.weight" for part in "kv")),
        "layers.{i}.cross_out.weight": as_it_is(f"{cross}.EncDecAttention.o.weight"),
        "layers.{i}.cross_norm.scale": as_it_is(f"{cross}.layer_norm.weight"),
    }


def _gated(model: ModelConfig) -> Mapping[str, StoredName]:
    """The gate and up of a gated feed-forward part, which has two tensors for them."""
    if not model.feed_forward.gated:
        return {}
    return {
        f"{ours}layers.{{i}}.up.weight": stacked(
            *(f"{side}.block.{{i}}.layer.{at}.DenseReluDense.wi_{part}.weight" for part in (0, 1))
        )
        for ours, side, at in (("encoder.", "encoder", 1), ("", "decoder", 2))
    }


def _family(
    model_type: str,
    title: str,
    classes: str,
    read: Callable[[ConfigFields], ModelConfig],
    write: Callable[[ModelConfig], dict[str, Any] | None],
    bias_layer: str = "0",
) -> Family:
    return Family(
        model_type=model_type,
        title=title,
        architectures=(f"{classes}ForConditionalGeneration", f"{classes}Model"),
        config_names={
            "hidden_size": "d_model",
            "embedding_size": "d_model",
            "n_layers": "num_layers",
            "n_heads": "num_heads",
            "n_kv_heads": "num_heads",
            "head_size": "d_kv",
            "ffn_size": "d_ff",
            "norm_eps": "layer_norm_epsilon",
            "relative_buckets": "relative_attention_num_buckets",
            "relative_distance": "relative_attention_max_distance",
        },
        read=read,
        write=write,
        prefixes=("",),
        weights=_weights(bias_layer),
        renamed=_gated,
        aliases={"lm_head.weight": "shared.weight"},
        buffers=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
        copies=r"(encoder|decoder)\.embed_tokens\.weight",
        unread=_UNREAD,
        has_encoder=True,
    )


T5 = _family("t5", "T5, T5 v1.1, FLAN-T5", "T5", _read_t5, _write_t5)
MT5 = _family("mt5", "mT5", "MT5", _read_mt5, _write)
UMT5 = _family("umt5", "umT5", "UMT5", _read_umt5, _write_umt5, bias_layer="{i}")
