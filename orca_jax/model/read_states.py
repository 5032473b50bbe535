"""The input of a head: a token's embedding, and the states of the token before it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from orca_jax.families.model_config import ModelConfig, ReadStates
from orca_jax.model.block import Parameters
from orca_jax.model.layers import Linear, Matmul, norm_of


class StatesBefore(NamedTuple):
    """The states before a head's tokens: the served model's, or the head's own output where it drafted."""

    served: jax.Array  # [T, s]
    own: jax.Array  # [T, H] the head's newest output in each token's row
    drafted: jax.Array  # [T] bool: the head goes on from its own output


class HeadInputs(NamedTuple):
    """The input of the head's layer, and what attention takes in its place, if that is another array."""

    x: jax.Array  # [T, H]
    of_attention: jax.Array | None = None  # [T, 2 H]


class StateReader(nnx.Module):
    """Joins embeddings and states to the input of the head's layer (`ReadStates` has the formulas)."""

    def __init__(self, config: ModelConfig, reads: ReadStates, parameters: Parameters) -> None:
        self.reads = reads
        norm, get = config.layers[0].norm, parameters.get
        self.embedding_norm = norm_of(norm, get, "states.embedding_norm")
        self.norm = norm_of(norm, get, "states.norm")
        self.input_norm = norm_of(norm, get, "states.input_norm") if reads.norm_states else None
        self.project = Linear(parameters["states.project"], None)

    def __call__(self, embedded: jax.Array, before: StatesBefore, product: Matmul) -> HeadInputs:
        """Join embeddings [T, H] with the states before their tokens."""
        embedded, drafted = self.embedding_norm(embedded), before.drafted[:, None]
        if self.reads.kind == "next_token":
            states = jnp.where(drafted, before.own, before.served)
            return HeadInputs(self.project(jnp.concatenate([embedded, self.norm(states)], axis=1), product))
        served = before.served if self.input_norm is None else self.input_norm(before.served)
        states = jnp.where(drafted, before.own, self.project(served, product))
        normed = self.norm(states)
        x = normed if self.reads.norm_first else states
        return HeadInputs(x, jnp.concatenate([embedded, normed], axis=1))
