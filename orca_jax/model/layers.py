"""Linear layers and norms: the operations that selective batching runs on all tokens at once (ORCA 3.2).

Each takes token-major arrays [T, ...], whichever request a token is from. The modules hold weights alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from orca_jax.families.norm_config import Norm
from orca_jax.model.adapted import AdaptedWeight, AdapterGroups
from orca_jax.model.shard import Shard
from orca_jax.model.weight import FormedWeight, PackedGrouped, PackedProduct

Weight = jax.Array | FormedWeight | AdaptedWeight
Weights = Callable[[str], Any]  # looks up a parameter by its name in a layer; None if there is none

# Up to this many rows, products on a CPU are bound by memory, and there weight times x is 1.5 to 2 times as
# fast as x times weight. With more rows the two are equal.
_FEW_ROWS = 64


def _rows_first(x: jax.Array, weight: jax.Array, dtype: Any = None) -> jax.Array:
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _weights_first(x: jax.Array, weight: jax.Array, dtype: Any = None) -> jax.Array:
    y = lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    return lax.optimization_barrier(y).T  # the barrier keeps XLA from swapping the operands back


def _matmul(x: jax.Array, weight: jax.Array, n_tokens: jax.Array | None, dtype: Any = None) -> jax.Array:
    if x.shape[0] > _FEW_ROWS:
        return _rows_first(x, weight, dtype)
    cpu, default = partial(_weights_first, dtype=dtype), partial(_rows_first, dtype=dtype)
    return lax.platform_dependent(x, weight, cpu=cpu, default=default)


_BY_GROUP = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])


def grouped_matmul(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Consecutive groups of rows of x [N, in], each times its own weight of [X, out, in]: [N, out].

    Group i has `sizes[i]` rows, [X] int32. Rows after the last group give zeros, whatever they hold.
    """
    return lax.platform_dependent(x, weight, sizes, cpu=_one_by_one, cuda=grouped_by_tiles, default=_ragged)


