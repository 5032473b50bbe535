"""Tokens in equal slices, one for each part of a stage, and their exchange with experts (docs/experts.md).

Between attention and the next layer each part has its slice of the tokens [S, H] alone. It routes them, sends
each once to every part that has experts of the token's choice, and adds up what comes back. Arrays hold what
the most uneven routing needs, so that no token is dropped and shapes depend on the bucket alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from orca_jax.model.layers import Matmul
from orca_jax.model.shard import Shard, TokenExchange

# Tokens [T, H], their weights [T, k] and experts [T, k], and a product that knows how many of them are real,
# to what a part's experts add to each [T, H].
Mix = Callable[[jax.Array, jax.Array, jax.Array, Matmul], jax.Array]


@dataclass(frozen=True, slots=True)
class Slices:
    """`n_tokens` tokens, padded to a multiple of the parts."""

    shard: Shard
    exchange: TokenExchange
    n_tokens: int

    @property
    def size(self) -> int:
        """S."""
        return -(-self.n_tokens // self.shard.n)

    @property
    def scattering(self) -> Shard:
        """The shard whose results are joined in slices."""
        return replace(self.shard, joined=lambda x: self.exchange.scattered(self._padded(x)))

    def own(self, x: jax.Array) -> jax.Array:
        """This part's slice of x [T, ...], which all parts have."""
        return lax.dynamic_slice_in_dim(self._padded(x), self.shard.index * self.size, self.size)

    def whole(self, x: jax.Array) -> jax.Array:
        """All parts' slices, [T, H]."""
        return self.exchange.gathered(x)[: self.n_tokens]

    def product(self, product: Matmul) -> Matmul:
        """The product for this part's slice: its first tokens are real, perhaps none."""
        given = self.n_tokens if product.n_tokens is None else product.n_tokens
        n_real = jnp.clip(given - self.shard.index * self.size, 0, self.size)
        return replace(product, n_tokens=n_real.reshape(1).astype(jnp.int32))

    def exchanged(
        self,
        x: jax.Array,
        weights: jax.Array,
        chosen: jax.Array,
        product: Matmul,
        mix: Mix,
        *,
        n_experts: int,
    ) -> tuple[jax.Array, jax.Array]:
        """The sum of all experts' results for the tokens x [S, H] of this slice, whose `product` it is.

        And the experts of all slices' tokens, [T, k]; of padding `n_experts`.
        """
        n, size, me = self.shard.n, self.size, self.shard.index
        assert product.n_tokens is not None
        real = jnp.arange(size)[:, None] < product.n_tokens
        weights, chosen = self._all_routings(weights, jnp.where(real, chosen, n_experts))  # [n S, k]
        # Whether a token goes to a part, [n S, n]; padding goes to none.
        goes = (chosen[:, :, None] // (n_experts // n) == jnp.arange(n)).any(axis=1)
        counts = goes.reshape(n, size, n).sum(axis=1, dtype=jnp.int32)

        mine = lax.dynamic_slice_in_dim(goes, me * size, size)  # [S, n]
        by_part = mine.T.reshape(-1)
        n_sent = size * min(n, chosen.shape[1])
        sent = jnp.argsort(~by_part, stable=True)[:n_sent] % size
        arrived = self.exchange.send(x[sent], counts, most=size, n_received=n * size)

        arriving = goes[:, me]
        token = jnp.argsort(~arriving, stable=True)
        n_arrived = arriving.sum(dtype=jnp.int32).reshape(1)
        added = mix(arrived, weights[token], chosen[token], replace(product, n_tokens=n_arrived))

        back = self.exchange.send(added, counts.T, most=size, n_received=n_sent)
        place = (jnp.cumsum(by_part) - 1).reshape(n, size).T  # [S, n]: of a token's row from a part
        rows = jnp.where(mine[:, :, None], back.at[place].get(mode="clip"), 0)
        return rows.astype(jnp.float32).sum(axis=1).astype(x.dtype), chosen[: self.n_tokens]

    def _all_routings(self, weights: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The routings of all slices, in one collective."""
        words = lax.bitcast_convert_type(weights.astype(jnp.float32), jnp.int32)
        both = self.exchange.gathered(jnp.concatenate([words, chosen.astype(jnp.int32)], axis=1))
        words, chosen = jnp.split(both, 2, axis=1)
        return lax.bitcast_convert_type(words, jnp.float32), chosen

    def _padded(self, x: jax.Array) -> jax.Array:
        missing = self.shard.n * self.size - x.shape[0]
        return x if missing == 0 else jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)])
