"""The surroundings of a layer in an iteration: cache, slots, split over devices, wanted tokens.

`Iteration` is the same for all layers; `Context` is one layer's, and takes what the layer leaves.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax

from orca_jax.families.attention_config import Attention
from orca_jax.families.model_config import Layer
from orca_jax.model.kv_cache import LayerCache
from orca_jax.model.layers import Matmul, matmul
from orca_jax.model.rotation import Rotation
from orca_jax.model.shard import ALONE, Shard
from orca_jax.model.token_slices import Slices


class Attend(Protocol):
    """Split attention with this iteration's tables bound: the one operation that knows of requests."""

    def __call__(
        self,
        q: jax.Array,
        cache: LayerCache,
        attention: Attention,
        bias: jax.Array | None,
        sinks: jax.Array | None,
        /,
    ) -> jax.Array:
        """q [T, n, K, D], of which the first G slices are queries, to [T, G, K, D or the size of a value].

        The slices after the queries let kernels read queries in place from the fused QKV product; keys and
        values are in the cache already. `attention` is the layer's, with G and the form of its scores; `bias`
        is what that form adds to the scores, float32: for ALiBi its slopes [G, K], for a relative bias
        [2 * max_distance + 1, K] by (key position - query position) from -max_distance on. `sinks` [G, K]
        float32 are scores that join the softmax's sum, one a head. K counts the K/V heads of this device.
        """
        ...


@runtime_checkable
class AttendAndPlace(Attend, Protocol):
    """Attention that writes the cache itself, and rotates what it writes."""

    def place(
        self,
        heads: jax.Array,
        values: jax.Array,
        slot_of_token: jax.Array,
        cache: LayerCache,
        rotation: Rotation | None,
        *,
        n_queries: int,
        key: int,
        interleaved: bool,
    ) -> tuple[jax.Array, LayerCache]:
        """Rotate queries and keys, and write keys and values: the queries, and the written cache.

        The queries are the first `n_queries` slices of heads [T, n, K, D], the keys its slice `key`, the
        values the last slice of values [T, m, K, D]. A token whose slot_of_token [T] int32 is out of range is
        dropped.
        """
        ...


class Tokens(NamedTuple):
    """Some tokens of an iteration, and the operations that are bound to them.

    `at` [R] int32 are their places in the batch, perhaps several of one request; None: all of the batch.
    `cross` is cross attention to the slots that `Transformer.cross_caches` wrote.
    """

    attend: Attend
    product: Matmul = matmul
    cross: Attend | None = None
    at: jax.Array | None = None

    def of(self, x: jax.Array) -> jax.Array:
        """Select these tokens' rows: [T, ...] to [R, ...]."""
        return x if self.at is None else x.at[self.at].get(mode="clip")


@dataclass(frozen=True, slots=True)
class Iteration:
    """The surroundings of all layers in an iteration.

    `positions` and `slot_of_token` are [T] int32; without slots all keys and values are in the cache already.
    Only keys and values of all `tokens` are wanted from the stage's last layer, and hidden states only of
    the `wanted` tokens, where they are given.
    """

    positions: jax.Array
    slot_of_token: jax.Array | None
    tokens: Tokens
    wanted: Tokens | None = None
    shard: Shard = ALONE

    def context(
        self,
        layer: Layer,
        x: jax.Array,
        cache: LayerCache,
        rotation: Rotation | None,
        *,
        only_wanted: bool = False,
    ) -> "Context":
        """The context of a layer that x [T, H] enters; with `only_wanted` only wanted tokens leave it."""
        queries = self.wanted if only_wanted and self.wanted is not None else self.tokens
        n_queries = x.shape[0] if queries.at is None else queries.at.shape[0]
        shard, product, slices, exchange = self.shard, queries.product, None, self.shard.exchange
        if exchange is not None and exchange.wanted(layer, x.shape[1] * x.dtype.itemsize, n_queries):
            slices = Slices(shard, exchange, n_queries)
            shard, product = slices.scattering, slices.product(product)
        return Context(cache, rotation, self.slot_of_token, self.tokens, queries, product, shard, slices)


@dataclass(slots=True)
class Context:
    """The surroundings of one layer, in which it leaves its written `cache`, and the experts chosen.

    All `tokens` have keys and values; the `queries` among them attend, and go on after attention with
    `product` and `shard`. Where devices exchange tokens, each goes on with its slice of them, in `slices`.
    """

    cache: LayerCache
    rotation: Rotation | None
    slot_of_token: jax.Array | None
    tokens: Tokens
    queries: Tokens
    product: Matmul
    shard: Shard
    slices: Slices | None
    chosen: jax.Array | None = None  # [T, k] or [R, k] int32; None where there are no experts

    def wanted(self, x: jax.Array) -> jax.Array:
        """Select what goes on after attention: [T, H] to [R, H], or to this device's slice of that."""
        x = self.queries.of(x)
        return x if self.slices is None else self.slices.own(x)

    def whole(self, x: jax.Array) -> jax.Array:
        """Join the devices' slices of the tokens that went on: [R, H] on every device."""
        return x if self.slices is None else self.slices.whole(x)
