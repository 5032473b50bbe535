"""Small models with latent attention."""

from typing import Any

from orca_jax.families.attention_config import Latent, latent_attention
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.rotary import Rotary
from tests.device.model.any_model import N_POSITIONS, VOCABULARY

NORM = Norm(kind="rms_norm", eps=1e-5)
SIGMOID = Experts(
    number=6, top_k=2, scores="sigmoid", renormalised=True, correction_bias=True, n_groups=3, top_groups=2,
    multiplier=2.5, shared_size=8,
)  # fmt: skip


def latent_model(
    latent: Latent, n_heads: int, feed_forwards: list[FeedForward], rotary: Rotary | None = None, **other: Any
) -> ModelConfig:
    """A model with a layer for each of `feed_forwards`."""
    own = latent_attention(latent, n_heads=n_heads, rotary=rotary or Rotary(size=latent.rotary_size), **other)
    return ModelConfig(
        vocab_size=VOCABULARY,
        n_positions=N_POSITIONS,
        hidden_size=20,
        layers=tuple(Layer(attention=own, feed_forward=each, norm=NORM) for each in feed_forwards),
        embedding=Embedding(size=20, tied=False),
        positions=None,
        final_norm=NORM,
    )


def dense(size: int = 16, experts: Experts | None = None) -> FeedForward:
    return FeedForward(size=size, activation="silu", gated=True, bias=False, experts=experts)
