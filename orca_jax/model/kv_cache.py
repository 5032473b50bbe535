"""The keys and values of every token in the cache, per layer, in blocks of slots.

A layer's cache is two arrays [n_blocks, K, B, D], head-major: a block of one head is one contiguous
tile. Latent attention keeps one, whose values are the first elements of its keys. They are arguments of the
forward program and come back as its donated results.

On a CPU bfloat16 is stored as its bits, in uint16: XLA scatters bfloat16 there by way of float32, and would
convert a whole cache for each token that is written.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from orca_jax.families.model_config import ModelConfig


class LayerCache(NamedTuple):
    """One layer's keys and values, each [n_blocks, K, B, D], bfloat16 perhaps as uint16.

    Without `values` they are the first elements of the keys.
    """

    keys: jax.Array
    values: jax.Array | None

    @property
    def both(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values, where each has its own array."""
        assert self.values is not None
        return self.keys, self.values

    @property
    def dtype(self) -> np.dtype[Any]:
        """The logical dtype: bfloat16 even when stored as uint16."""
        return np.dtype(jnp.bfloat16) if self.keys.dtype == jnp.uint16 else self.keys.dtype


def dtype_on_cpu(dtype: Any) -> np.dtype[Any]:
    """The dtype in which a CPU stores keys and values of `dtype`."""
    return np.dtype(np.uint16 if dtype == jnp.bfloat16 else dtype)


def as_numbers(stored: jax.Array) -> jax.Array:
    """Values read from a cache, as numbers of its `dtype`."""
    return lax.bitcast_convert_type(stored, jnp.bfloat16) if stored.dtype == jnp.uint16 else stored


def cache_shape(config: ModelConfig, *, n_blocks: int, block_size: int) -> tuple[int, int, int, int]:
    """[n_blocks, K, B, D], of the keys or the values of one layer."""
    return n_blocks, config.attention.n_kv_heads, block_size, config.head_size


def layer_cache(config: ModelConfig, make: Callable[[], Any]) -> LayerCache:
    """A layer's cache of the arrays that the model keeps, each made by `make`."""
    return LayerCache(make(), None if config.attention.latent is not None else make())


def write(
    cache: LayerCache, keys: jax.Array, values: jax.Array | None, slot_of_token: jax.Array
) -> LayerCache:
    """Put keys and values [T, K, D] into the slots [T] int32; a slot out of range is dropped."""
    block_size = cache.keys.shape[2]
    block, offset = slot_of_token // block_size, slot_of_token % block_size
    at = {"mode": "drop", "unique_indices": True, "indices_are_sorted": False}

    def put(into: jax.Array, new: jax.Array) -> jax.Array:
        if cache.dtype != into.dtype:
            new = lax.bitcast_convert_type(new, into.dtype)
        return into.at[block, :, offset].set(new, **at)

    return LayerCache(
        put(cache.keys, keys),
        None if cache.values is None or values is None else put(cache.values, values),
    )


def copy_blocks(caches: Sequence[LayerCache], copies: jax.Array) -> list[LayerCache]:
    """Copy whole blocks in every layer: copies [n, 2] int32, from and to.

    One to a block out of range is dropped. No block is copied to twice, or copied both from and to.
    """
    source, into = copies[:, 0], copies[:, 1]

    def copied(array: jax.Array) -> jax.Array:
        return array.at[into].set(array.at[source].get(mode="clip"), mode="drop")

    return jax.tree.map(copied, list(caches))