def _ragged(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    in_group = jnp.arange(x.shape[0]) < sizes.sum()
    found = lax.ragged_dot_general(x, weight, sizes, _BY_GROUP)
    return jnp.where(in_group[:, None], found, 0)


def grouped_by_tiles(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """grouped_matmul tile by tile, for GPUs, where ragged_dot multiplies all rows by all weights.

    The loop has as many tiles as the groups can need at most, so the host need not read a trip count; the
    results of unneeded tiles are dropped. A tile has twice the rows of an average group, 8 to 128.
    """
    n_rows, n_groups = x.shape[0], len(sizes)
    height = 8
    while height < 128 and height * n_groups < 2 * n_rows:
        height *= 2
    n_hit = min(n_rows, n_groups)
    tiles, end = -(-sizes // height), jnp.cumsum(sizes)
    tile_end, row = jnp.cumsum(tiles), jnp.arange(height)[:, None]
    padded = jnp.pad(x, ((0, height), (0, 0)))  # the last tile may reach past the rows

    def add(i: jax.Array, y: jax.Array) -> jax.Array:
        group = jnp.minimum((i >= tile_end).sum(), n_groups - 1)
        first = end[group] - sizes[group] + (i - tile_end[group] + tiles[group]) * height
        group_weight = lax.dynamic_index_in_dim(weight, group, keepdims=False)
        out = _rows_first(lax.dynamic_slice_in_dim(padded, first, height), group_weight)
        kept = lax.dynamic_slice_in_dim(y, first, height)
        return lax.dynamic_update_slice_in_dim(y, jnp.where(row < end[group] - first, out, kept), first, 0)

    y = jnp.zeros((n_rows + height, weight.shape[1]), x.dtype)
    return lax.fori_loop(0, n_hit + (n_rows - n_hit) // height, add, y)[:n_rows]


def _one_by_one(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """grouped_matmul for CPUs, where ragged_dot copies x for each group. Skips empty groups."""
    ends, row = jnp.cumsum(sizes), jnp.arange(x.shape[0])

    def add(i: jax.Array, y: jax.Array) -> jax.Array:
        in_group = (row >= ends[i] - sizes[i]) & (row < ends[i])

        def multiply(y: jax.Array) -> jax.Array:
            return jnp.where(in_group[:, None], _rows_first(x, weight[i]), y)

        return lax.cond(sizes[i] > 0, multiply, lambda y: y, y)

    return lax.fori_loop(0, len(sizes), add, jnp.zeros((x.shape[0], weight.shape[1]), x.dtype))


# (x, weights, experts, up [X, 2, F, H], down [X, H, F]); an expert number of X or more adds nothing.
MixtureProduct = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array | None]


@dataclass(frozen=True, slots=True)
class Matmul:
    """The matrix products of an iteration: the one place that computes with weights, in any form.

    The fields are the products with dense weights. `linear` takes x [T, in], a weight [out, in] and
    `n_tokens`, and may skip later tokens. `grouped` is like grouped_matmul. `mixture` runs whole experts
    without biases for x [T, H], weights and experts [T, k]: [T, H], or None if it does not support the
    shapes. `packed` and `packed_grouped` multiply by weights that stay packed (weight.PackedProduct). The
    first `n_tokens` [1] int32 tokens are real; None if all are. `adapters` groups the tokens by LoRA adapter;
    None if no token has one.
    """

    linear: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array] = _matmul
    grouped: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = grouped_matmul
    mixture: MixtureProduct | None = None
    packed: PackedProduct | None = None
    packed_grouped: PackedGrouped | None = None
    n_tokens: jax.Array | None = None
    adapters: AdapterGroups | None = None

    def __call__(self, x: jax.Array, weight: Weight) -> jax.Array:
        """x [T, in] times a weight [*out, *in]: [T, out] in x's dtype."""
        if isinstance(weight, AdaptedWeight):
            y = self(x, weight.base)
            return y if self.adapters is None else y + weight.change(x, self.adapters, self)
        if isinstance(weight, FormedWeight):
            return weight.product(x, self)
        return self.linear(x, weight.reshape(-1, x.shape[-1]), self.n_tokens)

    def in_float32(self, x: jax.Array, weight: Weight) -> jax.Array:
        """The same in float32. XLA's product of a dense weight does not round its sums to x's dtype first."""
        if isinstance(weight, AdaptedWeight):
            y = self.in_float32(x, weight.base)
            return y if self.adapters is None else y + weight.change(x, self.adapters, self)
        if self.linear is _matmul and isinstance(weight, jax.Array):
            return _matmul(x, weight.reshape(-1, x.shape[-1]), self.n_tokens, jnp.float32)
        return self(x, weight).astype(jnp.float32)

    def by_expert(self, x: jax.Array, weight: jax.Array | FormedWeight, sizes: jax.Array) -> jax.Array:
        """grouped_matmul with the experts' weights [X, *out, in]."""
        if isinstance(weight, FormedWeight):
            return weight.by_expert(x, sizes, self)
        return self.grouped(x, weight.reshape(weight.shape[0], -1, weight.shape[-1]), sizes)


matmul = Matmul()  # XLA's


class Linear(nnx.Module):
    """A weight [out, in] and maybe a bias [out]; each of the two may be several axes, flattened."""

    def __init__(self, weight: Weight, bias: jax.Array | None) -> None:
        self.weight = nnx.Param(weight)
        self.bias = None if bias is None else nnx.Param(bias)

    def __call__(self, x: jax.Array, product: Matmul, shard: Shard | None = None) -> jax.Array:
        """[T, in] to [T, out]. With `shard`, `in` is split, and parts are joined before the bias is added."""
        y = product(x, self.weight.get_value())
        if shard is not None:
            y = shard.joined(y)
        return y if self.bias is None else y + self.bias[...].reshape(-1)


def linear_of(p: Weights, name: str) -> Linear:
    """The linear layer `name`."""
    weight = p(f"{name}.weight")
    assert weight is not None, name
    return Linear(weight, p(f"{name}.bias"))


class RMSNorm(nnx.Module):
    """RMSNorm with scale w [H], or 1 + w with a unit offset. Statistics are float32."""

    def __init__(self, config: Norm, scale: jax.Array) -> None:
        self.config = config
        self.scale = nnx.Param(scale)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., H] to [..., H] in the input's dtype."""
        mean_square = jnp.square(x.astype(jnp.float32)).mean(axis=-1, keepdims=True)
        return self._scaled(x, mean_square, self.scale[...])

    def over_heads(self, x: jax.Array, shard: Shard) -> jax.Array:
        """Normalize x [T, G, K, D] over all heads of all shards; the scale is [G, K D] or [K D]."""
        squares = jnp.square(x.astype(jnp.float32)).sum(axis=(1, 2, 3), keepdims=True)
        n_elements = shard.n * math.prod(x.shape[1:])
        return self._scaled(x, shard.total(squares) / n_elements, self.scale[...].reshape(x.shape[1:]))

    def _scaled(self, x: jax.Array, mean_square: jax.Array, scale: jax.Array) -> jax.Array:
        normal = x.astype(jnp.float32) * lax.rsqrt(mean_square + self.config.eps)
        scale = scale.astype(jnp.float32)
        return (normal * (1 + scale if self.config.unit_offset else scale)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """LayerNorm with a scale [H] and maybe a bias [H]. Statistics are float32."""

    def __init__(self, config: Norm, scale: jax.Array, bias: jax.Array | None) -> None:
        self.config = config
        self.scale = nnx.Param(scale)
        self.bias = None if bias is None else nnx.Param(bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, H] to [T, H] in the input's dtype."""
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(axis=-1, keepdims=True)
        variance = jnp.square(centred).mean(axis=-1, keepdims=True)
        normal = centred * lax.rsqrt(variance + self.config.eps)
        scale = self.scale[...].astype(jnp.float32)
        if self.config.unit_offset:
            scale = 1 + scale
        scaled = normal * scale
        return (scaled if self.bias is None else scaled + self.bias[...].astype(jnp.float32)).astype(x.dtype)


def norm_of(norm: Norm, p: Weights, name: str) -> LayerNorm | RMSNorm:
    """The norm `name`."""
    scale = p(f"{name}.scale")
    assert scale is not None, name
    return RMSNorm(norm, scale) if norm.kind == "rms_norm" else LayerNorm(norm, scale, p(f"{name}.bias"))


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(x / cap); x itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)
