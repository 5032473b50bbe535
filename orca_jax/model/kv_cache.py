"""The keys and values of every token in the cache, per layer, in blocks of slots.

A layer's cache is two arrays [n_blocks, K, B, D], head-major: a block of one head is one contiguous
tile. They are arguments of the forward program and come back as its donated results.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from orca_jax.config import ModelConfig


class LayerCache(NamedTuple):
    """One layer's keys and values, each [n_blocks, K, B, D]."""

    keys: jax.Array
    values: jax.Array


def empty_cache(config: ModelConfig, *, n_blocks: int, block_size: int, dtype: jnp.dtype) -> list[LayerCache]:
    """Zeroed caches, one per layer."""
    shape = (n_blocks, config.n_heads, block_size, config.head_size)
    return [LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.n_layers)]


def write(cache: LayerCache, keys: jax.Array, values: jax.Array, slot_of_token: jax.Array) -> LayerCache:
    """Put keys and values [T, K, D] into the slots [T] int32; a slot out of range is dropped."""
    block_size = cache.keys.shape[2]
    block, offset = slot_of_token // block_size, slot_of_token % block_size
    at = {"mode": "drop", "unique_indices": True, "indices_are_sorted": False}
    return LayerCache(
        cache.keys.at[block, :, offset].set(keys, **at), cache.values.at[block, :, offset].set(values, **at)
    )
