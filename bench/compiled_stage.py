"""A stage's forward program, compiled for devices that may be described only; nothing is run."""

import math
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import jax.stages
from jax.typing import DTypeLike

from orca_jax.config import ModelConfig
from orca_jax.flat_batch import FlatLayout
from orca_jax.model.gpt import parameter_shapes
from orca_jax.model.kv_cache import LayerCache, cache_shape
from orca_jax.sharding.attention_path import choose_attention
from orca_jax.sharding.partition import StagePart
from orca_jax.sharding.specs import CACHE_SPEC
from orca_jax.sharding.stage import Stage

BLOCK_SIZE = 16
DTYPE = jnp.dtype("bfloat16")


@dataclass(frozen=True)
class CompiledStage:
    """A program, and of one device's memory the bytes of its weights and of all its arguments."""

    program: jax.stages.Compiled
    attention: str
    weights: int
    arguments: int


def _array(shape: tuple[int, ...], place: jax.sharding.Sharding, dtype: DTypeLike = DTYPE) -> jax.Array:
    # It stands for an array wherever nothing is run.
    return cast(jax.Array, jax.ShapeDtypeStruct(shape, dtype, sharding=place))


def placed_parameters(model: ModelConfig, part: StagePart) -> dict[str, jax.Array]:
    """A stage's parameters, by shape and place alone."""
    shapes = parameter_shapes(model)
    return {name: _array(shapes[name], place) for name, place in part.placement(model).items()}


def compile_stage(
    model: ModelConfig, part: StagePart, bucket: int, *, max_bs: int, n_blocks: int
) -> CompiledStage:
    """Compile one bucket in bfloat16 with the attention that is chosen for the devices of `part`."""
    group = part.group
    chosen = choose_attention(
        group.devices[0], model, n_heads=model.n_heads // len(group), block_size=BLOCK_SIZE, dtype=DTYPE
    )
    stage = Stage(model, placed_parameters(model, part), part, attention=chosen.path)
    layout = FlatLayout(bucket, min(bucket, max_bs), -(-model.n_positions // BLOCK_SIZE))
    cache = _array(cache_shape(model, n_blocks=n_blocks, block_size=BLOCK_SIZE), group.place(CACHE_SPEC))
    caches = [LayerCache(cache, cache) for _ in part.layers]
    arrived = None
    if not part.first:
        arrived = _array((bucket, model.hidden_size), group.place())
    elif part.last:
        arrived = _array((2 * max_bs,), group.place(), jnp.int32)
    buffer = _array((layout.size + chosen.path.n_words(layout),), group.place(), jnp.int32)
    lowered = stage.forward.lower(stage.weights, caches, arrived, buffer, layout=layout)
    weights = device_bytes(stage.weights)
    return CompiledStage(
        lowered.compile(), chosen.said, weights, weights + device_bytes((caches, arrived, buffer))
    )


def device_bytes(arrays: object) -> int:
    """The bytes that a tree of arrays takes on each of its devices."""
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(arrays)
    )
