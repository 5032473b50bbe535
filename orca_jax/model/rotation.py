"""Positions applied to queries and keys: rotations, whose frequencies families/rotary.py has, and factors."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from orca_jax.families.attention_config import Temperature
from orca_jax.families.rotary import Rotary


class Rotation(NamedTuple):
    """Cosine and sine of each token's angles, [T, size / 2] float32."""

    cos: jax.Array
    sin: jax.Array

    def of(self, select: Callable[[jax.Array], jax.Array]) -> "Rotation":
        """The rotation of the tokens that `select` selects."""
        return Rotation(select(self.cos), select(self.sin))


def rotation(rotary: Rotary, positions: jax.Array, n_positions: int) -> Rotation:
    """The rotation of tokens at `positions` [T] int32, in a model with `n_positions` positions."""
    angles = positions[:, None].astype(jnp.float32) * rotary.frequencies(n_positions)
    factor = rotary.attention_factor
    return Rotation(factor * jnp.cos(angles), factor * jnp.sin(angles))


def rotate(x: jax.Array, by: Rotation, *, interleaved: bool) -> jax.Array:
    """Rotate the first `size` elements of each head of x [T, n, K, D]; the other elements stay."""
    size = 2 * by.cos.shape[1]
    part, rest = x[..., :size].astype(jnp.float32), x[..., size:]
    cos, sin = by.cos[:, None, None], by.sin[:, None, None]  # [T, 1, 1, size / 2]
    if interleaved:
        first, second = part[..., 0::2], part[..., 1::2]
    else:
        first, second = part[..., : size // 2], part[..., size // 2 :]
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = jnp.stack(pair, axis=-1).reshape(part.shape) if interleaved else jnp.concatenate(pair, axis=-1)
    turned = turned.astype(x.dtype)
    return turned if rest.shape[-1] == 0 else jnp.concatenate([turned, rest], axis=-1)


def query_factors(temperature: Temperature, positions: jax.Array) -> jax.Array:
    """The factors on the queries of tokens at `positions` [T] int32, [T] float32."""
    steps = ((positions + temperature.offset) // temperature.step).astype(jnp.float32)
    return 1 + temperature.scale * jnp.log1p(steps)
