"""ModernBERT (Warner et al., 2024): norms before each part, rotary positions, and layers with a window.

A layer with a window sees as many tokens on each side, and has a rotary base of its own. The embedding has a
norm, so the first layer's attention has none. Of its heads only a classifier's of one label is read, which
ranks two texts (a cross-encoder).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orca_jax.errors import BadModelConfig
from orca_jax.families.attention_config import Attention
from orca_jax.families.config_fields import HF_ACTIVATIONS, ConfigFields
from orca_jax.families.decoders.llama_like import FULL, SLIDING, read_layer_kinds
from orca_jax.families.decoders.rope_fields import read_rotary, rope_parameters
from orca_jax.families.encoders.bert import read_classifies
from orca_jax.families.family import Family
from orca_jax.families.limits import even_head_size
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig, RankerHead, alike
from orca_jax.families.norm_config import Norm
from orca_jax.families.rotary import Rotary
from orca_jax.families.stored_name import as_it_is, fused_heads, layer_norm, linear
from orca_jax.families.strict_json import shown

# transformers' defaults of fields that a file may lack.
_PERIOD, _WINDOW, _GLOBAL_BASE, _LOCAL_BASE = 3, 128, 160_000.0, 10_000.0

_NAMES = {
    "hidden_size": "hidden_size",
    "embedding_size": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_attention_heads",
    "ffn_size": "intermediate_size",
    "window": "local_attention",
}
_OF_A_HEAD = "of a head, which is not read"
_UNREAD: Mapping[str, str] = {
    "classifier_activation": _OF_A_HEAD,  # here and in the next two where the model is no classifier
    "classifier_bias": _OF_A_HEAD,
    "classifier_pooling": _OF_A_HEAD,
    "decoder_bias": _OF_A_HEAD,
    "sparse_prediction": _OF_A_HEAD,
    "sparse_pred_ignore_index": _OF_A_HEAD,
    "layer_norm_eps": "transformers reads norm_eps",
    "position_embedding_type": "transformers does not read it",
    "deterministic_flash_attn": "another way to compute the same",
    "repad_logits_with_grad": "another way to compute the same",
}


def _read(fields: ConfigFields) -> ModelConfig:
    hidden_size, n_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    n_layers = fields.whole("num_hidden_layers")
    n_positions = fields.whole("max_position_embeddings", default=8192)
    head_size = even_head_size(hidden_size, n_heads)
    norm = Norm(eps=fields.number("norm_eps", 1e-5), bias=fields.flag("norm_bias", False))
    rotary = _read_rotaries(fields, head_size, n_positions)
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    full = Layer(
        attention=Attention(
            n_heads=n_heads,
            n_kv_heads=n_heads,
            head_size=head_size,
            rotary=rotary[FULL],
            qkv_bias=bias,
            out_bias=bias,
            causal=False,
        ),
        feed_forward=FeedForward(
            size=fields.whole("intermediate_size"),
            activation=fields.activation("hidden_activation", "gelu"),
            gated=True,
            bias=mlp_bias,
        ),
        norm=norm,
    )
    window = fields.whole("local_attention", default=_WINDOW) // 2 + 1  # so many to each side, and itself
    local = full.with_attention(rotary=rotary[SLIDING]).with_window(window)
    kinds = _read_kinds(fields, n_layers)
    layers = [local if kind == SLIDING else full for kind in kinds[: len(alike(full, n_layers))]]
    layers[0] = replace(layers[0], residual="bare")
    fields.flag("tie_word_embeddings", True)
    classifies = read_classifies(fields)
    return ModelConfig(
        vocab_size=fields.whole("vocab_size"),
        n_positions=n_positions + 1,  # one for the token that ends it
        hidden_size=hidden_size,
        layers=tuple(layers),
        embedding=Embedding(size=hidden_size, norm=norm),
        positions=None,
        final_norm=norm,
        ranker=classifies,
        ranker_head=_read_head(fields, norm) if classifies else RankerHead(),
    )


def _read_head(fields: ConfigFields, norm: Norm) -> RankerHead:
    return RankerHead(
        activation=fields.activation("classifier_activation", "gelu"),
        bias=fields.flag("classifier_bias", False),
        norm=norm,
        mean=fields.choice("classifier_pooling", {"cls": False, "mean": True}, "cls"),
    )


def _read_kinds(fields: ConfigFields, n_layers: int) -> list[str]:
    """Read `layer_types`, or make the first layer and each `global_attn_every_n_layers`-th after it FULL."""
    period = fields.whole("global_attn_every_n_layers", default=_PERIOD)
    if period < 1:
        raise BadModelConfig(
            f"{shown(fields.path)}: global_attn_every_n_layers: expected at least 1, found {shown(period)}"
        )
    found = read_layer_kinds(fields, n_layers)
    return list(found) if found else [SLIDING if i % period else FULL for i in range(n_layers)]


def _read_rotaries(fields: ConfigFields, head_size: int, n_positions: int) -> dict[str, Rotary]:
    """Read the rotary positions of each kind of layer, in the older spelling or the newer one."""
    nested = fields.section("rope_parameters")
    if nested is not None:
        missing = [kind for kind in (FULL, SLIDING) if nested.section(kind) is None]
        nested.leave_others({})
        if missing:
            raise BadModelConfig(f"{shown(fields.path)}: rope_parameters.{missing[0]}: expected an object")
    bases = {FULL: ("global_rope_theta", _GLOBAL_BASE), SLIDING: ("local_rope_theta", _LOCAL_BASE)}
    return {
        kind: read_rotary(
            fields,
            head_size=head_size,
            n_positions=n_positions,
            base_name=name,
            default_base=base,
            kind_of_layer=kind,
        )
        for kind, (name, base) in bases.items()
    }


def _write(model: ModelConfig) -> dict[str, Any] | None:
    first, norm = model.layers[0], model.embedding.norm
    if not model.is_bidirectional or norm is None or model.positions is not None:
        return None
    kinds = [SLIDING if each.scores.window else FULL for each in model.attentions]
    windows = [each.scores.window for each in model.attentions if each.scores.window]
    of_kind = {kind: each.rotary for kind, each in zip(kinds, model.attentions, strict=True)}
    head = model.ranker_head
    ranks = {
        "architectures": ["ModernBertForSequenceClassification"],
        "classifier_activation": None if head.activation == "tanh" else HF_ACTIVATIONS[head.activation],
        "classifier_bias": head.bias,
        "classifier_pooling": head.pooling,
        "id2label": {"0": "LABEL_0"},
    }
    return {
        **(ranks if model.ranker else {}),
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "intermediate_size": model.feed_forward.size,
        "hidden_activation": HF_ACTIVATIONS[model.feed_forward.activation],
        "max_position_embeddings": model.n_positions - 1,
        "norm_eps": norm.eps,
        "norm_bias": norm.bias,
        "attention_bias": model.attention.qkv_bias,
        "mlp_bias": first.feed_forward is not None and first.feed_forward.bias,
        "local_attention": 2 * (windows[0] - 1) if windows else _WINDOW,
        "layer_types": kinds,
        "rope_parameters": {
            kind: rope_parameters(of_kind.get(kind) or Rotary(size=model.head_size, base=base))[
                "rope_parameters"
            ]
            for kind, base in ((FULL, _GLOBAL_BASE), (SLIDING, _LOCAL_BASE))
        },
    }


_LAYER = "{prefix}layers.{i}."
MODERNBERT = Family(
    model_type="modernbert",
    title="ModernBERT",
    architectures=("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    config_names=_NAMES,
    read=_read,
    write=_write,
    prefixes=("model.", ""),
    weights={
        "token_embedding": as_it_is("{prefix}embeddings.tok_embeddings.weight"),
        **layer_norm("embedding_norm", "{prefix}embeddings.norm"),
        **linear("layers.{i}.qkv", f"{_LAYER}attn.Wqkv", fused_heads, fused_heads),
        **linear("layers.{i}.out", f"{_LAYER}attn.Wo"),
        **layer_norm("layers.{i}.attn_norm", f"{_LAYER}attn_norm"),
        **linear("layers.{i}.up", f"{_LAYER}mlp.Wi"),
        **linear("layers.{i}.down", f"{_LAYER}mlp.Wo"),
        **layer_norm("layers.{i}.mlp_norm", f"{_LAYER}mlp_norm"),
        **layer_norm("final_norm", "{prefix}final_norm"),
        **linear("ranker.dense", "head.dense"),
        **layer_norm("ranker.norm", "head.norm"),
        **linear("ranker.out", "classifier"),
        "head.weight": as_it_is("decoder.weight"),
    },
    parts=r"head\..*|decoder\..*",
    serves="the head of masked language modelling is not read",
    unread=_UNREAD,
)
