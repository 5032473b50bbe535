"""The harness's model with a mixture of experts; the simulated engine's experts are a token's index."""

from dataclasses import replace

from orca_jax.families.mixtures.experts_config import Experts
from tests.host.engines import MODEL

_LAYER = MODEL.layers[0]
SPARSE = replace(
    MODEL,
    layers=(_LAYER.with_feed_forward(gated=True, experts=Experts(number=256, top_k=1)),),
)
