"""Intra-layer parallelism as the mathematics sees it (ORCA 4.1, Figure 6): one of n equal parts of a layer.

The model knows no mesh. A Shard says which part it computes, and how results of all parts are combined.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax

from orca_jax.families.model_config import Layer


def _unchanged(x: jax.Array) -> jax.Array:
    return x


class Send(Protocol):
    """Sends rows to the other parts. A part receives rows in the order of the parts that send them."""

    def __call__(self, rows: jax.Array, counts: jax.Array, *, most: int, n_received: int) -> jax.Array:
        """Send rows [N, H], sorted by the receiving part; return the received rows, [n_received, H].

        Part i sends counts[i, j] rows to part j, at most `most`; counts [n, n] int32 are equal on all parts.
        After the last received row the result is zero.
        """
        ...


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """The exchange of tokens between parts, each of which then computes the whole layer for a slice of them.

    `wanted` decides for a layer, a hidden state's bytes and the number of tokens. `scattered` sums [n S, H]
    over all parts and returns a part's slice, [S, H]; `gathered` concatenates all parts' slices.
    """

    wanted: Callable[[Layer, int, int], bool]
    scattered: Callable[[jax.Array], jax.Array]
    gathered: Callable[[jax.Array], jax.Array]
    send: Send


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` (traced if `n` > 1) of `n`: heads, feed-forward columns and vocabulary are split.

    `joined` is applied to a part's result of a layer: the sum over all parts, or a slice of its tokens.
    """

    n: int = 1
    index: jax.Array | int = 0
    total: Callable[[jax.Array], jax.Array] = _unchanged  # the sum over all parts
    side_by_side: Callable[[jax.Array], jax.Array] = _unchanged  # all parts along the last axis
    joined: Callable[[jax.Array], jax.Array] = _unchanged
    exchange: TokenExchange | None = None

    def share(self, x: jax.Array) -> jax.Array:
        """Take this part's share of x along the last axis; `side_by_side` puts all shares together again."""
        if self.n == 1:
            return x
        size = x.shape[-1] // self.n
        return jax.lax.dynamic_slice_in_dim(x, self.index * size, size, axis=x.ndim - 1)


ALONE = Shard()
