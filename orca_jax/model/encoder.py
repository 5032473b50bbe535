"""The encoder: what reads a model's input, all of it at once, and so not a token at a time (ORCA 5).

Its layers are those of a decoder with attention that is not causal. Between two of its layers nothing is
kept: their keys and values take turns in the slots of one layer's cache, those that the request holds for
its input.
"""

import jax
from flax import nnx

from orca_jax.families import model_config
from orca_jax.model.block import Block, Parameters, run_blocks, weights_of_layer
from orca_jax.model.context import Iteration
from orca_jax.model.kv_cache import LayerCache
from orca_jax.model.layers import norm_of


class Encoder(nnx.Module):
    """All layers of the encoder, from named parameters, and what is before and after them."""

    def __init__(self, config: model_config.Encoder, parameters: Parameters) -> None:
        self.config = config
        has_positions = config.positions is not None
        self.position_embedding = nnx.Param(parameters["position_embedding"]) if has_positions else None
        before, after = config.embedding_norm, config.final_norm
        self.embedding_norm = None if before is None else norm_of(before, parameters.get, "embedding_norm")
        self.layers = nnx.List(
            [Block(layer, weights_of_layer(parameters, i)) for i, layer in enumerate(config.layers)]
        )
        self.final_norm = None if after is None else norm_of(after, parameters.get, "final_norm")

    def begin(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """The tokens' embeddings [T, H] to what goes into the first layer; positions [T] int32."""
        if self.position_embedding is not None and self.config.positions is not None:
            place = positions + self.config.positions.offset
            x = x + self.position_embedding[...].at[place].get(mode="clip")
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def through(self, x: jax.Array, cache: LayerCache, iteration: Iteration) -> tuple[jax.Array, LayerCache]:
        """x [T, H] through all layers, which write to the iteration's slots of the one cache in turn."""
        run = run_blocks(iteration)
        for block in self.layers:
            x, cache, _ = run(block, False, x, cache, None)
        return (x if self.final_norm is None else self.final_norm(x)), cache
