"""A decoder whose layers a user wrote: they get x, positions and `attend`, and know nothing of requests.

The user's code is global, as in training: XLA partitions it by the weights' PartitionSpecs. Attention alone
is written for one device, and runs on each device's own K/V heads.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orca_jax.errors import ConfigError
from orca_jax.families.model_config import ModelConfig
from orca_jax.model.block import LayerOutput
from orca_jax.model.context import Attend, Iteration
from orca_jax.model.kv_cache import LayerCache, write
from orca_jax.model.layers import Matmul, matmul
from orca_jax.model.shard import ALONE, Shard
from orca_jax.model.transformer import LayersOutput
from orca_jax.sharding.device_group import TENSOR
from orca_jax.sharding.specs import CACHE_SPEC

AttendOwn = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class OwnLayer(Protocol):
    """A layer: an nnx module with this call."""

    def __call__(self, x: jax.Array, positions: jax.Array, attend: AttendOwn, /) -> jax.Array:
        """x [..., H] to [..., H]; positions are integers that broadcast against x without its last axis.

        `attend(q, k, v)` is causal attention with the scale head_size ** -0.5, to be called once: q and its
        result are [..., N, D], k and v [..., K, D], and query head n attends to K/V head n * K // N.
        """
        ...


class OwnModel(Protocol):
    """A model as the engine needs it: an nnx module with these attributes and methods.

    `layers` is an nnx.List. All layers have the same numbers of heads. It may also have `eos_token_ids`, the
    `tokenizer` as a path to its tokenizer.json, and `ffn_size`, the width of a layer where it is widest, from
    which memory for temporaries is estimated (default: 4 times `hidden_size`).
    """

    vocab_size: int
    n_positions: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    layers: Sequence[Any]  # of OwnLayer

    def embed(self, token_ids: jax.Array, positions: jax.Array, /) -> jax.Array:
        """token_ids and positions, [...] int32, to what goes into the first layer, [..., H]."""
        ...

    def unembed(self, x: jax.Array, /) -> jax.Array:
        """The last layer's output, [..., H], to logits [..., V]."""
        ...


def try_once(model: OwnModel) -> None:
    """Trace a forward pass of three tokens, without a device. Raises ConfigError for an unexpected shape."""
    n = 3
    query, key = (n, model.n_heads, model.head_size), (n, model.n_kv_heads, model.head_size)

    def forward(token_ids: jax.Array) -> None:
        positions = jnp.arange(n, dtype=jnp.int32)
        x = model.embed(token_ids, positions)
        if x.shape != (n, model.hidden_size):
            raise ConfigError(f"embed makes {x.shape} of {n} tokens, and hidden_size is {model.hidden_size}")
        for i, layer in enumerate(model.layers):
            n_calls = 0

            def attend(q: jax.Array, k: jax.Array, v: jax.Array, i: int = i) -> jax.Array:
                nonlocal n_calls
                n_calls += 1
                if (q.shape, k.shape, v.shape) != (query, key, key):
                    raise ConfigError(
                        f"layer {i} calls attend with q {q.shape}, k {k.shape} and v {v.shape}; for {n} "
                        f"tokens n_heads, n_kv_heads and head_size say {query}, {key} and {key}"
                    )
                return jnp.zeros_like(q)

            x = layer(x, positions, attend)
            if n_calls != 1:
                raise ConfigError(
                    f"layer {i} calls attend {n_calls} times; it must once, for it has one cache"
                )
            if x.shape != (n, model.hidden_size):
                raise ConfigError(f"layer {i} makes {x.shape} of {(n, model.hidden_size)}; it must keep it")
        logits = model.unembed(x)
        if logits.ndim != 2 or logits.shape[0] != n or logits.shape[1] < model.vocab_size:
            raise ConfigError(
                f"unembed makes {logits.shape} of {n} tokens, and vocab_size is {model.vocab_size}"
            )

    jax.eval_shape(forward, jax.ShapeDtypeStruct((n,), jnp.int32))


class OwnParameters(dict[str, jax.Array]):
    """The weights of one stage by their names in the user's model, and the decoder that has them.

    `names` are the names of all leaves of the decoder's state, in the order of `jax.tree.flatten`; those in
    `optional` (random keys, counters, statistics) are no parameters, so an update may leave them out.
    """

    def __init__(
        self, decoder: "OwnDecoder", weights: dict[str, jax.Array], names: Sequence[str], optional: set[str]
    ) -> None:
        super().__init__(weights)
        self.decoder = decoder
        self.names = list(names)
        self.optional = optional


