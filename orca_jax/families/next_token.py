"""A checkpoint's layer after the last one, which predicts a further token (multi-token prediction).

As DeepSeek-V3 publishes it, layer n of a model of n layers is a layer like the last, whose input joins a
token's embedding (`enorm`) with the model's final hidden state of the token before it (`hnorm`) by `eh_proj`;
`shared_head` has a norm and the head. GLM-4.5 has the same. A hybrid's layer, `mtp`, attends, whatever the
model's last layer does, and shares embedding and head. Here it is a model of one layer, or of two where a
layer is one part alone (Nemotron 3): its `reads` says what it needs of the other. A family's `further` has
the names.
"""

from dataclasses import replace
from pathlib import Path

from orca_jax.errors import ConfigError
from orca_jax.families.further_layer import AFTER_LAST, MTP, FurtherLayer
from orca_jax.families.hf_config import HFConfig, read_hf_config
from orca_jax.families.model_config import Layer, ModelConfig, ReadStates
from orca_jax.families.parameters import HEAD, TOKEN_EMBEDDING
from orca_jax.families.quantization_config import quantized_forms
from orca_jax.families.stored_name import StoredName, as_it_is
from orca_jax.families.strict_json import shown

_ALL, _LAYER = r".*", "{prefix}layers.{i}."


def next_token_model(model: ModelConfig, further: FurtherLayer | None = None) -> ModelConfig:
    """The head that predicts the tokens after those of `model`, with dense weights.

    Without `further` it is of the form that most such models publish. Raises ConfigError for a model that can
    have no head.
    """
    layers = _layers(model)
    positions = model.positions is not None
    if model.encoder is not None or model.is_bidirectional or positions or not layers:
        raise ConfigError(
            "speculative is 'mtp', which needs a decoder with rotary positions, or a hybrid with layers that "
            "attend alone; choose ngram, suffix or draft:MODEL"
        )
    if model.selected_size:
        raise ConfigError(
            "speculative is 'mtp', and the model's last layer takes the keys that an earlier layer selects, "
            "which a head of one layer lacks; choose ngram, suffix or draft:MODEL"
        )
    if further is None:
        further = MTP if model.has_state else AFTER_LAST
    shares_head = not further.head and not model.embedding.tied
    return replace(
        model,
        layers=layers,
        embedding=replace(model.embedding, tied=not further.head and model.embedding.tied),
        forms=(),
        reads=ReadStates(
            layers=(model.n_layers,),
            size=model.hidden_size,
            norm_output=further.goes_on_normed,
            shares_embedding=not further.embedding,
            shares_head=shares_head,
        ),
    )


def _layers(model: ModelConfig) -> tuple[Layer, ...]:
    """The layers of a head: like the model's last that attends, and whole. Empty if there is none."""
    attending = [each for each in model.layers if each.attention is not None and each.recurrence is None]
    if not attending or attending[-1].feed_forward is not None:
        return tuple(replace(each, forms=()) for each in attending[-1:])
    fed = [each for each in model.layers if not each.mixes]
    return tuple(replace(each, forms=()) for each in (attending[-1], *fed[-1:]))


def next_token_head(directory: Path) -> HFConfig:
    """The head in a checkpoint, by its names there.

    Raises ConfigError if there can be none, or as `read_hf_config`.
    """
    config = read_hf_config(directory)
    family, further = config.family, config.family.further
    if further is None:
        raise ConfigError(
            f"speculative is 'mtp', and {shown(config.path)} is a {family.title} model, whose layers that "
            "predict further tokens are not read; choose ngram, suffix or draft:MODEL"
        )
    number = str(config.model.n_layers)

    def own(name: str) -> StoredName:
        return as_it_is(name.replace("{n}", number))

    def named(stored: StoredName) -> StoredName:
        layer = further.layer.replace("{n}", number)
        return replace(stored, names=tuple(name.replace(_LAYER, layer) for name in stored.names))

    renamed = family.renamed
    added = {
        "states.embedding_norm.scale": own(further.embedding_norm),
        "states.norm.scale": own(further.state_norm),
        "states.project": own(further.project),
        "final_norm.scale": own(further.final_norm),
    }
    copies = {TOKEN_EMBEDDING: further.embedding, HEAD: further.head}
    head = replace(
        family,
        weights={name: named(stored) for name, stored in family.weights.items()} | added,
        alternatives={name: named(stored) for name, stored in family.alternatives.items()}
        | {name: own(copy) for name, copy in copies.items() if copy},
        renamed=None
        if renamed is None
        else lambda model: {name: named(stored) for name, stored in renamed(model).items()},
        # The other tensors are the served model's, or of a second layer.
        parts=rf"(?!{further.tensors}).*" if further.tensors else _ALL,
    )
    model = next_token_model(config.model, further)
    if config.quantization is not None:
        model = model.with_forms(quantized_forms(model, head, config.quantization))
    return replace(config, family=head, model=model)
