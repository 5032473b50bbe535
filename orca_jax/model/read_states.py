"""The input of a head: a token's embedding, and the served model's states of the token before it."""

import jax
import jax.numpy as jnp
from flax import nnx

from orca_jax.families.model_config import ModelConfig, ReadStates
from orca_jax.model.block import Parameters
from orca_jax.model.layers import Linear, Matmul, norm_of


class StateReader(nnx.Module):
    """Joins embeddings and states to the input of the head's layer (DeepSeek-V3, equation 21).

    `project` [norm(embedding); norm(states)], where states [T, s] are the served model's, or the head's own
    output where it has drafted the token before.
    """

    def __init__(self, config: ModelConfig, reads: ReadStates, parameters: Parameters) -> None:
        self.reads = reads
        norm = config.layers[0].norm
        self.embedding_norm = norm_of(norm, parameters.get, "states.embedding_norm")
        self.norm = norm_of(norm, parameters.get, "states.norm")
        self.project = Linear(parameters["states.project"], None)

    def __call__(self, embedded: jax.Array, states: jax.Array, product: Matmul) -> jax.Array:
        """Embeddings [T, H] and states [T, s] to [T, H]."""
        both = jnp.concatenate([self.embedding_norm(embedded), self.norm(states)], axis=1)
        return self.project(both, product)
