"""The keys and values of every token in the cache, per layer, in blocks of slots.

A layer's cache is two arrays [n_blocks, K, B, D], head-major: a block of one head is one contiguous
tile. They are arguments of the forward program and come back as its donated results.
"""

from typing import NamedTuple

import jax

from orca_jax.families.model_config import ModelConfig


class LayerCache(NamedTuple):
    """One layer's keys and values, each [n_blocks, K, B, D]."""

    keys: jax.Array
    values: jax.Array


def cache_shape(config: ModelConfig, *, n_blocks: int, block_size: int) -> tuple[int, int, int, int]:
    """[n_blocks, K, B, D], of the keys or the values of one layer."""
    return n_blocks, config.attention.n_kv_heads, block_size, config.head_size


def write(cache: LayerCache, keys: jax.Array, values: jax.Array, slot_of_token: jax.Array) -> LayerCache:
    """Put keys and values [T, K, D] into the slots [T] int32; a slot out of range is dropped."""
    block_size = cache.keys.shape[2]
    block, offset = slot_of_token // block_size, slot_of_token % block_size
    at = {"mode": "drop", "unique_indices": True, "indices_are_sorted": False}
    return LayerCache(
        cache.keys.at[block, :, offset].set(keys, **at), cache.values.at[block, :, offset].set(values, **at)
    )
