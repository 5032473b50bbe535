"""Linear layers with a LoRA adapter for each token (Hu et al., 2021): W x + B (A x).

The tokens of a batch are sorted by adapter, once for all layers. The products with A and B are then the
grouped products of mixtures of experts, in which each adapter's tokens meet their own matrices. Tokens
without an adapter come last and belong to no group.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from orca_jax.model.weight import FormedWeight


class AdapterGroups(NamedTuple):
    """Tokens grouped by adapter."""

    order: Array  # [T] int32 the tokens' indices, by adapter; those without one come last
    place: Array  # [T] int32 each token's place in that order
    sizes: Array  # [n] int32 tokens of each adapter

    @classmethod
    def of(cls, adapter: Array, n: int) -> "AdapterGroups":
        """Group tokens by their `adapter` [T] int32: 0 for none, or 1 to `n`."""
        key = jnp.where(adapter == 0, n, adapter - 1)
        order = jnp.argsort(key, stable=True).astype(jnp.int32)
        place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=jnp.int32))
        sizes = (key[:, None] == jnp.arange(n)).sum(axis=0, dtype=jnp.int32)
        return cls(order, place, sizes)


class _Products(Protocol):
    def by_expert(self, x: Array, weight: Array, sizes: Array) -> Array:
        """Groups of rows of x [N, in], each times its own weight of [n, *out, in]: [N, out]."""
        ...


@jax.tree_util.register_pytree_with_keys_class
class AdaptedWeight:
    """A weight of a linear layer, in any form, and its stacked adapters (families/adapters.py)."""

    def __init__(self, base: Any, a: Array, b: Sequence[Array]) -> None:
        self.base, self.a, self.b = base, a, tuple(b)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        key = jax.tree_util.DictKey
        return [(key("base"), self.base), (key("a"), self.a), (key("b"), self.b)], None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> "AdaptedWeight":
        made = object.__new__(cls)
        made.base, made.a, made.b = children
        return made

    def change(self, x: Array, groups: AdapterGroups, products: _Products) -> Array:
        """Compute the adapters' addition to the product with x [T, in]: [T, out], 0 for other tokens."""
        n, rank = self.a.shape[0], self.b[0].shape[-1]
        x = x.at[groups.order].get(mode="clip")
        inner = products.by_expert(x, self.a.reshape(n, self.a.shape[1], -1), groups.sizes)  # [T, P r]
        parts = [
            products.by_expert(inner[:, i * rank : (i + 1) * rank], b, groups.sizes)
            for i, b in enumerate(self.b)
        ]
        return jnp.concatenate(parts, axis=1).at[groups.place].get(mode="clip")


def flat_inputs(weight: Any) -> bool:
    """Whether the inputs of a weight after attention are in a checkpoint's order of heads (FLAT_HEADS)."""
    base = weight.base if isinstance(weight, AdaptedWeight) else weight
    return isinstance(base, FormedWeight)
