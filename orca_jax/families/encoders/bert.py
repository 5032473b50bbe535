"""BERT (Devlin et al., 2019), RoBERTa and XLM-RoBERTa: LayerNorm after each sum, and biases everywhere.

RoBERTa and its multilingual form count positions from the padding token's id plus 1. An embedding is the
first token's final state, or the mean over all. Of what a checkpoint has after the layers only a classifier
of one label is read, which ranks two texts (a cross-encoder): the other models' pooler is for training.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from orca_jax.errors import UnsupportedModel
from orca_jax.families.attention_config import Attention
from orca_jax.families.config_fields import HF_ACTIVATIONS, ConfigFields
from orca_jax.families.family import Family
from orca_jax.families.limits import even_head_size
from orca_jax.families.model_config import (
    Embedding,
    FeedForward,
    Layer,
    LearnedPositions,
    ModelConfig,
    alike,
)
from orca_jax.families.norm_config import Norm
from orca_jax.families.stored_name import as_it_is, layer_norm, linear, separate_heads
from orca_jax.families.strict_json import shown

_NAMES = {
    "hidden_size": "hidden_size",
    "embedding_size": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_attention_heads",
    "ffn_size": "intermediate_size",
    "norm_eps": "layer_norm_eps",
}
_RANKER = "ForSequenceClassification"
_UNREAD: Mapping[str, str] = {
    "classifier_activation": "of a classifier's head, which is not read",
    "embedding_size": "its presence alone, in transformers: heads need not divide the hidden size evenly",
}


def _read(fields: ConfigFields, *, from_padding: bool) -> ModelConfig:
    hidden_size, n_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    fields.must_be("add_cross_attention", False, "cross attention")
    kind = fields.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise UnsupportedModel(
            f"{shown(fields.path)}: position_embedding_type: expected absolute, found {shown(kind)}"
        )
    offset = fields.whole("pad_token_id", default=1) + 1 if from_padding else 0
    norm = Norm(eps=fields.number("layer_norm_eps", 1e-5 if from_padding else 1e-12))
    layer = Layer(
        attention=Attention(
            n_heads=n_heads,
            n_kv_heads=n_heads,
            head_size=even_head_size(hidden_size, n_heads),
            causal=False,
        ),
        feed_forward=FeedForward(
            size=fields.whole("intermediate_size"), activation=fields.activation("hidden_act", "gelu")
        ),
        norm=norm,
        residual="post",
    )
    classifies = read_classifies(fields)
    fields.flag("is_decoder", False)
    fields.flag("tie_word_embeddings", True)
    return ModelConfig(
        vocab_size=fields.whole("vocab_size"),
        n_positions=fields.whole("max_position_embeddings") - offset + 1,  # one for the token that ends it
        hidden_size=hidden_size,
        layers=alike(layer, fields.whole("num_hidden_layers")),
        embedding=Embedding(size=hidden_size, norm=norm, n_segments=fields.whole("type_vocab_size")),
        positions=LearnedPositions(offset=offset),
        final_norm=None,
        ranker=classifies,
    )


def read_classifies(fields: ConfigFields) -> bool:
    """Whether the model is a classifier of one label. Raises UnsupportedModel for more labels."""
    if not any(name.endswith(_RANKER) for name in fields.texts("architectures") or ()):
        return False
    n_labels = fields.n_labels()
    if n_labels != 1:
        raise UnsupportedModel(
            f"{shown(fields.path)}: id2label has {n_labels} labels; only a classifier of one label, "
            "which ranks pairs of texts, is supported"
        )
    return True


def _write(model: ModelConfig, *, classes: str, from_padding: bool) -> dict[str, Any] | None:
    if not model.is_bidirectional or model.positions is None or model.embedding.norm is None:
        return None
    offset = model.positions.offset
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "intermediate_size": model.feed_forward.size,
        "hidden_act": HF_ACTIVATIONS[model.feed_forward.activation],
        "max_position_embeddings": model.n_positions - 1 + offset,
        "type_vocab_size": model.embedding.n_segments,
        "layer_norm_eps": model.embedding.norm.eps,
        **({"pad_token_id": offset - 1} if from_padding else {}),
        **({"architectures": [f"{classes}{_RANKER}"], "id2label": {"0": "LABEL_0"}} if model.ranker else {}),
    }


_LAYER = "{prefix}encoder.layer.{i}."
_SELF = f"{_LAYER}attention.self."


def _family(model_type: str, title: str, classes: str, prefix: str, *, from_padding: bool) -> Family:
    return Family(
        model_type=model_type,
        title=title,
        architectures=tuple(f"{classes}{end}" for end in ("Model", "ForMaskedLM", "ForPreTraining", _RANKER)),
        config_names=_NAMES,
        read=partial(_read, from_padding=from_padding),
        write=partial(_write, classes=classes, from_padding=from_padding),
        prefixes=(prefix, ""),
        weights={
            "token_embedding": as_it_is("{prefix}embeddings.word_embeddings.weight"),
            "position_embedding": as_it_is("{prefix}embeddings.position_embeddings.weight"),
            "segment_embedding": as_it_is("{prefix}embeddings.token_type_embeddings.weight"),
            **layer_norm("embedding_norm", "{prefix}embeddings.LayerNorm"),
            **{
                f"layers.{{i}}.qkv.{leaf}": separate_heads(
                    *(f"{_SELF}{part}.{leaf}" for part in ("query", "key", "value"))
                )
                for leaf in ("weight", "bias")
            },
            **linear("layers.{i}.out", f"{_LAYER}attention.output.dense"),
            **layer_norm("layers.{i}.attn_norm", f"{_LAYER}attention.output.LayerNorm"),
            **linear("layers.{i}.up", f"{_LAYER}intermediate.dense"),
            **linear("layers.{i}.down", f"{_LAYER}output.dense"),
            **layer_norm("layers.{i}.mlp_norm", f"{_LAYER}output.LayerNorm"),
            **linear("ranker.dense", "classifier.dense" if from_padding else "{prefix}pooler.dense"),
            **linear("ranker.out", "classifier.out_proj" if from_padding else "classifier"),
            "head.weight": as_it_is(
                "lm_head.decoder.weight" if from_padding else "cls.predictions.decoder.weight"
            ),
        },
        aliases={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
        buffers=r"embeddings\.(position_ids|token_type_ids)",
        parts=rf"({re.escape(prefix)})?pooler\..*|cls\..*|lm_head\..*",
        serves="heads of training tasks, and a pooler that ranks nothing, are not read",
        unread=_UNREAD,
    )


BERT = _family("bert", "BERT", "Bert", "bert.", from_padding=False)
ROBERTA = _family("roberta", "RoBERTa", "Roberta", "roberta.", from_padding=True)
XLM_ROBERTA = _family("xlm-roberta", "XLM-RoBERTa", "XLMRoberta", "roberta.", from_padding=True)
