"""A mixture of experts small enough for a CPU: eight experts, two per token."""

from orca_jax.families.attention_config import Attention
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.rotary import Rotary

_NORM = Norm(kind="rms_norm", eps=1e-5)
SMALL_MIXTURE = ModelConfig(
    vocab_size=32_000,
    n_positions=1024,
    hidden_size=768,
    layers=(
        Layer(
            attention=Attention(
                n_heads=12,
                n_kv_heads=12,
                head_size=64,
                qkv_bias=False,
                out_bias=False,
                rotary=Rotary(size=64),
            ),
            feed_forward=FeedForward(
                size=1024,
                activation="silu",
                gated=True,
                bias=False,
                experts=Experts(number=8, top_k=2, renormalised=True),
            ),
            norm=_NORM,
        ),
    )
    * 6,
    embedding=Embedding(size=768, tied=False),
    positions=None,
    final_norm=_NORM,
)
