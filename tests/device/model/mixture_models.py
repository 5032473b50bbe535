"""Small mixtures of experts for tests of the engine."""

import numpy as np

from orca_jax.config import ServingConfig
from orca_jax.families.attention_config import Attention
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.rotary import Rotary
from orca_jax.request.request import Request
from tests.device.harness import greedy_request

VOCAB = 53
SERVING = ServingConfig(max_batch_size=4, n_slots=4 * 48, max_batch_tokens=48)


def mixture_model(
    *,
    hidden: int,
    size: int,
    top_k: int,
    number: int = 8,
    shared: int | None = None,
    n_layers: int = 2,
    bias: bool = True,
) -> ModelConfig:
    """A model whose layers have `number` experts, by default with biases, and eight heads of size 4."""
    norm = Norm(kind="rms_norm", eps=1e-5)
    attention = Attention(n_heads=8, n_kv_heads=4, head_size=4, rotary=Rotary(size=4, base=500.0))
    experts = Experts(
        number=number,
        top_k=top_k,
        renormalised=True,
        router_bias=True,
        shared_size=shared,
        shared_gate=shared is not None,
    )
    layer = Layer(
        attention=attention,
        feed_forward=FeedForward(size=size, activation="silu", gated=True, bias=bias, experts=experts),
        norm=norm,
    )
    return ModelConfig(
        vocab_size=VOCAB,
        n_positions=40,
        hidden_size=hidden,
        layers=(layer,) * n_layers,
        embedding=Embedding(size=hidden, tied=False),
        positions=None,
        final_norm=norm,
    )


def requests() -> list[Request]:
    """Six requests of 1 to 30 tokens."""
    rng = np.random.default_rng(1)
    lengths = [1, 30, 5, 12, 22, 3]
    return [greedy_request(str(i), rng.integers(0, VOCAB, n).tolist(), 7) for i, n in enumerate(lengths)]
