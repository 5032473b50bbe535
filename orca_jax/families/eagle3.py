"""EAGLE-3 (Li et al., 2025): a head of one layer, in a directory of its own, that drafts for another model.

Two kinds of directories are published. That of the paper's authors and of SGLang has a Llama's config.json
with `draft_vocab_size`, and calls its layer `midlayer`; `eagle_config` has the numbers of the served model's
layers whose outputs the head reads. That of vLLM's speculators has the layer's fields in
`transformer_layer_config`, calls the layer `layers.0`, and has the numbers of the layers whose inputs the
head reads. Without numbers the head reads the inputs of the served model's layers 2, n / 2 and n - 3. States
of lower layers come first.

`d2t` of token i that the head can draft is its distance from the token of the served model, whose number is
i + d2t[i]; `t2d` says the same again. A head without `embed_tokens` has the served model's embedding.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from orca_jax.errors import BadModelConfig, ConfigError, HeadMismatch, UnsupportedModel
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.family import Family
from orca_jax.families.hf_config import HFConfig, read_shape
from orca_jax.families.model_config import Embedding, ModelConfig, ReadStates
from orca_jax.families.parameters import HEAD, HEAD_OFFSETS, TOKEN_EMBEDDING
from orca_jax.families.registry import FAMILIES
from orca_jax.families.stored_name import StoredName, as_it_is, whole_numbers
from orca_jax.families.strict_json import read_object, shown

EMBEDDING = "embed_tokens.weight"

_MAX_CONFIG_BYTES = 1_000_000
_KINDS = ("llama", "qwen3")  # of the head's layer
_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
_LAYERS = ("midlayer.", "layers.0.")  # the names of the layer
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_OTHERS = {
    **dict.fromkeys(
        ("speculators_config", "speculators_model_type", "speculators_version", "target_vocab_size"),
        "about the head, not of it",
    ),
    **dict.fromkeys(("embed_requires_grad", "enable_sp_ulysses"), "of training"),
    "tie_word_embeddings": "the head has a matrix of its own",
    "max_window_layers": "of the served model's windows",
    "next_layer_regular": "of a head's further layers",
}
# Flags, as EAGLE-3 was published; a head with other values computes something else.
_PUBLISHED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "fc_norm": False,
}
_WORKS_WITH = "use a head that was trained for this model, or choose ngram, suffix or draft:MODEL"


def eagle3_head(directory: Path, served: ModelConfig, tensors: Collection[str] | None) -> HFConfig:
    """The head in a directory, with its names there, which drafts for the model `served`.

    `tensors` are the names in its files; None where only config.json is there. Raises HeadMismatch for a head
    of another model, BadModelConfig or UnsupportedModel for one that is not read.
    """
    _check_served(served)
    path = directory / "config.json"
    fields = ConfigFields(path, read_object(path, _MAX_CONFIG_BYTES, infinity=True))
    if fields.raw("quantization_config"):
        raise UnsupportedModel(
            f"{shown(path)}: quantization_config: a quantized EAGLE-3 head is not read yet"
        )
    section = fields.section("transformer_layer_config")
    layer_fields = fields if section is None else section
    family, model = _layer_model(fields, layer_fields)
    reads = _reads(fields, model, served, tensors)
    fields.leave_others({**family.unread, **_OTHERS})
    if section is not None:
        section.leave_others({**family.unread, **_OTHERS})
    try:
        head = ModelConfig(
            vocab_size=model.vocab_size,
            n_positions=model.n_positions,
            hidden_size=model.hidden_size,
            layers=(replace(model.layers[0], residual="joined"),),
            embedding=Embedding(size=model.hidden_size, tied=False),
            positions=None,
            final_norm=model.final_norm,
            eos_token_ids=served.eos_token_ids,
            vocab_multiple=served.vocab_multiple,
            reads=reads,
        )
    except ConfigError as error:
        raise BadModelConfig(f"{shown(path)}: {error}") from error
    return HFConfig(path, _named(family, head), head, fields.unread)


def _check_served(served: ModelConfig) -> None:
    if served.encoder is not None or served.is_bidirectional:
        raise HeadMismatch(
            "speculative is 'eagle3:DIRECTORY', which needs a decoder; choose ngram, suffix or draft:MODEL"
        )


def _layer_model(fields: ConfigFields, layer_fields: ConfigFields) -> tuple[Family, ModelConfig]:
    """The family of the head's layer, and a model of this layer."""
    architectures, kind = fields.texts("architectures") or (), layer_fields.text("model_type", "llama")
    layer_fields.texts("architectures")
    is_head = bool(set(architectures) & {*_ARCHITECTURES})
    # The first heads have the architecture of a whole Llama.
    is_head |= "LlamaForCausalLM" in architectures and fields.raw("draft_vocab_size") is not None
    if not is_head or kind not in _KINDS:
        raise UnsupportedModel(
            f"{shown(fields.path)}: expected an EAGLE-3 head, whose architectures are one of "
            f"{', '.join(_ARCHITECTURES)} and whose layer's model_type is {' or '.join(_KINDS)}, found "
            f"{shown(list(architectures))} and {shown(kind)}"
        )
    fields.raw("model_type")
    family = FAMILIES[kind]
    model = read_shape(family, layer_fields, family.config_names)
    if model.n_layers != 1:
        raise UnsupportedModel(
            f"{shown(fields.path)}: {layer_fields.full_name('num_hidden_layers')}: expected 1, found "
            f"{model.n_layers}; EAGLE-3 heads of several layers are not supported"
        )
    return family, model


