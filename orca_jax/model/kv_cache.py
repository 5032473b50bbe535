"""The memory of layers: the paged K/V cache, in blocks of slots, and recurrent layers' states.

A layer's cache is two arrays [n_blocks, K, B, D], head-major: a block of one head is one contiguous tile.
Latent attention has one array, and a value is the first elements of its key; with an indexer there is a
second array, of index keys, whose slots are the same. Caches are arguments of the forward program and come
back as donated results.

On a CPU bfloat16 is stored as uint16: XLA scatters bfloat16 there by way of float32, and would convert a
whole cache for each token that is written.

A cache may hold keys and values in eight bits (`Attention.kv_code`). Each key and each value of a head then
has a float32 scale, the greatest magnitude of its elements over the code's greatest number. A scale for each
slot, not for a whole block, keeps what was written before untouched: with a scale for a block, a later token
with larger elements would round its neighbours again, and a request's tokens would depend on how its prompt
was cut into iterations.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from orca_jax.families.attention_config import Attention, KVCode
from orca_jax.families.model_config import Layer
from orca_jax.families.recurrence_config import Recurrence

_STORED: dict[KVCode, np.dtype[Any]] = {  # fp8 is stored as its bits
    "int8": np.dtype(np.int8),
    "fp8": np.dtype(np.uint8),
}
_GREATEST: dict[KVCode, float] = {"int8": 127, "fp8": 448}  # the greatest number of a code
_LEAST_SCALE = 2.0**-100  # below it, elements count as 0: their scale's inverse would overflow


class LayerCache(NamedTuple):
    """One layer's keys and values, each [n_blocks, K, B, D]; bfloat16 may be stored as uint16.

    Without `values`, a value is the first elements of its key. In eight bits, int8 or the bits of e4m3 as
    uint8, they have scales [n_blocks, K, B] float32. A layer with an indexer has its `index_keys` too.
    """

    keys: jax.Array
    values: jax.Array | None
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None
    index_keys: jax.Array | None = None

    @property
    def both(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values of a cache that has both arrays."""
        assert self.values is not None
        return self.keys, self.values

    @property
    def code(self) -> KVCode | None:
        """The code of keys and values in eight bits; None in the model's dtype."""
        if self.key_scales is None:
            return None
        return next(code for code, dtype in _STORED.items() if dtype == self.keys.dtype)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The logical dtype: bfloat16 even when stored as uint16."""
        assert self.key_scales is None, "a cache of eight bits does not know the model's dtype"
        return np.dtype(jnp.bfloat16) if self.keys.dtype == jnp.uint16 else self.keys.dtype


# Makes an array of a shape and dtype.
Make = Callable[[tuple[int, ...], np.dtype[Any]], Any]

# A recurrent layer's states by name, each [n_states, ...]: the shapes of Recurrence.state_shapes.
LayerState = dict[str, jax.Array]


class BothMemory(NamedTuple):
    """The memory of a layer with attention and a recurrence."""

    cache: LayerCache
    state: LayerState


LayerMemory = LayerCache | LayerState | BothMemory  # what a layer keeps between iterations


def cache_in(memory: LayerMemory) -> LayerCache | None:
    """The keys and values in a layer's memory; None if it has none."""
    if isinstance(memory, BothMemory):
        return memory.cache
    return memory if isinstance(memory, LayerCache) else None


def state_in(memory: LayerMemory) -> LayerState | None:
    """The states in a layer's memory; None if it has none."""
    if isinstance(memory, BothMemory):
        return memory.state
    return None if isinstance(memory, LayerCache) or not memory else memory


def with_cache(memory: LayerMemory, cache: LayerCache) -> LayerMemory:
    """The memory with other keys and values."""
    return memory._replace(cache=cache) if isinstance(memory, BothMemory) else cache


def with_state(memory: LayerMemory, state: LayerState) -> LayerMemory:
    """The memory with other states."""
    return memory._replace(state=state) if isinstance(memory, BothMemory) else state


_NEWEST = "newest"


def newest_state(outputs: Any) -> LayerState:
    """A head's newest outputs [n_rows, H], as a layer's state."""
    return {_NEWEST: outputs}


def newest_in(memory: LayerMemory | None) -> jax.Array:
    """The outputs in a `newest_state`."""
    assert isinstance(memory, dict)
    return memory[_NEWEST]


def state_cache(states: Any) -> LayerCache:
    """The cache of the states that a head reads [n_blocks, n, B, s]: keys, with a head for each share."""
    return LayerCache(states, None)


def dtype_on_cpu(dtype: Any) -> np.dtype[Any]:
    """The dtype in which a CPU stores keys and values of `dtype`."""
    return np.dtype(np.uint16 if dtype == jnp.bfloat16 else dtype)


def as_numbers(stored: jax.Array) -> jax.Array:
    """Numbers of a cache's `dtype`, from an array read from it."""
    return lax.bitcast_convert_type(stored, jnp.bfloat16) if stored.dtype == jnp.uint16 else stored


def code_numbers(codes: jax.Array, dtype: Any) -> jax.Array:
    """The numbers of int8 or fp8 codes, without their scales, exactly: float32 or 16 bits hold each."""
    if codes.dtype == jnp.uint8:
        codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return codes.astype(dtype)


