"""BART (Lewis et al., 2020), mBART and Pegasus: LayerNorm, and biases everywhere.

BART has its norms after the sums; the others have them before the sums, and one more at the end. BART and
mBART have a norm after the embedding, and count positions from 2. Pegasus's positions are sines and cosines,
which a checkpoint may have as a table. Logits have a bias, which is zero in most checkpoints.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from orca_jax.errors import UnsupportedModel
from orca_jax.families.attention_config import Attention
from orca_jax.families.config_fields import (
    HF_ACTIVATIONS,
    ConfigFields,
    decoder_fields,
    general_fields,
)
from orca_jax.families.family import Family
from orca_jax.families.limits import even_head_size
from orca_jax.families.model_config import (
    Embedding,
    Encoder,
    FeedForward,
    Layer,
    LearnedPositions,
    ModelConfig,
    Residual,
    alike,
)
from orca_jax.families.norm_config import Norm
from orca_jax.families.stored_name import StoredName, as_it_is, layer_norm, linear, one_row, projections
from orca_jax.families.strict_json import shown

_NORM = Norm()
_UNREAD: Mapping[str, str] = {
    "num_hidden_layers": "encoder_layers by the general name",
    "add_bias_logits": "the bias is there in any case",
}


class _Kind(NamedTuple):
    """The differences between the families."""

    residual: Residual
    embedding_norm: Norm | None
    final_norm: Norm | None
    offset: int  # of positions
    sinusoidal: bool


_BART = _Kind("post", _NORM, None, 2, False)
_MBART = _Kind("pre", _NORM, _NORM, 2, False)
_PEGASUS = _Kind("pre", None, _NORM, 0, True)


def _read(fields: ConfigFields, *, kind: _Kind) -> ModelConfig:
    hidden_size = fields.whole("d_model", "hidden_size")
    n_positions = fields.whole("max_position_embeddings")
    _check_fixed(fields, kind)
    activation = fields.activation("activation_function", "gelu")
    positions = LearnedPositions(offset=kind.offset)

    def layer(side: str, *, causal: bool) -> Layer:
        n_heads = fields.whole(f"{side}_attention_heads", "num_attention_heads" if side == "encoder" else "")
        attention = Attention(
            n_heads=n_heads,
            n_kv_heads=n_heads,
            head_size=even_head_size(hidden_size, n_heads),
            causal=causal,
        )
        size = fields.whole(f"{side}_ffn_dim")
        return Layer(
            attention=attention,
            feed_forward=FeedForward(size=size, activation=activation),
            norm=_NORM,
            residual=kind.residual,
            cross=replace(attention, causal=False) if causal else None,
        )

    special = fields.special_ids()
    decoder_ids = fields.decoder_ids(special["bos_token_id"])
    if fields.flag("force_bos_token_to_be_generated", False) and decoder_ids["forced_bos_token_id"] is None:
        decoder_ids["forced_bos_token_id"] = special["bos_token_id"]  # its older spelling
    return ModelConfig(
        vocab_size=fields.whole("vocab_size"),
        n_positions=n_positions,
        hidden_size=hidden_size,
        layers=alike(layer("decoder", causal=True), fields.whole("decoder_layers")),
        embedding=Embedding(
            size=hidden_size,
            tied=fields.flag("tie_word_embeddings", True),
            multiplier=hidden_size**0.5 if fields.flag("scale_embedding", False) else 1.0,
            norm=kind.embedding_norm,
        ),
        positions=positions,
        final_norm=kind.final_norm,
        head_bias=True,
        encoder=Encoder(
            layers=alike(layer("encoder", causal=False), fields.whole("encoder_layers")),
            n_positions=n_positions,
            positions=positions,
            embedding_norm=kind.embedding_norm,
            final_norm=kind.final_norm,
        ),
        **special,
        **decoder_ids,
    )


def _check_fixed(fields: ConfigFields, kind: _Kind) -> None:
    """Refuse a file that contradicts its model_type: older files state what the type implies."""
    for name, value in (
        ("normalize_before", kind.residual == "pre"),
        ("add_final_layer_norm", kind.final_norm is not None),
        ("normalize_embedding", kind.embedding_norm is not None),
        ("static_position_embeddings", kind.sinusoidal),
    ):
        fields.must_be(name, value, "what another model_type has")
    extra = fields.whole("extra_pos_embeddings", default=kind.offset)
    if not kind.sinusoidal and extra != kind.offset:
        raise UnsupportedModel(
            f"{shown(fields.path)}: extra_pos_embeddings: expected {kind.offset}, found {shown(extra)}"
        )


def _write(model: ModelConfig) -> dict[str, Any] | None:
    encoder = model.encoder
    if encoder is None:
        return None
    decoding, encoding = model.feed_forward, encoder.layers[0].feed_forward
    assert encoding is not None  # layers of one part are decoders' alone
    return (
        general_fields(model)
        | decoder_fields(model)
        | {
            "d_model": model.hidden_size,
            "max_position_embeddings": model.n_positions,
            "encoder_layers": len(encoder.layers),
            "encoder_attention_heads": model.n_heads,
            "encoder_ffn_dim": encoding.size,
            "decoder_layers": model.n_layers,
            "decoder_attention_heads": model.n_heads,
            "decoder_ffn_dim": decoding.size,
            "activation_function": HF_ACTIVATIONS[decoding.activation],
            "scale_embedding": model.embedding.multiplier != 1.0,
        }
    )


def _side(side: str, ours: str) -> dict[str, StoredName]:
    """The weights of the encoder or the decoder, without cross attention."""
    place = f"{{prefix}}{side}."
    layer, name = f"{place}layers.{{i}}.", f"{ours}layers.{{i}}."
    return {
        f"{ours}position_embedding": as_it_is(f"{place}embed_positions.weight"),
        **layer_norm(f"{ours}embedding_norm", f"{place}layernorm_embedding"),
        **layer_norm(f"{ours}final_norm", f"{place}layer_norm"),
        **layer_norm(f"{name}attn_norm", f"{layer}self_attn_layer_norm"),
        **layer_norm(f"{name}mlp_norm", f"{layer}final_layer_norm"),  # each layer's, despite the name
        **projections(f"{name}qkv", f"{layer}self_attn.", "qkv"),
        **linear(f"{name}out", f"{layer}self_attn.out_proj"),
        **linear(f"{name}up", f"{layer}fc1"),
        **linear(f"{name}down", f"{layer}fc2"),
    }


_CROSS = "{prefix}decoder.layers.{i}.encoder_attn"


def _no_bias(model: ModelConfig) -> npt.NDArray[np.float32]:
    return np.zeros(model.vocab_size, np.float32)


def _sinusoids(model: ModelConfig) -> npt.NDArray[np.float32]:
    """Sines, then cosines, of position / 10000 ** (2 i / hidden_size) in each row."""
    half = -(-model.hidden_size // 2)
    angle = np.arange(model.n_positions)[:, None] / 10_000 ** (2 * np.arange(half) / model.hidden_size)
    table = np.concatenate([np.sin(angle), np.cos(angle)[:, : model.hidden_size - half]], axis=1)
    return table.astype(np.float32)


def _family(model_type: str, title: str, classes: str, kind: _Kind) -> Family:
    computed: Mapping[str, Callable[[ModelConfig], npt.NDArray[np.float32]]] = {"head.bias": _no_bias}
    if kind.sinusoidal:
        computed = {
            **computed,
            **{f"{side}position_embedding": _sinusoids for side in ("", "encoder.")},
        }
    return Family(
        model_type=model_type,
        title=title,
        architectures=(f"{classes}ForConditionalGeneration", f"{classes}Model"),
        config_names={
            "hidden_size": "d_model",
            "embedding_size": "d_model",
            "n_positions": "max_position_embeddings",
            "encoder_positions": "max_position_embeddings",
            "n_layers": "encoder_layers",
            "n_heads": "encoder_attention_heads",
            "n_kv_heads": "encoder_attention_heads",
            "ffn_size": "encoder_ffn_dim",
        },
        read=partial(_read, kind=kind),
        write=_write,
        prefixes=("model.", ""),
        weights={
            "token_embedding": as_it_is("{prefix}shared.weight"),
            "head.weight": as_it_is("lm_head.weight"),
            "head.bias": one_row("final_logits_bias"),
            **_side("encoder", "encoder."),
            **_side("decoder", ""),
            **layer_norm("layers.{i}.cross_norm", f"{_CROSS}_layer_norm"),
            **linear("layers.{i}.cross_q", f"{_CROSS}.q_proj"),
            **projections("layers.{i}.cross_kv", f"{_CROSS}.", "kv"),
            **linear("layers.{i}.cross_out", f"{_CROSS}.out_proj"),
        },
        aliases={
            f"{prefix}shared.weight": f"{prefix}encoder.embed_tokens.weight" for prefix in ("model.", "")
        },
        buffers=r"(encoder|decoder)\.version",
        copies=r"(encoder|decoder)\.embed_tokens\.weight",
        computed=computed,
        unread=_UNREAD,
        has_encoder=True,
    )


BART = _family("bart", "BART", "Bart", _BART)
MBART = _family("mbart", "mBART", "MBart", _MBART)
PEGASUS = _family("pegasus", "Pegasus", "Pegasus", _PEGASUS)
