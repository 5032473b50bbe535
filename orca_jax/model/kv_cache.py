"""What layers keep between iterations: the paged K/V cache, in blocks of slots, and recurrent layers' states.

A layer's cache is two arrays [n_blocks, K, B, D], head-major: a block of one head is one contiguous tile.
Latent attention has one array, and a value is the first elements of its key. Caches are arguments of the
forward program and come back as donated results.

On a CPU bfloat16 is stored as uint16: XLA scatters bfloat16 there by way of float32, and would convert a
whole cache for each token that is written.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from orca_jax.families.model_config import ModelConfig
from orca_jax.families.recurrence_config import Recurrence


class LayerCache(NamedTuple):
    """One layer's keys and values, each [n_blocks, K, B, D]; bfloat16 may be stored as uint16.

    Without `values`, a value is the first elements of its key.
    """

    keys: jax.Array
    values: jax.Array | None

    @property
    def both(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values of a cache that has both arrays."""
        assert self.values is not None
        return self.keys, self.values

    @property
    def dtype(self) -> np.dtype[Any]:
        """The logical dtype: bfloat16 even when stored as uint16."""
        return np.dtype(jnp.bfloat16) if self.keys.dtype == jnp.uint16 else self.keys.dtype


# A recurrent layer's states by name, each [n_states, ...]: the shapes of Recurrence.state_shapes.
LayerState = dict[str, jax.Array]
LayerMemory = LayerCache | LayerState  # what a layer keeps between iterations


def dtype_on_cpu(dtype: Any) -> np.dtype[Any]:
    """The dtype in which a CPU stores keys and values of `dtype`."""
    return np.dtype(np.uint16 if dtype == jnp.bfloat16 else dtype)


def as_numbers(stored: jax.Array) -> jax.Array:
    """Numbers of a cache's `dtype`, from an array read from it."""
    return lax.bitcast_convert_type(stored, jnp.bfloat16) if stored.dtype == jnp.uint16 else stored


def cache_shape(config: ModelConfig, *, n_blocks: int, block_size: int) -> tuple[int, int, int, int]:
    """Shape [n_blocks, K, B, D] of one layer's keys, and of its values."""
    return n_blocks, config.attention.n_kv_heads, block_size, config.head_size


def layer_cache(config: ModelConfig, make: Callable[[], Any]) -> LayerCache:
    """A layer's cache, each of whose arrays `make` makes."""
    return LayerCache(make(), None if config.attention.latent is not None else make())


def write(
    cache: LayerCache, keys: jax.Array, values: jax.Array | None, slot_of_token: jax.Array
) -> LayerCache:
    """Write keys and values [T, K, D] to the slots [T] int32; a token with a slot out of range is dropped."""
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


def layer_state(
    recurrence: Recurrence, n_states: int, dtype: Any, make: Callable[[tuple[int, ...], Any], Any]
) -> dict[str, Any]:
    """A recurrent layer's states in a model of `dtype`; `make` makes an array of a shape and dtype."""
    return {
        name: make((n_states, *shape), dtype if of == "model" else jnp.float32)
        for name, (shape, of) in recurrence.state_shapes.items()
    }


def copy_blocks(caches: Sequence[LayerCache], copies: jax.Array) -> list[LayerCache]:
    """Copy whole blocks in every layer: copies [n, 2] int32, source and target.

    A copy to a block out of range is dropped. A target is not the target or source of another copy.
    """
    source, into = copies[:, 0], copies[:, 1]

    def copied(array: jax.Array) -> jax.Array:
        return array.at[into].set(array.at[source].get(mode="clip"), mode="drop")

    return jax.tree.map(copied, list(caches))
