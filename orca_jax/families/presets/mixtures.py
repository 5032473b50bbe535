"""Published mixtures of experts."""

from dataclasses import replace

from orca_jax.families.attention_config import Scores
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.presets.dense import mistral_7b, with_layers
from orca_jax.families.rotary import Rotary


def with_experts(model: ModelConfig, *, number: int, top_k: int) -> ModelConfig:
    """The model with such experts, of its feed-forward size, in every layer."""
    layer = model.layers[0]
    experts = Experts(number=number, top_k=top_k, renormalised=True)
    return with_layers(model, replace(layer, feed_forward=replace(layer.feed_forward, experts=experts)))


def mixtral_8x7b() -> ModelConfig:
    """Mixtral 8x7B: Mistral without a window, with eight experts."""
    model = mistral_7b()
    layer = model.layers[0]
    attention = replace(layer.attention, scores=Scores(), rotary=Rotary(size=128, base=1e6))
    return with_experts(with_layers(model, replace(layer, attention=attention)), number=8, top_k=2)
