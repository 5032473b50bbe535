"""Intra-layer parallelism as the mathematics sees it (ORCA 4.1, Figure 6): one of n equal parts of a layer.

The model knows no mesh. It is handed how a part's results join those of the others, and is told which part
it computes; alone, it joins nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax

from orca_jax.families.model_config import Layer


def _as_it_is(x: jax.Array) -> jax.Array:
    return x


class Send(Protocol):
    """Sends rows to the other parts: each part's are received one after the other, in the parts' order."""

    def __call__(self, rows: jax.Array, counts: jax.Array, *, most: int, n_received: int) -> jax.Array:
        """Rows [N, H], those for part 0 first, to [n_received, H]; what is behind the last one is zero.

        Part i sends counts[i, j] rows to part j, `most` at most; counts [n, n] int32 are alike on all parts.
        """
        ...


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """The exchange of tokens between parts, after which each computes the whole layer for a slice of them.

    `wanted` is told a layer, the bytes of a token's hidden state, and the number of tokens. `scattered` gives
    each part its slice of the sum [n S, H] over all parts, [S, H]; `gathered` sets slices one below another.
    """

    wanted: Callable[[Layer, int, int], bool]
    scattered: Callable[[jax.Array], jax.Array]
    gathered: Callable[[jax.Array], jax.Array]
    send: Send


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` (traced where `n` > 1) of `n`: heads, feed-forward columns and vocabulary are split.

    `joined` is applied to what a part of a layer gives: the sum over all parts, or a slice of its tokens.
    """

    n: int = 1
    index: jax.Array | int = 0
    total: Callable[[jax.Array], jax.Array] = _as_it_is  # the sum over all parts
    side_by_side: Callable[[jax.Array], jax.Array] = _as_it_is  # all parts along the last axis
    joined: Callable[[jax.Array], jax.Array] = _as_it_is
    exchange: TokenExchange | None = None


ALONE = Shard()
