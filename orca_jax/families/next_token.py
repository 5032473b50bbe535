"""A checkpoint's layer after the last one, which predicts a further token (multi-token prediction).

As DeepSeek-V3 publishes it, layer n of a model of n layers is a layer like the last, whose input joins a
token's embedding (`enorm`) with the model's final hidden state of the token before it (`hnorm`) by `eh_proj`;
`shared_head` has a norm and the head. GLM-4.5 has the same. Here it is a model of one layer: its `reads` says
what it needs of the other.
"""

from dataclasses import replace
from pathlib import Path

from orca_jax.errors import ConfigError
from orca_jax.families.hf_config import HFConfig, read_hf_config
from orca_jax.families.model_config import ModelConfig, ReadStates
from orca_jax.families.parameters import HEAD, TOKEN_EMBEDDING
from orca_jax.families.quantization_config import quantized_forms
from orca_jax.families.stored_name import StoredName, as_it_is
from orca_jax.families.strict_json import shown

_ALL = r".*"


def next_token_model(model: ModelConfig) -> ModelConfig:
    """The head of one layer that predicts the tokens after those of `model`, with dense weights.

    Raises ConfigError for a model that can have none.
    """
    if model.has_state or model.encoder is not None or model.is_bidirectional or model.positions is not None:
        raise ConfigError(
            "speculative is 'mtp', which needs a decoder without recurrent layers and with rotary positions; "
            "choose ngram, suffix or draft:MODEL"
        )
    if model.selected_size:
        raise ConfigError(
            "speculative is 'mtp', and the model's last layer takes the keys that an earlier layer selects, "
            "which a head of one layer lacks; choose ngram, suffix or draft:MODEL"
        )
    return replace(
        model,
        layers=(replace(model.layers[-1], forms=()),),
        embedding=replace(model.embedding, tied=False),
        forms=(),
        reads=ReadStates(layers=(model.n_layers,), size=model.hidden_size),
    )


def next_token_head(directory: Path) -> HFConfig:
    """The head of one layer in a checkpoint, by its names there.

    Raises ConfigError if there can be none, or as `read_hf_config`.
    """
    config = read_hf_config(directory)
    family, n_layers = config.family, config.model.n_layers
    if not family.further:
        raise ConfigError(
            f"speculative is 'mtp', and {shown(config.path)} is a {family.title} model, whose layers that "
            "predict further tokens are not read; choose ngram, suffix or draft:MODEL"
        )
    here = f"{{prefix}}layers.{n_layers}."

    def named(stored: StoredName) -> StoredName:
        return replace(stored, names=tuple(_in_layer(name, here) for name in stored.names))

    renamed = family.renamed
    own = {
        "states.embedding_norm.scale": as_it_is(f"{here}enorm.weight"),
        "states.norm.scale": as_it_is(f"{here}hnorm.weight"),
        "states.project": as_it_is(f"{here}eh_proj.weight"),
        "final_norm.scale": as_it_is(f"{here}shared_head.norm.weight"),
    }
    # The paper's layer shares the embedding and the head; published checkpoints have copies in the layer.
    copies = {
        TOKEN_EMBEDDING: as_it_is(f"{here}embed_tokens.weight"),
        HEAD: as_it_is(f"{here}shared_head.head.weight"),
    }
    head = replace(
        family,
        weights={name: named(stored) for name, stored in family.weights.items()} | own,
        alternatives={name: named(stored) for name, stored in family.alternatives.items()} | copies,
        renamed=None
        if renamed is None
        else lambda model: {name: named(stored) for name, stored in renamed(model).items()},
        parts=_ALL,  # the other layers are the served model's
    )
    model = next_token_model(config.model)
    if config.quantization is not None:
        model = model.with_forms(quantized_forms(model, head, config.quantization))
    return replace(config, family=head, model=model)


def _in_layer(name: str, here: str) -> str:
    return name.replace("{prefix}layers.{i}.", here)