class OwnDecoder(nnx.Module):
    """Some layers of an OwnModel, with what is before and after them; in the place of a Transformer.

    `rest` is the model without its layers, for the first and the last stage. `mesh` is that of the devices
    over which the layers are split, None for one device.
    """

    def __init__(
        self, config: ModelConfig, layers: Sequence[nnx.Module], rest: nnx.Module | None, mesh: Mesh | None
    ) -> None:
        self.config = config
        self.layers = nnx.List(layers)
        self.rest = rest
        self.mesh = mesh

    def embed(
        self, token_ids: jax.Array, positions: jax.Array, shard: Shard = ALONE, product: Matmul = matmul
    ) -> jax.Array:
        """As Transformer.embed."""
        model: Any = self.rest
        return self._whole(model.embed(token_ids, positions))

    def through(self, x: jax.Array, caches: list[LayerCache], iteration: Iteration) -> LayersOutput:
        """As Transformer.through, but for all tokens: what a layer does with them is not known."""
        assert iteration.wanted is None and iteration.tokens.cross is None
        slots = iteration.slot_of_token
        assert slots is not None

        # Traced once for all layers of a kind, as in Transformer.
        @partial(jax.jit, static_argnums=0)
        def run(graph: Any, weights: Any, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
            attention = _Attention(self.config, cache, slots, iteration.tokens.attend, self.mesh)
            out = nnx.merge(graph, weights)(x, iteration.positions, attention)
            assert attention.written is not None, "try_once has seen that a layer calls attend"
            return self._whole(out), attention.written

        written: list[LayerCache] = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = run(*nnx.split(layer), x, cache)
            written.append(cache)
        x = x.astype(caches[0].dtype)
        return LayersOutput(x, x, written)

    def last_layer(self, x: jax.Array, cache: LayerCache, iteration: Iteration) -> LayerOutput:
        """As Transformer.last_layer, of what comes from the last layer already."""
        return LayerOutput(x, cache, None)

    def final_states(self, x: jax.Array, product: Matmul = matmul) -> jax.Array:
        """As Transformer.final_states, but the last layer's: `unembed` alone knows what follows."""
        return x

    def logits(self, x: jax.Array, shard: Shard = ALONE, product: Matmul = matmul) -> jax.Array:
        """As Transformer.logits."""
        model: Any = self.rest
        logits = model.unembed(x)
        return self._whole(logits[:, : self.config.vocab_size].astype(jnp.float32))

    def _whole(self, x: jax.Array) -> jax.Array:
        """x, whole on every device."""
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P()))


class _Attention:
    """`attend` of one layer in one iteration: keys and values go into the cache, queries attend to it."""

    def __init__(
        self,
        config: ModelConfig,
        cache: LayerCache,
        slot_of_token: jax.Array,
        attend: Attend,
        mesh: Mesh | None,
    ) -> None:
        self._config = config.attention
        self._cache = cache
        self._slot_of_token = slot_of_token
        self._attend = attend
        self._mesh = mesh
        self.written: LayerCache | None = None  # after the call

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        n_tokens, own, dtype = self._slot_of_token.shape[0], self._config, self._cache.dtype
        by_group = q.reshape(n_tokens, own.n_kv_heads, own.group, own.head_size).swapaxes(1, 2)
        compute = self._on_device
        if self._mesh is not None:
            heads, grouped = P(None, TENSOR), P(None, None, TENSOR)
            compute = jax.shard_map(
                compute,
                mesh=self._mesh,
                in_specs=(grouped, heads, heads, CACHE_SPEC),
                out_specs=(grouped, CACHE_SPEC),
                check_vma=False,  # as in execution/stage.py
            )
        out, self.written = compute(by_group.astype(dtype), k.astype(dtype), v.astype(dtype), self._cache)
        return out.swapaxes(1, 2).reshape(q.shape).astype(q.dtype)

    def _on_device(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        """Attention of one device's K/V heads: q [T, G, K, D]."""
        cache = write(cache, k, v, self._slot_of_token)
        return self._attend(q, cache, self._config, None, None), cache
