"""A layer's surroundings in an iteration: cache, slots, split over devices, wanted tokens.

An `Iteration` serves all layers. A `Context` is one layer's, which leaves its cache and chosen experts there.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import jax

from orca_jax.families.attention_config import Attention
from orca_jax.families.model_config import Layer
from orca_jax.model.kv_cache import (
    LayerCache,
    LayerMemory,
    LayerState,
    cache_in,
    state_in,
    with_cache,
    with_state,
)
from orca_jax.model.layers import Matmul, matmul
from orca_jax.model.recurrence import Rows
from orca_jax.model.rotation import Rotation
from orca_jax.model.shard import ALONE, Shard
from orca_jax.model.token_slices import Slices


class Attend(Protocol):
    """Split attention with this iteration's tables bound: the only operation that knows requests."""

    def __call__(
        self,
        q: jax.Array,
        cache: LayerCache,
        attention: Attention,
        bias: jax.Array | None,
        sinks: jax.Array | None,
        /,
    ) -> jax.Array:
        """Attend from q [T, n, K, D], whose first G slices are queries: [T, G, K, D or the value size].

        The slices after the queries let kernels read queries in place from the fused QKV product; keys and
        values are in the cache already. K counts the K/V heads of this device. `attention` is the layer's
        configuration, with G. `bias` float32 has ALiBi's slopes [G, K], or a relative bias
        [2 * max_distance + 1, K] by (key position - query position) from -max_distance on. `sinks` [G, K]
        float32 are one more score per head in the softmax's sum.
        """
        ...


@runtime_checkable
class AttendAndPlace(Attend, Protocol):
    """Attention that also writes the cache, and applies rotary positions, in one call."""

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
        """Rotate queries and keys, and write keys and values. Returns the queries and the written cache.

        The queries are the first `n_queries` slices of heads [T, n, K, D], the keys its slice `key`, the
        values the last slice of values [T, m, K, D]. A token whose slot_of_token [T] int32 is out of range is
        not written.
        """
        ...


class Tokens(NamedTuple):
    """Some tokens of an iteration, and the operations that are bound to them.

    `at` [R] int32 are their indices in the batch, maybe several of one request; None for the whole batch.
    `cross` attends to the slots that `Transformer.cross_caches` wrote.
    """

    attend: Attend
    product: Matmul = matmul
    cross: Attend | None = None
    at: jax.Array | None = None

    def of(self, x: jax.Array) -> jax.Array:
        """Select these tokens' rows: [T, ...] to [R, ...]."""
        return x if self.at is None else x.at[self.at].get(mode="clip")


class Beside(NamedTuple):
    """Values of all tokens that a layer is given beside x, in models that have them.

    They are its own input, the keys that an earlier layer selected, and where the tokens have been through
    the layer already (`Transformer.last_layer`), the results of the mixer beside attention.
    """

    layer_input: jax.Array | None = None  # [T, P]
    selected: jax.Array | None = None  # [T, top_k] int32 positions of keys; see selection.Selecting
    mixed: jax.Array | None = None  # [T, H]


_NOTHING = Beside()


@dataclass(frozen=True, slots=True)
class Iteration:
    """The values that all layers of an iteration share.

    `positions` and `slot_of_token` are [T] int32; without slots all keys and values are in the cache already.
    With `wanted`, the stage's last layer computes keys and values of all `tokens`, but hidden states of the
    wanted ones alone. `rows` are for recurrent layers; without slots it is None, because states know all
    tokens already. `layer_inputs` [T, L, P] are what each layer of the stage has as an input of its own.
    """

    positions: jax.Array
    slot_of_token: jax.Array | None
    tokens: Tokens
    wanted: Tokens | None = None
    shard: Shard = ALONE
    rows: Rows | None = None
    layer_inputs: jax.Array | None = None

    def context(
        self,
        layer: Layer,
        x: jax.Array,
        cache: LayerMemory,
        rotation: Rotation | None,
        beside: Beside = _NOTHING,
        *,
        only_wanted: bool = False,
    ) -> "Context":
        """The context of a layer with input x [T, H]; with `only_wanted` only wanted tokens leave it."""
        queries = self.wanted if only_wanted and self.wanted is not None else self.tokens
        n_queries = x.shape[0] if queries.at is None else queries.at.shape[0]
        shard, product, slices, exchange = self.shard, queries.product, None, self.shard.exchange
        if exchange is not None and exchange.wanted(layer, x.shape[1] * x.dtype.itemsize, n_queries):
            slices = Slices(shard, exchange, n_queries)
            shard, product = slices.scattering, slices.product(product)
        return Context(
            *(cache, self.positions, rotation, self.slot_of_token, self.tokens),
            *(queries, product, shard, slices, self.rows),
            **beside._asdict(),
        )


@dataclass(slots=True)
class Context:
    """One layer's surroundings. The layer replaces `held` by what it wrote, and sets its experts, `chosen`.

    Keys and values are computed for all `tokens`. The `queries` among them attend, and only they
    continue after attention, with `product` and `shard`. Where devices exchange tokens, each device
    then has its slice.

    `held` is what the layer keeps between iterations: an attention layer's `cache`, or a recurrent layer's
    `state`, whose new value is for all tokens, or both. `mixed` [T, H] is a recurrent layer's sum after its
    mixer, or beside attention the mixer's result, which is given where there are no slots. `selected` are the
    keys that an indexer selects for each token, here or in an earlier layer, for layers that share them.
    """

    held: LayerMemory
    positions: jax.Array  # [T] int32
    rotation: Rotation | None
    slot_of_token: jax.Array | None
    tokens: Tokens
    queries: Tokens
    product: Matmul
    shard: Shard
    slices: Slices | None
    rows: Rows | None = None
    mixed: jax.Array | None = None
    layer_input: jax.Array | None = None  # [T, P]
    chosen: jax.Array | None = None  # [T, k] or [R, k] int32; None without experts
    selected: jax.Array | None = None  # [T, top_k] int32 positions of keys; see selection.Selecting

    @property
    def cache(self) -> LayerCache:
        """An attention layer's keys and values."""
        found = cache_in(self.held)
        assert found is not None
        return found

    @cache.setter
    def cache(self, written: LayerCache) -> None:
        self.held = with_cache(self.held, written)

    @property
    def state(self) -> LayerState:
        """A recurrent layer's states, by their names in its `state_shapes`."""
        found = state_in(self.held)
        assert found is not None
        return found

    @state.setter
    def state(self, new: LayerState) -> None:
        self.held = with_state(self.held, new)

    @property
    def joining(self) -> Shard:
        """The shard that sums the devices' parts of all tokens, as a recurrent mixer needs it."""
        return replace(self.shard, joined=self.shard.total)

    def wanted(self, x: jax.Array) -> jax.Array:
        """Select the tokens that continue after attention: [T, H] to [R, H], or to this device's slice."""
        x = self.queries.of(x)
        return x if self.slices is None else self.slices.own(x)

    def whole(self, x: jax.Array) -> jax.Array:
        """Join the devices' slices of the tokens that went on: [R, H] on every device."""
        return x if self.slices is None else self.slices.whole(x)
