"""A model family: how its config.json is read and written, and what its checkpoints call our weights."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.further_layer import FurtherLayer
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import in_layers, layers_with
from orca_jax.families.stored_name import StoredName


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A family as a table; `title` is its usual name.

    `read` makes a ModelConfig of a config.json. It raises BadModelConfig, UnsupportedModel, or a
    ModelConfig's ConfigError, whose words `config_names` translates into those of config.json. `write` is the
    reverse; what it returns is used only where `read` makes the same model of it, and None means that it
    cannot.

    `unread` has fields that change nothing although their names suggest it, each with the reason.
    `has_encoder` is config.json's `is_encoder_decoder`. `quantized` has each `quant_method` of
    `quantization_config` that is read here; quantization_config.py reads others for all families.

    `weights` has the stored name of each of our weights. "{i}" in a name is the layer's number, and
    "{prefix}" one of `prefixes`: a whole model is saved with the first, a bare decoder perhaps with another.
    `renamed` has the entries that differ in some models. `alternatives` has other ways in which a weight may
    be stored, read where the checkpoint has the first tensor of them. `aliases` has names, or parts of
    names, that other versions of transformers give to tensors.

    Patterns name tensors that are not weights, without the prefix: `buffers`, and `copies` of the token
    embedding. `computed` has weights that a checkpoint may lack, because they follow from the model, as
    float32. `further` has the names of a layer that predicts a further token and is read apart
    (next_token.py). `parts` is a pattern of the tensors of parts that are not served, such as a
    vision tower; `serves` says in a few words what is served of such a model.
    """

    model_type: str
    title: str
    architectures: tuple[str, ...]
    config_names: Mapping[str, str]
    read: Callable[[ConfigFields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any] | None]
    prefixes: tuple[str, ...]
    weights: Mapping[str, StoredName]
    renamed: Callable[[ModelConfig], Mapping[str, StoredName]] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    alternatives: Mapping[str, StoredName] = field(default_factory=dict[str, StoredName])
    buffers: str = ""
    copies: str = ""
    computed: Mapping[str, Callable[[ModelConfig], npt.NDArray[np.float32]]] = field(
        default_factory=dict[str, Callable[[ModelConfig], npt.NDArray[np.float32]]]
    )
    unread: Mapping[str, str] = field(default_factory=dict[str, str])
    further: FurtherLayer | None = None
    has_encoder: bool = False
    quantized: tuple[str, ...] = ()
    parts: str = ""
    serves: str = ""

    def stored_name(
        self, parameter: str, prefix: str, model: ModelConfig, tensors: Collection[str] = ()
    ) -> StoredName:
        """The form in which a checkpoint with these `tensors` stores a weight of `model`."""
        name, layer = in_layers(parameter)
        renamed = {} if self.renamed is None else self.renamed(model)
        stored = renamed.get(name, self.weights[name]).in_layer(layer, prefix)
        other = self.alternatives[name].in_layer(layer, prefix) if name in self.alternatives else stored
        if other.names[0] in tensors:
            stored = other
        in_layer = layers_with(model, name)[int(layer or 0)]
        stored = stored.for_experts(in_layer.experts.number if in_layer.experts else 0)
        stored = stored.for_attention(in_layer.attention)
        return replace(stored, names=tuple(self._name_in(tensors, name) for name in stored.names))

    def _name_in(self, tensors: Collection[str], name: str) -> str:
        """The tensor's name or its alias, whichever is among `tensors`; the name if neither is."""
        every = (name, *(name.replace(part, alias) for part, alias in self.aliases.items()))
        return next((each for each in every if each in tensors), name)

    def is_buffer(self, tensor: str, prefix: str) -> bool:
        """Whether a tensor is known not to be a weight."""
        return re.fullmatch(self.buffers, tensor.removeprefix(prefix)) is not None

    def may_be_unlisted(self, tensor: str) -> bool:
        """Whether a file may have this tensor although the index does not list it, since nothing reads it."""
        return self.is_of_other_part(tensor) or any(
            self.is_buffer(tensor, prefix) for prefix in self.prefixes if tensor.startswith(prefix)
        )

    def is_of_other_part(self, tensor: str) -> bool:
        """Whether a tensor belongs to a part of the model that is not served, such as a vision tower."""
        return re.fullmatch(self.parts, tensor) is not None

    def is_copy(self, tensor: str, prefix: str) -> bool:
        """Whether a tensor must equal the token embedding."""
        return re.fullmatch(self.copies, tensor.removeprefix(prefix)) is not None

    def is_further(self, tensor: str, prefix: str, tensors: Collection[str], n_layers: int) -> bool:
        """Whether a tensor belongs to a layer after the last, which predicts a further token."""
        number = re.match(r"layers\.(\d{1,9})\.", tensor.removeprefix(prefix))
        further = self.further
        if further is None or not further.is_numbered or number is None or int(number[1]) < n_layers:
            return False
        return further.project.replace("{prefix}", prefix).replace("{n}", number[1]) in tensors

    def layer_of(self, tensor: str, prefix: str) -> tuple[str, int] | None:
        """One of our weights whose tensors have such names, and the number of the layer; None if none has."""
        for weight, stored in self.weights.items():
            for name in stored.names:
                before, i, _ = name.removeprefix("{prefix}").partition("{i}")
                number = re.match(re.escape(before) + r"(\d{1,9})\.", tensor.removeprefix(prefix))
                if i and number:
                    return weight, int(number[1])
        return None
