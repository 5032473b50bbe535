"""Intra-layer parallelism as the mathematics sees it (ORCA 4.1, Figure 6): one of n equal parts of a layer.

The model knows no mesh. It is handed how a part's results join those of the others, and is told which part
it computes; alone, it joins nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax


def _as_it_is(x: jax.Array) -> jax.Array:
    return x


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` (traced where `n` > 1) of `n`: heads, feed-forward columns and vocabulary are split."""

    n: int = 1
    index: jax.Array | int = 0
    total: Callable[[jax.Array], jax.Array] = _as_it_is  # the sum over all parts
    side_by_side: Callable[[jax.Array], jax.Array] = _as_it_is  # all parts along the last axis


ALONE = Shard()
