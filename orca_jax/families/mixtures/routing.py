"""The size of what a model's routers choose, as it is told to those who replay it in training."""

from typing import NamedTuple

import numpy as np

from orca_jax.families.model_config import ModelConfig


class Routing(NamedTuple):
    """A token chooses `top_k` of `n_experts` experts in each of `n_layers` sparse layers."""

    n_layers: int
    top_k: int
    n_experts: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The smallest that holds an expert's id."""
        return np.dtype("<u1" if self.n_experts <= 1 << 8 else "<u2")

    @property
    def token_bytes(self) -> int:
        """Of one token's ids."""
        return self.n_layers * self.top_k * self.dtype.itemsize


NO_ROUTING = Routing(0, 0, 0)


def routing_of(model: ModelConfig) -> Routing:
    """Of all decoder layers; without layers if there are no experts, or layers choose different numbers."""
    sparse = [layer.feed_forward.experts for layer in model.layers if layer.feed_forward.experts is not None]
    kinds = {(experts.top_k, experts.number) for experts in sparse}
    return Routing(len(sparse), *kinds.pop()) if len(kinds) == 1 else NO_ROUTING
