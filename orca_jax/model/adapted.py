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

from orca_jax.model.ranks import sorted_places
from orca_jax.model.weight import FormedWeight


class AdapterGroups(NamedTuple):
    """Tokens grouped by adapter."""

    order: Array  # [T] int32 the tokens' indices, by adapter; those without one come last
    place: Array  # [T] int32 each token's place in that order
    sizes: Array  # [n] int32 tokens of each adapter
    group: Array  # [T] int32 each token's adapter, from 0; n for none

    @classmethod
    def of(cls, adapter: Array, n: int) -> "AdapterGroups":
        """Group tokens by their `adapter` [T] int32: 0 for none, or 1 to `n`."""
        key = jnp.where(adapter == 0, n, adapter - 1)
        sizes = (key[:, None] == jnp.arange(n)).sum(axis=0, dtype=jnp.int32)
        return cls(*sorted_places(key), sizes, key)


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
        x = x.at[groups.order].get(mode="clip")
        return self._sorted_change(x, groups.sizes, products).at[groups.place].get(mode="clip")

    def change_of_rows(self, at: Array, groups: AdapterGroups, products: _Products) -> Array:
        """Compute the addition to rows `at` [T] of a table: [T, E], 0 for other tokens and rows elsewhere.

        The table is that of this device, [V, E], and its adapters are `a` [n, r, V] and `b` [n, E, r].
        """
        n, n_rows = self.a.shape[0], self.a.shape[-1]
        here = (at >= 0) & (at < n_rows)
        inner = self.a.at[jnp.minimum(groups.group, n - 1), :, at].get(mode="clip")  # [T, r]
        inner = jnp.where(here[:, None], inner, 0).at[groups.order].get(mode="clip")
        out = products.by_expert(inner, self.b[0], groups.sizes)
        return out.at[groups.place].get(mode="clip")

    def change_of_experts(self, x: Array, pairs: "ExpertPairs", products: _Products) -> Array:
        """Compute the addition to the experts' products with x [N, in], a row for each pair: [N, out].

        The adapters are `a` [n, X, P r, in] and `b` [n, X, *out, r].
        """
        flat = AdaptedWeight(None, _by_pair(self.a), [_by_pair(b) for b in self.b])
        x = x.at[pairs.order].get(mode="clip")
        return flat._sorted_change(x, pairs.sizes, products).at[pairs.place].get(mode="clip")

    def _sorted_change(self, x: Array, sizes: Array, products: _Products) -> Array:
        n, rank = self.a.shape[0], self.b[0].shape[-1]
        inner = products.by_expert(x, self.a.reshape(n, self.a.shape[1], -1), sizes)  # [T, P r]
        parts = [
            products.by_expert(inner[:, i * rank : (i + 1) * rank], b, sizes) for i, b in enumerate(self.b)
        ]
        return jnp.concatenate(parts, axis=1)


class ExpertPairs(NamedTuple):
    """Rows for a token and one of its experts each, grouped by the token's adapter and the expert."""

    order: Array  # [N] int32 the rows' indices; those without an adapter come last
    place: Array  # [N] int32 each row's place in that order
    sizes: Array  # [n X] int32

    @classmethod
    def of(cls, groups: AdapterGroups, token: Array, expert: Array, n_experts: int) -> "ExpertPairs":
        """Group rows by their `token` [N] and `expert` [N], which is `n_experts` or more for none."""
        n = len(groups.sizes)
        adapter = groups.group.at[token].get(mode="clip")
        is_pair = (adapter < n) & (expert < n_experts)
        key = jnp.where(is_pair, adapter * n_experts + expert, n * n_experts)
        sizes = jnp.zeros(n * n_experts, jnp.int32).at[key].add(1, mode="drop")
        return cls(*sorted_places(key), sizes)


def _by_pair(stack: Array) -> Array:
    """[n, X, ...] to [n X, ...]."""
    return stack.reshape(-1, *stack.shape[2:])


def flat_inputs(weight: Any) -> bool:
    """Whether the inputs of a weight after attention are in a checkpoint's order of heads (FLAT_HEADS)."""
    base = weight.base if isinstance(weight, AdaptedWeight) else weight
    return isinstance(base, FormedWeight)