def _reads(
    fields: ConfigFields,
    model: ModelConfig,
    served: ModelConfig,
    tensors: Collection[str] | None,
) -> ReadStates:
    """Read which states of `served` the head reads, and how many tokens it can draft.

    Raises HeadMismatch or UnsupportedModel.
    """
    options = fields.section("eagle_config") or ConfigFields(fields.path, {}, "eagle_config.")

    def flag(name: str) -> bool:
        return fields.flag(name, False) or options.flag(name, False)

    norms = {name: flag(name) for name in ("norm_before_residual", "norm_before_fc", "norm_output")}
    for name, value in _PUBLISHED.items():
        for section in (fields, options):
            section.must_be(name, value, "a head that computes something else than EAGLE-3 as published")
    n_drafted = fields.whole("draft_vocab_size", default=model.vocab_size)
    if not 1 <= n_drafted <= model.vocab_size:
        raise BadModelConfig(
            f"{shown(fields.path)}: draft_vocab_size: expected 1 to vocab_size, {model.vocab_size}, found "
            f"{n_drafted}"
        )
    shares = EMBEDDING not in (tensors or ())
    size = fields.whole("target_hidden_size", default=model.hidden_size)
    for what, own, theirs in (
        ("vocab_size", model.vocab_size, served.vocab_size),
        ("the hidden size of its model", size, served.hidden_size),
    ):
        if own != theirs:
            raise HeadMismatch(
                f"{shown(fields.path)} is of a head for another model: {what} is {own}, and the served "
                f"model's is {theirs}; {_WORKS_WITH}"
            )
    if shares and model.hidden_size != served.embedding.size:
        raise HeadMismatch(
            f"{shown(fields.path)}: hidden_size is {model.hidden_size}, that of the served model's embedding "
            f"{served.embedding.size}, and the head has no {EMBEDDING}; such a head needs its own embedding"
        )
    layers = _layers(fields, options, served.n_layers)
    options.leave_others(_OTHERS)
    return ReadStates(
        layers=layers,
        size=served.hidden_size,
        kind="eagle3",
        norm_first=norms["norm_before_residual"],
        norm_states=norms["norm_before_fc"],
        norm_output=norms["norm_output"],
        n_drafted=n_drafted,
        shares_embedding=shares,
    )


def _layers(fields: ConfigFields, options: ConfigFields, n_layers: int) -> tuple[int, ...]:
    """The layers of the served model whose inputs the head reads. Raises HeadMismatch."""
    found, section = fields.numbers(_LAYER_IDS), fields
    layers = tuple(map(int, found))
    if not found:
        found, section = options.numbers(_LAYER_IDS), options
        layers = tuple(int(each) + 1 for each in found)  # counted by their outputs
    if not found:
        layers = (2, n_layers // 2, n_layers - 3)
    layers = tuple(sorted(layers))
    if any(not 0 <= each < n_layers for each in layers) or len(layers) != 3 or len({*layers}) != 3:
        name = (
            f"{section.full_name(_LAYER_IDS)} is {shown(list(found))}" if found else f"without {_LAYER_IDS}"
        )
        raise HeadMismatch(
            f"{shown(fields.path)}: {name}, so the head reads the inputs of the served model's layers "
            f"{', '.join(map(str, layers))}; they must be three of its {n_layers} layers, counted from 0; "
            f"{_WORKS_WITH}"
        )
    return layers


def _named(family: Family, head: ModelConfig) -> Family:
    """The family with the names of a head's tensors: the layer has one of two names."""

    def named(stored: StoredName, layer: str) -> StoredName:
        names = (name.replace("{prefix}layers.{i}.", layer) for name in stored.names)
        return replace(stored, names=tuple(name.replace("{prefix}", "") for name in names))

    own = {
        **family.weights,
        "states.embedding_norm.scale": as_it_is("{prefix}layers.{i}.input_layernorm.weight"),
        "states.norm.scale": as_it_is("{prefix}layers.{i}.hidden_norm.weight"),
        "states.input_norm.scale": as_it_is("input_norm.weight"),
        "states.project": as_it_is("fc.weight"),
        "final_norm.scale": as_it_is("norm.weight"),
        TOKEN_EMBEDDING: as_it_is(EMBEDDING),
        HEAD: as_it_is("lm_head.weight"),
        HEAD_OFFSETS: whole_numbers("d2t"),
    }
    first, second = ({name: named(stored, layer) for name, stored in own.items()} for layer in _LAYERS)
    reads = head.reads
    assert reads is not None
    n_drafted = reads.n_drafted or head.vocab_size
    every = n_drafted == head.vocab_size  # without d2t the tokens are the served model's
    return replace(
        family,
        title="EAGLE-3",
        prefixes=("",),
        weights=first,
        alternatives=second,
        renamed=None,
        aliases={},
        copies="",
        computed={HEAD_OFFSETS: lambda _: np.zeros(n_drafted, np.float32)} if every else {},
        buffers=r"(midlayer|layers\.0)\.self_attn\.rotary_emb\.inv_freq",
        parts="t2d",
    )
