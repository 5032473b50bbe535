"""The encoder, which reads a request's whole input in one iteration (ORCA 5).

Its layers are like a decoder's with bidirectional attention. No layer's keys and values are needed after the
layer, so all layers write to the same slots of one layer's cache: those that the request holds for its input.
"""

import jax
from flax import nnx

from orca_jax.families import model_config
from orca_jax.model.block import Block, Parameters, run_blocks, weights_of_layer
from orca_jax.model.context import Beside, Iteration
from orca_jax.model.kv_cache import LayerCache
from orca_jax.model.layers import norm_of


class Encoder(nnx.Module):
    """The encoder's layers, position embedding and norms, built from named parameters."""

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
        """Add positions [T] int32 to the tokens' embeddings x [T, H]: the first layer's input."""
        if self.position_embedding is not None and self.config.positions is not None:
            place = positions + self.config.positions.offset
            x = x + self.position_embedding[...].at[place].get(mode="clip")
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def through(self, x: jax.Array, cache: LayerCache, iteration: Iteration) -> tuple[jax.Array, LayerCache]:
        """Run x [T, H] through all layers, which write to the same slots of `cache` in turn."""
        run = run_blocks(iteration)
        for block in self.layers:
            out = run(block, False, x, cache, None, Beside())
            assert isinstance(out.cache, LayerCache)
            x, cache = out.x, out.cache
        return (x if self.final_norm is None else self.final_norm(x)), cache
