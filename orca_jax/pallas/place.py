"""Rotates queries and keys, and writes keys and values to their slots, in one launch of a Triton kernel.

XLA makes three kernels of that, each of which reads the fused QKV product: a scatter is a kernel by itself. A
thread block has some heads of one token: queries of one slice, the keys, or the values.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_DTYPES = ("bfloat16", "float16", "float32")
_ELEMENTS = 2048  # of a thread block
_MOST_HEAD = 512


@dataclass(frozen=True, slots=True)
class _Shape:
    """The static sizes of a launch."""

    n_tokens: int
    n_queries: int
    key: int
    n_kv_heads: int
    head_size: int
    rotated: int  # elements of a head, the first ones
    interleaved: bool

    @property
    def width(self) -> int:
        """Elements of a head in a thread block, of which the last ones may be missing: a power of two."""
        return pl.next_power_of_2(self.head_size)

    @property
    def n_heads(self) -> int:
        """Heads of a thread block, of which the last ones may be missing: a power of two."""
        return min(pl.next_power_of_2(self.n_kv_heads), max(1, _ELEMENTS // self.width))

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens, slices of heads and of values, and tiles of heads."""
        return self.n_tokens, self.n_queries + 2, -(-self.n_kv_heads // self.n_heads)


def unsupported(head_size: int, dtype: str) -> str | None:
    """Why the kernel cannot write heads of this size and dtype to a cache of the same; None if it can."""
    if dtype not in _DTYPES:
        return f"keys and values are {dtype}, not one of {', '.join(_DTYPES)}"
    if head_size > _MOST_HEAD:
        return f"a head has {head_size} elements, more than {_MOST_HEAD}"
    return None


def place(
    heads: jax.Array,
    values: jax.Array,
    slot_of_token: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    into_keys: jax.Array,
    into_values: jax.Array,
    *,
    n_queries: int,
    key: int,
    interleaved: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write keys and values to their slots in a layer's cache [n_blocks, K, B, D], in place if donated.

    The keys are slice `key` of heads [T, n, K, D], the values the last slice of values [T, m, K, D]; a token
    whose slot_of_token [T] int32 is out of range is not written. cos and sin [T, size / 2] float32, or None,
    rotate the first `size` elements of each key, and of each query in the first `n_queries` (G) slices of
    heads: pairs of elements size / 2 apart or, if `interleaved`, adjacent ones. Returns the queries [T, G, K,
    D], and the cache's arrays. All have one dtype, for which `unsupported` must have no reason; the
    arithmetic is float32. `interpret` runs the kernel on the CPU.
    """
    n_tokens, n_slices, n_kv_heads, head_size = heads.shape
    assert unsupported(head_size, heads.dtype.name) is None
    assert into_keys.shape == into_values.shape and into_keys.shape[1::2] == heads.shape[2:]
    assert values.shape[0] == n_tokens and values.shape[2:] == heads.shape[2:]
    assert heads.dtype == values.dtype == into_keys.dtype == into_values.dtype
    assert 0 <= key < n_slices and 0 <= n_queries <= n_slices and slot_of_token.shape == (n_tokens,)
    angles: list[jax.Array] = []
    if cos is not None and sin is not None and cos.shape[1]:
        assert cos.shape == sin.shape and cos.shape[0] == n_tokens and 2 * cos.shape[1] <= head_size
        angles = [cos, sin]
    rotated = 2 * angles[0].shape[1] if angles else 0
    shape = _Shape(n_tokens, n_queries, key, n_kv_heads, head_size, rotated, interleaved)
    return _launch(shape, heads, values, slot_of_token, angles, into_keys, into_values, interpret)


@partial(jax.jit, static_argnames=("shape", "interpret"))  # lowers once in a model with many layers
def _launch(
    shape: _Shape,
    heads: jax.Array,
    values: jax.Array,
    slot_of_token: jax.Array,
    angles: list[jax.Array],
    into_keys: jax.Array,
    into_values: jax.Array,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    like = (shape.n_tokens, shape.n_queries, shape.n_kv_heads, shape.head_size)
    queries = [jax.ShapeDtypeStruct(like, heads.dtype)] if shape.n_queries else []
    caches = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (into_keys, into_values)]
    first = 3 + len(angles)
    *made, keys_written, values_written = pl.pallas_call(
        partial(_kernel, shape),
        out_shape=(*queries, *caches),
        grid=shape.grid,
        input_output_aliases={first + i: len(queries) + i for i in range(2)},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="place",
    )(heads, values, slot_of_token, *angles, into_keys, into_values)
    return made[0] if made else jnp.zeros(like, heads.dtype), keys_written, values_written


def _kernel(shape: _Shape, heads: Any, values: Any, slot_of_token: Any, *refs: Any) -> None:
    """Copy some heads of one slice of a token, rotated if they are queries or keys."""
    *others, into_keys, into_values = refs
    token, which = pl.program_id(0), pl.program_id(1)
    is_query, is_value = which < shape.n_queries, which > shape.n_queries
    is_key = which == shape.n_queries
    head = (pl.program_id(2) * shape.n_heads + jnp.arange(shape.n_heads))[:, None]
    element = jnp.arange(shape.width)
    inside = (head < shape.n_kv_heads) & (element < shape.head_size)[None]
    of_heads = jnp.where(is_query, which, shape.key)

    def loaded(elements: jax.Array, mask: jax.Array) -> jax.Array:
        """Load these elements [width] of each query or key."""
        return plgpu.load(heads.at[token, of_heads, head, elements[None]], mask=mask & ~is_value, other=0)

    x = loaded(element, inside)
    last = values.shape[1] - 1
    x = jnp.where(
        is_value, plgpu.load(values.at[token, last, head, element[None]], mask=inside & is_value, other=0), x
    )
    if shape.rotated:
        cos, sin = others[:2]
        turns = element < shape.rotated
        half = shape.rotated // 2
        is_second = element % 2 == 1 if shape.interleaved else element >= half
        step = 1 if shape.interleaved else half
        other = loaded(jnp.where(is_second, element - step, element + step), inside & turns[None])
        pair = element // 2 if shape.interleaved else jnp.where(is_second, element - half, element)
        by_cos, by_sin = (
            plgpu.load(angle.at[token, pair], mask=turns, other=0)[None] for angle in (cos, sin)
        )
        across = other.astype(jnp.float32) * by_sin
        turned = x.astype(jnp.float32) * by_cos + jnp.where(is_second[None], across, -across)
        x = jnp.where(turns[None] & ~is_value, turned.astype(x.dtype), x)
    if shape.n_queries:
        out = others[-1].at[token, jnp.minimum(which, shape.n_queries - 1), head, element[None]]
        plgpu.store(out, x, mask=inside & is_query)
    block_size = into_keys.shape[2]
    slot, n_slots = slot_of_token[token], into_keys.shape[0] * block_size
    is_written = (slot >= 0) & (slot < n_slots)
    slot = jnp.clip(slot, 0, n_slots - 1)
    for into, is_wanted in ((into_keys, is_key), (into_values, is_value)):
        at = into.at[slot // block_size, head, slot % block_size, element[None]]
        plgpu.store(at, x, mask=inside & is_written & is_wanted)
