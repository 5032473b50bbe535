"""Expert parallelism (docs/experts.md): each part of a stage has a slice of the tokens, and some experts.

Between attention and the next layer a part has only its slice of the tokens, [S, H]. It routes them, sends
each one once to every part that has an expert of its choice, and sums the results that come back. Arrays are
large enough for the most uneven routing, so no token is dropped and shapes depend on the bucket alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from orca_jax.model.layers import Matmul
from orca_jax.model.shard import Shard, TokenExchange

# (tokens [T, H], weights [T, k], experts [T, k], a product that knows how many tokens are real): the sum of
# this part's experts for each token, [T, H].
Mix = Callable[[jax.Array, jax.Array, jax.Array, Matmul], jax.Array]


@dataclass(frozen=True, slots=True)
class Slices:
    """Slices of `n_tokens` tokens, padded to a multiple of the parts."""

    shard: Shard
    exchange: TokenExchange
    n_tokens: int

    @property
    def size(self) -> int:
        """S: tokens of a slice."""
        return -(-self.n_tokens // self.shard.n)

    @property
    def scattering(self) -> Shard:
        """The shard that joins results to slices of their sum."""
        return replace(self.shard, joined=lambda x: self.exchange.scattered(self._padded(x)))

    def own(self, x: jax.Array) -> jax.Array:
        """Select this part's slice of x [T, ...], which is equal on all parts."""
        return lax.dynamic_slice_in_dim(self._padded(x), self.shard.index * self.size, self.size)

    def whole(self, x: jax.Array) -> jax.Array:
        """All parts' slices as [T, H]."""
        return self.exchange.gathered(x)[: self.n_tokens]

    def product(self, product: Matmul) -> Matmul:
        """The product for this part's slice, with its number of real tokens."""
        n_tokens = self.n_tokens if product.n_tokens is None else product.n_tokens
        n_real = jnp.clip(n_tokens - self.shard.index * self.size, 0, self.size)
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
        """Run the experts of this slice's tokens x [S, H] wherever they are, and sum their results: [S, H].

        Also returns the experts of all slices' tokens, [T, k]; padding tokens have expert `n_experts`.
        """
        n, size, me = self.shard.n, self.size, self.shard.index
        assert product.n_tokens is not None
        real = jnp.arange(size)[:, None] < product.n_tokens
        weights, chosen = self._all_routings(weights, jnp.where(real, chosen, n_experts))  # [n S, k]
        # Whether a token goes to a part, [n S, n]; padding goes to no part.
        goes = (chosen[:, :, None] // (n_experts // n) == jnp.arange(n)).any(axis=1)
        counts = goes.reshape(n, size, n).sum(axis=1, dtype=jnp.int32)

        slice_goes = lax.dynamic_slice_in_dim(goes, me * size, size)  # [S, n]
        by_part = slice_goes.T.reshape(-1)
        n_sent = size * min(n, chosen.shape[1])
        sent = jnp.argsort(~by_part, stable=True)[:n_sent] % size
        arrived = self.exchange.send(x[sent], counts, most=size, n_received=n * size)

        arriving = goes[:, me]
        token = jnp.argsort(~arriving, stable=True)
        n_arrived = arriving.sum(dtype=jnp.int32).reshape(1)
        added = mix(arrived, weights[token], chosen[token], replace(product, n_tokens=n_arrived))

        back = self.exchange.send(added, counts.T, most=size, n_received=n_sent)
        place = (jnp.cumsum(by_part) - 1).reshape(n, size).T  # [S, n] index in `back` of a part's result
        rows = jnp.where(slice_goes[:, :, None], back.at[place].get(mode="clip"), 0)
        return rows.astype(jnp.float32).sum(axis=1).astype(x.dtype), chosen[: self.n_tokens]

    def _all_routings(self, weights: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Gather the routings of all slices, in one collective."""
        words = lax.bitcast_convert_type(weights.astype(jnp.float32), jnp.int32)
        both = self.exchange.gathered(jnp.concatenate([words, chosen.astype(jnp.int32)], axis=1))
        words, chosen = jnp.split(both, 2, axis=1)
        return lax.bitcast_convert_type(words, jnp.float32), chosen

    def _padded(self, x: jax.Array) -> jax.Array:
        missing = self.shard.n * self.size - x.shape[0]
        return x if missing == 0 else jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)])