def in_eight_bits(code: KVCode, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Round numbers [..., D] to codes [..., D], as a cache stores them, and scales [...] float32.

    A vector with a NaN or an infinity gets such a scale, and so does not become finite.
    """
    numbers = numbers.astype(jnp.float32)
    # The greatest magnitude by its bits, so that a NaN is the greatest of all: XLA's maximum of floats may
    # drop one on a CPU. Then products with a constant and with an inverse, which no compiler replaces.
    bits = (lax.bitcast_convert_type(numbers, jnp.int32) & 0x7FFFFFFF).max(axis=-1)
    scales = lax.bitcast_convert_type(bits, jnp.float32) * np.float32(1 / _GREATEST[code])
    inverse = jnp.where(scales >= _LEAST_SCALE, 1 / scales, 0)
    scaled = numbers * inverse[..., None]
    if code == "int8":
        return jnp.round(scaled).astype(jnp.int8), scales
    return lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8), scales


def cache_shape(attention: Attention, *, n_blocks: int, block_size: int) -> tuple[int, int, int, int]:
    """Shape [n_blocks, K, B, D] of one layer's keys, and of its values."""
    return n_blocks, attention.n_kv_heads, block_size, attention.head_size


def layer_cache(
    attention: Attention,
    *,
    n_blocks: int,
    block_size: int,
    stored: Any,
    make: Callable[[tuple[int, ...], np.dtype[Any]], Any],
) -> LayerCache:
    """A layer's cache, each of whose arrays `make` makes of a shape and dtype.

    Keys and values have the dtype `stored`, unless they are in eight bits.
    """
    shape, code = cache_shape(attention, n_blocks=n_blocks, block_size=block_size), attention.kv_code
    dtype = np.dtype(stored) if code is None else _STORED[code]
    keys = make(shape, dtype)
    values = None if attention.latent is not None else make(shape, dtype)
    size = 0 if attention.indexer is None else attention.indexer.key_size
    index_keys = make((*shape[:3], size), dtype) if size else None
    if code is None:
        return LayerCache(keys, values, index_keys=index_keys)
    return LayerCache(keys, values, *(make(shape[:3], np.dtype(np.float32)) for _ in range(2)))


def write(
    cache: LayerCache,
    keys: jax.Array,
    values: jax.Array | None,
    slot_of_token: jax.Array,
    index_keys: jax.Array | None = None,
) -> LayerCache:
    """Write keys and values [T, K, D] to the slots [T] int32; a token with a slot out of range is dropped.

    `index_keys` [T, K, k] are those of a layer with an indexer.
    """
    block_size = cache.keys.shape[2]
    block, offset = slot_of_token // block_size, slot_of_token % block_size
    at = {"mode": "drop", "unique_indices": True, "indices_are_sorted": False}

    def put(into: jax.Array, new: jax.Array) -> jax.Array:
        if new.dtype != into.dtype:
            new = lax.bitcast_convert_type(new, into.dtype)
        return into.at[block, :, offset].set(new, **at)

    if cache.code is None:
        new = LayerCache(keys, None if cache.values is None else values, index_keys=index_keys)
    else:
        assert values is not None
        codes, scales = zip(*(in_eight_bits(cache.code, each) for each in (keys, values)), strict=True)
        new = LayerCache(*codes, *scales)
    return jax.tree.map(put, cache, new)


def layer_state(
    recurrence: Recurrence, n_states: int, dtype: Any, make: Callable[[tuple[int, ...], Any], Any]
) -> dict[str, Any]:
    """A recurrent layer's states in a model of `dtype`; `make` makes an array of a shape and dtype."""
    return {
        name: make((n_states, *shape), dtype if of == "model" else jnp.float32)
        for name, (shape, of) in recurrence.state_shapes.items()
    }


def layer_memory(
    layer: Layer,
    *,
    n_blocks: int,
    block_size: int,
    stored: Any,
    n_states: int,
    dtype: Any,
    make_cache: Callable[[tuple[int, ...], np.dtype[Any]], Any],
    make_state: Callable[[tuple[int, ...], Any], Any],
) -> LayerMemory:
    """Make what a layer keeps: a recurrent one's states in a model of `dtype`, a cache, or nothing."""
    state: LayerState = {}
    if layer.recurrence is not None:
        state = layer_state(layer.recurrence, n_states, dtype, make_state)
    if layer.attention is None or layer.attention.kv_from is not None:
        return state
    cache = layer_cache(
        layer.attention, n_blocks=n_blocks, block_size=block_size, stored=stored, make=make_cache
    )
    return BothMemory(cache, state) if state else cache


def copy_blocks(caches: Sequence[LayerCache], copies: jax.Array) -> list[LayerCache]:
    """Copy whole blocks in every layer: copies [n, 2] int32, source and target.

    A copy to a block out of range is dropped. A target is not the target or source of another copy.
    """
    source, into = copies[:, 0], copies[:, 1]

    def copied(array: jax.Array) -> jax.Array:
        return array.at[into].set(array.at[source].get(mode="clip"), mode="drop")

    return jax.tree.map(copied, list(caches))


def copy_state(states: Sequence[LayerState], copy: jax.Array) -> list[LayerState]:
    """Copy one request's state in every recurrent layer: copy [2] int32, source and target."""

    def copied(array: jax.Array) -> jax.Array:
        own = lax.dynamic_index_in_dim(array, copy[0], keepdims=True)
        return lax.dynamic_update_slice_in_dim(array, own, copy[1], 0)

    return jax.tree.map(copied, list(states))
