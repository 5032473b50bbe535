"""What a model family is: how its config.json reads, and what its checkpoints call our weights."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import in_layers, layers_with
from orca_jax.families.stored_name import StoredName


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A table. `title` is what people call the family, `model_type` what config.json calls it.

    `read` makes a ModelConfig of config.json. It raises BadModelConfig or UnsupportedModel, or passes on the
    ModelConfig's ConfigError, whose words `config_names` translates into those of config.json. `write` is the
    reverse: the fields of a config.json that `read` reads as this model, or None where there is none.

    What `write` gives is used only where `read` makes the same model of it. `unread` has fields that `read`
    does not take and that change nothing, whatever their names suggest, each with the reason
    (unread_fields.py decides about all others).

    `weights` has an entry for each of our weights, "{i}" for the number of a layer, and in the family's names
    "{prefix}" for one of `prefixes`: a whole model is saved with the first, the bare decoder perhaps with
    another. `renamed` has the entries that differ for some models. `aliases` has for a tensor's name the name
    that other versions of transformers give it, which is read too; `alternatives` has for a weight the
    tensors in which others store it, which are read where the checkpoint has the first of them. `buffers` is
    a pattern of tensors that are not weights, without their prefix; `copies` one of tensors that are the
    token embedding once more.
    `computed` has for weights that a checkpoint may lack what they then are, as float32 of our shape.

    `further`: what a layer after the last has that no other has, if such layers predict further tokens. Their
    tensors are not read.

    `has_encoder`: config.json sets `is_encoder_decoder`.

    `quantized`: each `quant_method` of config.json's `quantization_config` that is read.

    `parts`: a pattern of the tensors of other parts than the one that is served, such as a vision tower. They
    are not read. `serves` says in a few words what is served of such a model.
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
    further: str = ""
    has_encoder: bool = False
    quantized: tuple[str, ...] = ()
    parts: str = ""
    serves: str = ""

    def stored_name(
        self, parameter: str, prefix: str, model: ModelConfig, tensors: Collection[str] = ()
    ) -> StoredName:
        """The tensors that make up a weight of `model`, by their aliases where `tensors` has only those."""
        name, layer = in_layers(parameter)
        renamed = {} if self.renamed is None else self.renamed(model)
        stored = renamed.get(name, self.weights[name]).in_layer(layer, prefix)
        other = self.alternatives[name].in_layer(layer, prefix) if name in self.alternatives else stored
        if other.names[0] in tensors:
            stored = other
        experts = layers_with(model, name)[int(layer or 0)].feed_forward.experts
        stored = stored.for_experts(experts.number if experts else 0)
        names = (
            self.aliases[name] if name not in tensors and self.aliases.get(name) in tensors else name
            for name in stored.names
        )
        return replace(stored, names=tuple(names))

    def is_buffer(self, tensor: str, prefix: str) -> bool:
        """Whether a tensor is known not to be a weight."""
        return re.fullmatch(self.buffers, tensor.removeprefix(prefix)) is not None

    def may_be_unlisted(self, tensor: str) -> bool:
        """Whether a file may have this tensor though the index does not list it: nothing reads it."""
        return self.is_of_other_part(tensor) or any(
            self.is_buffer(tensor, prefix) for prefix in self.prefixes if tensor.startswith(prefix)
        )

    def is_of_other_part(self, tensor: str) -> bool:
        """Whether a tensor belongs to a part of the model that is not served, such as a vision tower."""
        return re.fullmatch(self.parts, tensor) is not None

    def is_copy(self, tensor: str, prefix: str) -> bool:
        """Whether a tensor must be the token embedding once more."""
        return re.fullmatch(self.copies, tensor.removeprefix(prefix)) is not None

    def is_further(self, tensor: str, prefix: str, tensors: Collection[str], n_layers: int) -> bool:
        """Whether a tensor is of a layer, after the `n_layers`, that predicts a further token."""
        number = re.match(r"layers\.(\d{1,9})\.", tensor.removeprefix(prefix))
        if not self.further or number is None or int(number[1]) < n_layers:
            return False
        return f"{prefix}{number[0]}{self.further}" in tensors

    def layer_of(self, tensor: str, prefix: str) -> tuple[str, int] | None:
        """One of our weights that has such a tensor, and the layer it belongs to by its name, if any."""
        for weight, stored in self.weights.items():
            for name in stored.names:
                before, i, _ = name.removeprefix("{prefix}").partition("{i}")
                number = re.match(re.escape(before) + r"(\d{1,9})\.", tensor.removeprefix(prefix))
                if i and number:
                    return weight, int(number[1])
        return None
